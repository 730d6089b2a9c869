"""The files in recipes/ start the same mains as the command."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("script", "field"),
    [
        ("generate_data.py", "--temperatures"),
        ("train_eagle.py", "--draft_vocab_size"),
        ("train_medusa.py", "--num_heads"),
        ("distill_draft.py", "--keep_every"),
    ],
)
def test_a_recipe_lists_its_fields(script, field, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPES / script), run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert field in said
    assert "--config" in (RECIPES / script).read_text()


def test_a_mistake_in_a_config_is_one_line(monkeypatch, capsys, tmp_path):
    config = tmp_path / "recipe.yaml"
    config.write_text("learning_rat: 1\n")
    monkeypatch.setattr(sys, "argv", ["train_eagle.py", "--config", str(config)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPES / "train_eagle.py"), run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Did you mean 'learning_rate'?" in said
    assert len(said.splitlines()) == 1


def test_every_recipe_is_tested_here():
    assert {path.name for path in RECIPES.glob("*.py")} == {
        "generate_data.py",
        "train_eagle.py",
        "train_medusa.py",
        "distill_draft.py",
    }
