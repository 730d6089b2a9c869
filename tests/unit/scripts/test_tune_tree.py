"""scripts/tune_tree.py: what it tries, what it measures of Medusa heads, and what --write leaves behind."""

from pathlib import Path

import pytest
import torch

from scripts import tune_tree
from spechead import load_head
from spechead.bench.prompts import Prompt
from spechead.bench.results import Cell, Load
from tests.tiny import table_model
from tests.tiny_heads import make_head
from tests.tiny_tokenizer import tiny_tokenizer

COUNTING = [0, 1, 2, 3, 5, 6, 7, 4, *range(9, 48), 8]  # 4 5 6 7 and over again, 8 .. 47 likewise
PROMPT = Prompt("a", "count", ({"role": "user", "content": "w8"},))


@pytest.fixture
def directory(tmp_path: Path) -> str:
    table_model(COUNTING).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_the_fastest_tree_becomes_the_default(
    kind: str, directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_head(kind, table_model(COUNTING)).save_pretrained(tmp_path / "head")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "group": "x", "prompt": "w8 w9"}\n{"id": "b", "group": "y", "prompt": "w4"}\n')
    sizes = ["--depths", "2", "--sizes", "3", "5", "--branching", "2", "--thresholds", "0", "0.5"]
    arguments = ["--target", directory, "--dtype", "float32", "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert tune_tree.main([str(tmp_path / "head"), *arguments, *sizes, "--write"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tried = [line for line in lines if "length" in line]
    assert len(tried) == (4 if kind == "medusa" else 6)
    ratios = [float(line.split("x [")[0].split("x ")[0].split()[-1].rstrip("x")) for line in tried]
    assert ratios == sorted(ratios, reverse=True)
    config = load_head(tmp_path / "head").config
    best = next(line for line in lines if "is now the default" in line)
    assert any(line.split("x [")[0].startswith(best.split(" is now")[0]) for line in tried)
    if best.startswith("dynamic"):
        assert (config.tree, config.branching, config.tree_size) == ("dynamic", 2, int(best.split()[1]))
    elif kind == "medusa":
        assert len(config.tree) == int(best.split()[1])
    elif best.startswith("chain"):
        assert (config.tree, config.num_draft_tokens) == ("chain", 2)
    else:
        assert (config.tree, config.num_draft_tokens, config.branching) == ("dynamic", 2, 2)
        assert config.tree_size == int(best.split()[2])
    assert config.confidence_threshold == (None if kind == "medusa" else 0.5 if "from 0.5" in best else 0)


def test_of_trees_as_fast_as_each_other_the_longest_acceptance_wins() -> None:
    trees = {"wide": (1.30, 1.9), "deep": (1.28, 2.1), "slow": (1.20, 2.4)}
    cells = [
        Cell(0, "mean", name, 6, 30.0, ratio, None, None, 0.1, acceptance_length=length)
        for name, (ratio, length) in trees.items()
    ]
    assert [tune_tree.pick(cells, tie) for tie in (0.0, 0.02, 0.1)] == ["wide", "deep", "slow"]


def test_medusas_accuracies_are_shares_of_places_where_a_guess_is_the_targets_token() -> None:
    model, tokenizer = table_model(COUNTING).eval(), tiny_tokenizer()
    load, row = Load(max_new_tokens=10), tune_tree.encode(tiny_tokenizer(), PROMPT.messages)
    answer = tune_tree.run_once(tune_tree.Method("plain", model), [row], load, 0).tokens[0]
    assert len(set(answer)) == 1, "the target repeats the last token of its template"

    class Guesses(torch.nn.Module):
        """Head 0 has the target's token first; head 1 second, in every other place."""

        config = make_head("medusa", model, num_heads=2).config
        taps = config.taps

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(2, len(states), 48)
            logits[0, :, answer[0]] = 1.0
            logits[1] = torch.arange(48) / 48
            logits[1, :, answer[0]] = -1.0
            logits[1, ::2, answer[0]] = 46.5 / 48
            return logits

    first, second = tune_tree.medusa_accuracies(model, Guesses(), tokenizer, [PROMPT], load)
    places = range(len(row) - 1, len(row) + 10 - 3)
    assert first[0] == 1.0
    assert sum(first[1:]) == 0.0
    assert second[1] == pytest.approx(sum(place % 2 == 0 for place in places) / len(places))
    assert second[0] == 0.0
