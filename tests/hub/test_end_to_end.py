"""Publish, delete the local cache, load by repo id, and generate both ways, in a process of their own.

Every library reads the Hub's settings from the environment at import, as it does for a user. The head is random, so
the output says nothing about quality: it must equal plain greedy decoding, and tokens must have been drafted.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub import standin
from tests.hub.heads import head_directory
from tests.unit.heads.targets import make_target

ROOT = Path(__file__).resolve().parents[2]
REPO = "user/tiny-eagle3"
ONLINE = """
import shutil, sys, torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM
from spechead import enable_speculation
from spechead.cli.main import app

torch.set_num_threads(1)
target_dir, head_dir, repo = sys.argv[1:]
try:
    app(args=["publish", repo, head_dir, "--license", "apache-2.0", "--target", target_dir], prog_name="spechead")
except SystemExit as end:
    assert not end.code, end.code
shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)

def target():
    return AutoModelForCausalLM.from_pretrained(target_dir)

prompt = torch.tensor([[5, 9, 2, 14, 7, 3, 30, 11]])
asked = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
plain = target().generate(prompt, **asked).sequences

model = enable_speculation(target(), head=repo, revision="main")
ours = model.generate(prompt, speculative="eagle", **asked)
assert torch.equal(ours.sequences, plain), (ours.sequences, plain)
assert ours.stats.steps > 0 and ours.stats.drafted_tokens > 0, ours.stats

model = target()
theirs = model.generate(prompt, custom_generate=repo, trust_remote_code=True, **asked)
assert torch.equal(theirs.sequences, plain), (theirs.sequences, plain)
assert theirs.stats.drafted_tokens == ours.stats.drafted_tokens > 0
again = model.generate(prompt, custom_generate=repo, trust_remote_code=True, speculative="eagle", **asked)
assert torch.equal(again.sequences, plain)
assert torch.equal(model.generate(prompt, **asked).sequences, plain)
assert type(model) is type(target())  # nothing of the calls is left: neither a class nor a module
assert {name for name, _ in model.named_modules()} == {name for name, _ in target().named_modules()}
print("ALL-ONLINE")
"""
OFFLINE = """
import sys, torch
from transformers import AutoModelForCausalLM
from spechead import enable_speculation

torch.set_num_threads(1)
target_dir, _, repo = sys.argv[1:]
model = enable_speculation(AutoModelForCausalLM.from_pretrained(target_dir), head=repo)
prompt = torch.tensor([[5, 9, 2, 14, 7, 3, 30, 11]])
asked = {"max_new_tokens": 20, "do_sample": False}
assert torch.equal(model.generate(prompt, speculative="eagle", **asked), model.generate(prompt, **asked))
other = AutoModelForCausalLM.from_pretrained(target_dir)
theirs = other.generate(prompt, custom_generate=repo, trust_remote_code=True, **asked)
assert torch.equal(theirs, model.generate(prompt, **asked))
print("ALL-OFFLINE")
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user's environment: a Hub, a home of its own, a token, and spechead installed."""
    paths = [str(ROOT)]
    try:
        importlib.metadata.version("spechead")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout: requirements.txt asks for the distribution
        record = tmp_path / "site" / "spechead-0.1.0.dist-info"
        record.mkdir(parents=True)
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: spechead\nVersion: 0.1.0\n")
        paths.append(str(record.parent))
    return os.environ | {
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_TOKEN": standin.TOKEN,
        "PYTHONPATH": os.pathsep.join(paths),
    }


def run(script: str, environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_publish_delete_the_cache_load_by_repo_id_and_generate_both_ways(environment, tmp_path):
    target = make_target(layers=8)
    target.save_pretrained(tmp_path / "target")
    head_directory(tmp_path / "head", target=target, draft_vocab_size=16)
    arguments = (str(tmp_path / "target"), str(tmp_path / "head"), REPO)
    with standin.running() as hub:
        online = environment | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        shown = run(ONLINE, online, *arguments)
        assert f"published {REPO}" in shown
        assert shown.endswith("ALL-ONLINE\n")
        assert any("/resolve/" in request and "custom_generate/generate.py" in request for request in hub.requests)
        seen = len(hub.requests)
        offline = environment | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1"}
        assert run(OFFLINE, offline, *arguments).endswith("ALL-OFFLINE\n")
        assert hub.requests[seen:] == []
