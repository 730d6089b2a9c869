"""docs/extend.md: its worked example is short, runs as it stands, and keeps its promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from spechead import enable_speculation
from tests.tiny import VOCAB, fresh_model, left_padded, prompt_ids, table_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extend.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
NEW = 64


def example() -> Any:
    """Return the class that the page's first block defines."""
    scope: dict[str, Any] = {"__name__": "users_own_module"}
    exec(compile(BLOCKS[0], str(PAGE), "exec"), scope)
    return scope["BigramProposer"]


def test_example_has_fewer_than_60_lines_and_imports_public_names_only() -> None:
    lines = BLOCKS[0].splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 119
    assert re.findall(r"from (spechead\S*) import", BLOCKS[0]) == ["spechead"]


def test_the_blocks_run_one_after_the_other() -> None:
    corpus = [fresh_model("llama").generate(prompt_ids(seed=seed), max_new_tokens=60)[0].tolist() for seed in range(4)]
    target, inputs = fresh_model("llama"), {"input_ids": prompt_ids(seed=1)}
    scope: dict[str, Any] = {"enable_speculation": enable_speculation, "corpus": corpus} | {
        "target": target,
        "inputs": inputs,
    }
    for block in (BLOCKS[0], BLOCKS[1], BLOCKS[3]):  # the third is a line for inside of propose
        exec(compile(block, str(PAGE), "exec"), scope)
    assert scope["out"].stats.method == "bigram"


@pytest.mark.parametrize("batch", [1, 3])
def test_a_corpus_of_the_models_own_text_pays(batch: int) -> None:
    target = fresh_model("llama")
    inputs: dict[str, Any] = {"input_ids": prompt_ids()}
    if batch > 1:
        inputs = dict(zip(("input_ids", "attention_mask"), left_padded(batch), strict=True))
    plain = target.generate(**inputs, max_new_tokens=NEW)
    proposer = example()(plain[:, 12:].tolist(), VOCAB)
    model = enable_speculation(target)
    out = model.generate(**inputs, speculative=proposer, max_new_tokens=NEW, return_dict_in_generate=True)
    assert out.sequences.tolist() == plain.tolist()
    assert out.stats.acceptance_length > 1.05
    sampled = model.generate(**inputs, speculative=proposer, do_sample=True, max_new_tokens=NEW)
    assert sampled.shape == plain.shape


def test_a_table_that_knows_the_target_is_kept_whole() -> None:
    cycle = [1, 2, 3, 4, 5, 6, 7, 0]
    model = enable_speculation(table_model(cycle))
    inputs = {"input_ids": torch.tensor([[3]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    proposer = example()([cycle * 3], vocab_size=8, num_draft_tokens=4)
    out = model.generate(**inputs, speculative=proposer, max_new_tokens=21, return_dict_in_generate=True)
    assert out.sequences[0].tolist() == [3, *(cycle * 4)[3:24]]
    assert out.stats.steps == 4
    assert out.stats.acceptance_rate == 1.0


def test_rare_pairs_propose_nothing() -> None:
    proposer = example()([[1, 2, 1, 2, 1, 3, 4, 4]], vocab_size=8, min_count=2)
    assert proposer.successor.tolist() == [-1, 2, 1, -1, -1, -1, -1, -1]
