"""scripts/render_model_cards.py, and that scripts/check_speculators.py exports what it then compares."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from tests.hub.heads import head_directory

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cards_are_rendered_checked_and_kept_in_step(tmp_path, capsys):
    render = script("render_model_cards").main
    head = head_directory(tmp_path / "head", draft_vocab_size=16)
    with pytest.raises(SystemExit):
        render([str(head)])
    assert render([str(head), "--repo-id", "user/x", "--license", "mit"]) == 0
    assert render([str(head), "--check"]) == 0
    text = (head / "README.md").read_text(encoding="utf-8")
    (head / "README.md").write_text(text.replace("1.63x", "1.73x"), encoding="utf-8")
    assert render([str(head), "--check"]) == 1
    assert "1.73x" in capsys.readouterr().out
    assert render([str(head)]) == 0
    assert (head / "README.md").read_text(encoding="utf-8") == text


def test_the_speculators_check_exports_every_case_and_notices_a_difference(tmp_path, capsys):
    """Without the package: its logits are stood in for by our own, then by ones that are off."""
    check = script("check_speculators")
    expected = check.export_cases(tmp_path)
    assert set(expected) == set(check.CASES)
    from safetensors.torch import save_file

    for number, logits in enumerate(expected.values()):
        directory = tmp_path / f"case-{number}"
        inputs = load_file(directory / "inputs.st")
        assert inputs["features"].shape == (1, check.LENGTH, 3 * check.HIDDEN)
        assert inputs["ids"].shape == (1, check.LENGTH)
        for step in range(check.STEPS):
            assert torch.isfinite(logits[step, : check.LENGTH - step]).all()
        (directory / "facts.json").write_text('{"class": "ours", "dtype": "float32"}')
        save_file({"logits": logits.nan_to_num()}, directory / "logits.st")
    assert check.report(tmp_path, expected) == 0
    off = expected["llama"].nan_to_num()
    off[2, 0, 0] += 1e-3
    save_file({"logits": off}, tmp_path / "case-0" / "logits.st")
    assert check.report(tmp_path, expected) == 1
    assert "1.0e-03" in capsys.readouterr().out
