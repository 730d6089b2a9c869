"""`spechead train` passes everything on to the recipe's own parser, and prints what the recipe has to say once."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from spechead.cli.train import train
from spechead.training import draft, generate, run
from spechead.training.run import Outcome

MAINS = {
    "data": (generate, "generate_data"),
    "eagle": (run, "train_eagle"),
    "medusa": (run, "train_medusa"),
    "draft": (draft, "distill_draft"),
}


@pytest.mark.parametrize("what", MAINS)
def test_arguments_go_to_the_recipe_and_its_lines_are_printed(what, monkeypatch):
    module, name = MAINS[what]
    given = []

    def main(argv):
        given.append(list(argv))
        return ["said"] if what == "data" else Outcome(None, ["said"])

    monkeypatch.setattr(module, name, main)
    result = CliRunner().invoke(train, [what, "--config", "a.yaml", "--learning_rate", "1e-4", "--data", "b", "c"])
    assert result.exit_code == 0, result.output
    assert result.output == "said\n"
    assert given == [["--config", "a.yaml", "--learning_rate", "1e-4", "--data", "b", "c"]]


def test_help_of_a_recipe_lists_its_fields():
    result = CliRunner().invoke(train, ["eagle", "--help"])
    assert result.exit_code == 0
    for name in ("--draft_vocab_size", "--learning_rate", "--init_head", "--tokens_per_batch"):
        assert name in result.output


def test_help_of_train_lists_the_recipes():
    result = CliRunner().invoke(train, ["--help"])
    assert all(what in result.output for what in MAINS)


def test_an_unknown_name_is_an_error_with_the_nearest_one():
    result = CliRunner().invoke(train, ["eagle", "--target", "t", "--data", "d", "--depht", "3"])
    assert isinstance(result.exception, ValueError)
    assert "'depths'" in str(result.exception)
