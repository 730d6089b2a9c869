"""custom_generate: the published file, and the call that leaves the model as it was."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from spechead import enable_speculation
from spechead.attach import SUPPORT_KEY
from spechead.hub import remote
from spechead.hub.publish import CODE
from spechead.hub.remote import commit_of, generate_with_head
from tests.hub.heads import head_directory
from tests.unit.heads.targets import make_head, make_target

PROMPT = torch.tensor([[5, 9, 2, 14, 7, 3, 30, 11]])
ASKED = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture
def target():
    return make_target(layers=8)


def module_of(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_generate", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("kind", "method"), [("eagle3", "eagle"), ("eagle", "eagle"), ("medusa", "medusa")])
def test_the_heads_own_method_is_the_default_and_nothing_is_left(kind, method, target, tmp_path):
    directory = head_directory(tmp_path / "head", kind, target)
    plain = target.generate(PROMPT, **ASKED).sequences
    kept = type(target)
    out = generate_with_head(target, str(directory), inputs=PROMPT, generation_config=None, **ASKED)
    assert torch.equal(out.sequences, plain)
    assert out.stats.method == method
    assert out.stats.drafted_tokens > 0
    assert type(target) is kept
    assert SUPPORT_KEY not in target.__dict__
    assert torch.equal(target.generate(PROMPT, **ASKED).sequences, plain)


def test_the_head_is_loaded_once_a_model(target, tmp_path, monkeypatch):
    directory = head_directory(tmp_path / "head", target=target)
    loads = []
    honest = remote.load_head
    monkeypatch.setattr(remote, "load_head", lambda *args, **kwargs: loads.append(args) or honest(*args, **kwargs))
    for _ in range(3):
        generate_with_head(target, str(directory), inputs=PROMPT, **ASKED)
    assert len(loads) == 1
    generate_with_head(make_target(layers=8), str(directory), inputs=PROMPT, **ASKED)
    assert len(loads) == 2


def test_what_the_user_had_attached_is_put_back_also_after_an_error(target, tmp_path):
    directory = head_directory(tmp_path / "head", "medusa", target)
    own = make_head("eagle3", target)
    enable_speculation(target, head=own)
    state = target.__dict__[SUPPORT_KEY]
    out = generate_with_head(target, str(directory), inputs=PROMPT, **ASKED)
    assert out.stats.method == "medusa"
    with pytest.raises(ValueError, match="num_beams"):
        generate_with_head(target, str(directory), inputs=PROMPT, num_beams=3)
    assert target.__dict__[SUPPORT_KEY] is state
    assert state.heads == [own]
    assert target.generate(PROMPT, speculative="eagle", **ASKED).stats.method == "eagle"


def test_an_instances_own_generate_is_put_back(target, tmp_path):
    directory = head_directory(tmp_path / "head", target=target)
    target.generate = own = lambda *args, **kwargs: "own"
    generate_with_head(target, str(directory), inputs=PROMPT, **ASKED)
    assert target.generate is own


def test_a_head_that_does_not_fit_leaves_the_model_untouched(target, tmp_path):
    directory = head_directory(tmp_path / "head", target=make_target(layers=6))
    kept = type(target)
    with pytest.raises(ValueError, match="trained for a target of 6 layers"):
        generate_with_head(target, str(directory), inputs=PROMPT, **ASKED)
    assert type(target) is kept
    assert SUPPORT_KEY not in target.__dict__


def test_the_commit_is_read_off_the_module_cache():
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert commit_of(f"/cache/transformers_modules/user/name/{commit}/custom_generate/generate.py") == commit
    assert commit_of("/somewhere/head/custom_generate/generate.py") is None
    assert commit_of(None) is None


def test_the_published_file_hands_over_repo_and_commit(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    file = tmp_path / commit / "custom_generate" / "generate.py"
    file.parent.mkdir(parents=True)
    file.write_text((CODE / "generate.py").read_text().replace("<repo_id>", "user/x"))
    seen = {}
    monkeypatch.setattr(
        remote, "generate_with_head", lambda model, head, **rest: seen.update(model=model, head=head, **rest)
    )
    module = module_of(file)
    module.generate("model", inputs=1, streamer=None)
    assert seen["head"] == "user/x"
    assert commit_of(seen["code_file"]) == commit
    module.generate("model", head="other/y")
    assert seen["head"] == "other/y"
    assert seen["code_file"] is None
    assert (CODE / "requirements.txt").read_text() == "spechead>=0.1\n"
