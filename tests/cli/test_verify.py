"""`spechead verify` on a tiny target: the certificate it writes, its exit codes, what it prints and refuses."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from spechead.bench import certificate as certificate_file
from spechead.proposers.draft_model import DraftModelProposer
from tests.cli.conftest import Run
from tests.tiny import fresh_model
from tests.tiny_tokenizer import tiny_tokenizer

FAST = ["--max-new-tokens", "12", "--batch-size", "2", "--group", "chat", "--group", "code", "--law-prompts", "1"]
FAST += ["--effect-size", "0.4", "--power", "0.9", "--rows", "128"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A random target and a draft that agrees with it often."""
    directory = tmp_path_factory.mktemp("pair")
    target = fresh_model("llama")
    target.config.max_position_embeddings = 1024
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(directory / name)
        tiny_tokenizer().save_pretrained(directory / name)
    return str(directory / "target"), str(directory / "draft")


def test_a_sound_pair_gets_a_certificate(run: Run, pair: tuple[str, str]) -> None:
    target, draft = pair
    arguments = ["--draft-model", draft, "--method", "draft_model", "--output", "cert.json", *FAST]
    result = run("verify", "--target", target, *arguments)
    assert result.exit_code == 0, result.output
    found = certificate_file.load(Path("cert.json"))
    assert found.passed is True
    assert [model.role for model in found.models] == ["target", "draft"]
    assert all(model.fingerprint for model in found.models)
    assert found.command[:1] == ["spechead"]
    assert found.prompts.keys() == {"chat", "code"}
    assert found.settings.effect_size == 0.4
    (method,) = found.methods
    assert method.law is not None
    assert method.law.power >= 0.9
    for text in ("draft_model: passed", "chi-square", "near ties", "plain forwards", "power"):
        assert text in result.stdout


def test_a_fault_fails_with_its_name(run: Run, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = DraftModelProposer._draw

    def planted(self: Any, *arguments: Any) -> Any:
        law, *_ = shipped(self, *arguments)
        return law, law.argmax(-1)

    monkeypatch.setattr(DraftModelProposer, "_draw", planted)
    target, draft = pair
    arguments = ["--draft-model", draft, "--method", "draft_model", "--output", "cert.json", *FAST]
    result = run("verify", "--target", target, *arguments)
    assert result.exit_code == 1
    assert "FAULT wrong q" in result.stdout
    assert "draft_model: FAILED" in result.stdout
    found = certificate_file.load(Path("cert.json"))
    assert found.passed is False
    assert found.methods[0].faults[0].name == "wrong q"


def test_a_lossy_rule_gets_a_distance(run: Run, pair: tuple[str, str]) -> None:
    target, draft = pair
    arguments = ["--draft-model", draft, "--method", "draft_model", "--acceptance", "typical", *FAST]
    result = run("verify", "--target", target, *arguments)
    assert result.exit_code == 0, result.output
    assert "draft_model (lossy)" in result.stdout
    assert "total variation" in result.stdout
    assert "passed" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "magic"], "'magic' is no method"),
        (["--method", "eagle"], "needs a head"),
        (["--top-k", "50"], "outcomes"),
        (["--temperature", "0"], "samples nothing"),
        (["--group", "poems"], "no prompt is of group poems"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    run: Run, pair: tuple[str, str], arguments: list[str], message: str
) -> None:
    result = run("verify", "--target", pair[0], *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
