"""scripts/average_heads.py: the mean of weights, one vocabulary, the provenance of all."""

from pathlib import Path

import pytest
import torch

from scripts import average_heads
from spechead import load_head
from tests.tiny import tiny_model
from tests.tiny_heads import make_head


def saved(directory: Path, seed: int, kind: str = "eagle3", first: int = 0, **overrides: object) -> Path:
    head = make_head(kind, tiny_model("llama"), seed=seed, **overrides)
    if kind == "eagle3":
        head.set_draft_vocab(torch.arange(first, first + head.config.draft_vocab_size))
    head.save_pretrained(directory)
    (directory / "training_prompts.txt").write_text(f"{seed:016x}\n{'a' * 16}\n")
    (directory / "recipe.yaml").write_text(f"seed: {seed}\n")
    return directory


def test_weights_are_averaged_and_prompts_of_all_are_kept(tmp_path: Path) -> None:
    heads = [saved(tmp_path / str(seed), seed, draft_vocab_size=20) for seed in (1, 2, 3)]
    assert average_heads.main([*map(str, heads), "--output", str(tmp_path / "out")]) == 0
    states = [load_head(path).state_dict() for path in heads]
    got = load_head(tmp_path / "out").state_dict()
    assert not torch.equal(states[0]["fc.weight"], states[1]["fc.weight"])
    for name, tensor in got.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, torch.stack([state[name] for state in states]).mean(0))
        else:
            assert torch.equal(tensor, states[0][name])
    assert (tmp_path / "out" / "training_prompts.txt").read_text().split() == [
        *(f"{seed:016x}" for seed in (1, 2, 3)),
        "a" * 16,
    ]
    recipe = (tmp_path / "out" / "recipe.yaml").read_text().splitlines()
    assert recipe == ["# The weights are the average of 3 heads; this is how the first was trained.", "seed: 1"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"kind": "eagle"}, "heads of one kind and size"),
        ({"draft_vocab_size": 12}, "heads of one kind and size"),
        ({"draft_vocab_size": 20, "first": 5}, "another draft vocabulary"),
    ],
)
def test_heads_that_have_no_average_are_refused(second: dict[str, object], message: str, tmp_path: Path) -> None:
    heads = [saved(tmp_path / "a", 1, draft_vocab_size=20), saved(tmp_path / "b", 2, **second)]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        average_heads.main([*map(str, heads), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_one_head_is_no_average(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        average_heads.main([str(saved(tmp_path / "a", 1)), "--output", str(tmp_path / "out")])
