"""`output_scores` and `output_logits`: as many as tokens, equal to plain generate's, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spechead import DecodeStats
from tests.unit.generate.harness import METHODS, PROMPTS, assert_speculated, padded, single, speculate

NEW = 20
RECORDS = {"output_scores": True, "output_logits": True}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.4, "suppress_tokens": [3, 30]}])
def test_equal_plains(model: Any, method: str, prompt: str, processors: dict[str, Any]) -> None:
    settings = {"max_new_tokens": NEW, **RECORDS, **processors}
    plain = speculate(model, PROMPTS[prompt](), None, **settings)
    ours = speculate(model, PROMPTS[prompt](), method, **settings)
    assert_speculated(ours.stats, keeps=not processors)
    assert len(ours.scores) == len(ours.logits) == NEW
    for name in ("scores", "logits"):
        for mine, theirs in zip(getattr(ours, name), getattr(plain, name), strict=True):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_rows_that_ended_hold_zeros(model: Any) -> None:
    settings = {"max_new_tokens": NEW, "eos_token_id": 30, "pad_token_id": 2, **RECORDS}
    plain = speculate(model, padded(), None, **settings)
    ours = speculate(model, padded(), "draft_model", **settings)
    assert len(ours.scores) == len(plain.scores)
    ended = torch.tensor([[*row[11:], 30].index(30) + 1 for row in ours.sequences.tolist()])
    assert len(set(ended.tolist())) > 1
    for step, (mine, theirs) in enumerate(zip(ours.scores, plain.scores, strict=True)):
        live = ended > step
        torch.testing.assert_close(mine[live], theirs[live], atol=1e-4, rtol=1e-4)
        assert bool((mine[~live] == 0).all())


@pytest.mark.parametrize("method", METHODS)
def test_transition_scores(model: Any, method: str) -> None:
    settings = {"max_new_tokens": NEW, "output_scores": True}
    plain, ours = (speculate(model, single(), speculative, **settings) for speculative in (None, method))
    mine, theirs = (
        model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        for output in (ours, plain)
    )
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_what_is_not_asked_for_is_not_kept(model: Any) -> None:
    bare = speculate(model, single(), "draft_model", max_new_tokens=4)
    assert bare.scores is None
    assert bare.logits is None
    assert isinstance(bare.stats, DecodeStats)
    assert speculate(model, single(), "draft_model", max_new_tokens=4, output_logits=True).scores is None
    ids = model.generate(**single(), speculative="draft_model", max_new_tokens=4, output_scores=True)
    assert torch.is_tensor(ids)


@pytest.mark.parametrize("method", METHODS)
def test_stats_count_what_was_returned(model: Any, method: str) -> None:
    output = speculate(model, padded(), method, max_new_tokens=NEW)
    stats = output.stats
    assert stats.emitted_tokens == 3 * (NEW - 1)  # the prompt's own next token is no step's
    assert stats.prompt_fed == 3 * 11
    assert stats.kept_tokens <= stats.drafted_tokens
    assert stats.target_forwards == stats.steps
    assert [sum(count for count, _ in row) for row in stats.emitted_per_step] == [NEW - 1] * 3
    assert output.sequences.shape == (3, 11 + NEW)
