"""Float32 greedy output is plain greedy output, token for token, over every family, attention, batch, depth and draft.

The full product is marked slow; the default run takes a covering array of it, in which every pair of levels meets.
Each cell also asserts that it speculated: one that fell back to plain decoding would be a failure, not a pass.
"""

import functools
import itertools

import pytest
import torch

from spechead import SpeculativeConfig, enable_speculation
from tests import tiny

NEW = 40  # past every window
WIDTH = 24
FACTORS = {
    "family": tiny.FAMILIES,
    "attention": tiny.ATTENTION,
    "drafter": ("prompt_lookup", "copy", "random"),
    "batch": (1, 4),
    "depth": (1, 4, 8),
}
PRODUCT = list(itertools.product(*FACTORS.values()))


def pairs(cell):
    return set(itertools.combinations(enumerate(cell), 2))


def covering_array(cells):
    """Cells, greedily chosen, in which every pair of levels of two factors occurs."""
    missing = set().union(*(pairs(cell) for cell in cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


SELECTED = covering_array(PRODUCT)


@functools.lru_cache
def prompts(family):
    """Four left-padded prompts, each a few random tokens and what the model itself says next, so that it goes on so.

    What it says may hold the pad's id as a real token, as Gemma's here does; the mask knows.
    """
    model, rows = tiny.tiny_model(family), torch.full((4, WIDTH), tiny.PAD)
    pads = 3 * torch.arange(4)
    for row, opening in enumerate(tiny.prompt_ids(4, 6, seed=2)):
        text = model.generate(opening[None], max_length=WIDTH - int(pads[row]), do_sample=False)
        rows[row, pads[row] :] = text[0]
    return rows, (torch.arange(WIDTH)[None, :] >= pads[:, None]).long()


def inputs(family, batch):
    ids, mask = prompts(family)
    return {"input_ids": ids[:batch], "attention_mask": mask[:batch], "max_new_tokens": NEW, "do_sample": False}


@functools.lru_cache
def plain(family, attention, batch):
    return tiny.tiny_model(family, attention).generate(**inputs(family, batch))


@functools.lru_cache
def enabled(family, attention, drafter):
    draft = tiny.fresh_model(family, attention, seed=1 if drafter == "random" else 0)
    return enable_speculation(tiny.fresh_model(family, attention), draft_model=draft)


def test_the_selection_covers_every_pair_of_levels():
    levels = [[(place, level) for level in levels] for place, levels in enumerate(FACTORS.values())]
    wanted = {pair for two in itertools.combinations(levels, 2) for pair in itertools.product(*two)}
    assert set().union(*(pairs(cell) for cell in SELECTED)) == wanted
    assert len(SELECTED) < len(PRODUCT) / 8


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[] if cell in SELECTED else [pytest.mark.slow]) for cell in PRODUCT],
    ids=lambda cell: "-".join(map(str, cell)),
)
def test_greedy_output_is_plain_greedy_output(cell):
    family, attention, drafter, batch, depth = cell
    method = "prompt_lookup" if drafter == "prompt_lookup" else "draft_model"
    out = enabled(family, attention, drafter).generate(
        **inputs(family, batch),
        speculative=SpeculativeConfig(method=method, num_draft_tokens=depth),
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, plain(family, attention, batch))
    stats = out.stats
    assert stats.near_ties == 0  # equality is no luck of rounding
    assert stats.method == method
    assert stats.emitted_tokens == batch * (NEW - 1)
    if drafter == "copy":
        assert stats.acceptance_length > 1.5
        assert stats.steps == -(-(NEW - 1) // (depth + 1))
    elif drafter == "prompt_lookup":
        assert stats.acceptance_length > 1.0
    else:
        assert stats.drafted_tokens >= stats.row_steps - batch  # a row's last step has no room to draft
