"""Greedy equality of Medusa, EAGLE-1 and EAGLE-3: the ids of plain `generate`, in every cell of the matrix.

Heads are random (nearly everything is rejected) or overfitted to the target's own text (nearly everything is kept).
Every cell asserts from `stats` that it drafted in the shape it was asked for, so that none can pass by plain decoding.
"""

import itertools

import pytest
import torch

from spechead import SpeculativeConfig, enable_speculation
from tests.lossless.test_greedy_equality import covering_array
from tests.tiny import ATTENTION, FAMILIES, fresh_model, left_padded
from tests.tiny_heads import KINDS, head_for, method_of

NEW_TOKENS = 24
FACTORS = {
    "family": FAMILIES,
    "attention": ATTENTION,
    "kind": KINDS,
    "tree": ("chain", "static", "dynamic"),
    "head": ("random", "overfitted"),
    "batch": (1, 4),
}


def possible(cell):
    """Medusa's heads guess without looking at each other's guesses: there is nothing to expand dynamically."""
    return not {"medusa", "dynamic"} <= set(cell)


FULL = [cell for cell in itertools.product(*FACTORS.values()) if possible(cell)]
SELECTED = set(covering_array(FULL))
CELLS = [
    pytest.param(*cell, id="-".join(map(str, cell)), marks=[] if cell in SELECTED else [pytest.mark.slow])
    for cell in FULL
]


@pytest.mark.parametrize(tuple(FACTORS), CELLS)
def test_greedy_equals_plain(family, attention, kind, tree, head, batch):
    model = fresh_model(family, attention)
    ids, mask = left_padded(batch)
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain = model.generate(**call)
    enable_speculation(model, head=head_for(model, family, kind, head == "overfitted"))
    config = SpeculativeConfig(method=method_of(kind), tree=tree)
    output = model.generate(**call, speculative=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    stats = output.stats
    assert stats.method == config.method
    assert stats.near_ties == 0
    assert stats.notes == []
    drafted = stats.drafted_tokens / stats.row_steps
    depth = len(stats.tried_by_depth)
    assert depth >= 4
    assert 2 < drafted <= depth if tree == "chain" else drafted > depth
    if head == "overfitted":
        assert stats.acceptance_length > 1.5
        assert stats.steps < NEW_TOKENS / 1.5
    else:
        assert stats.acceptance_length < 2.5


def test_the_default_selection_covers_every_pair():
    names = list(FACTORS)
    for one, other in itertools.combinations(range(len(names)), 2):
        wanted = {(cell[one], cell[other]) for cell in FULL}
        assert {(cell[one], cell[other]) for cell in SELECTED} == wanted
    assert len(SELECTED) < len(FULL) / 8
