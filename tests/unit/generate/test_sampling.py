"""Sampling: at every position the law is the one plain generate samples from, for each warper; seeds repeat a call.

Plain generate is led along the speculative call's own tokens by replacing its multinomial; the processed scores of
both must agree. That the drawn tokens follow these scores is proved by enumeration for verify, and by chi-square.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import ATTENTION, FAMILIES, fresh_model
from tests.unit.generate.harness import (
    METHODS,
    PROMPTS,
    assert_speculated,
    padded,
    rows_of,
    single,
    speculate,
    speculating,
)

NEW = 20

WARPERS: dict[str, dict[str, Any]] = {
    "none": {"top_k": 0},
    "default_top_k": {},
    "temperature": {"temperature": 0.6, "top_k": 0},
    "hot": {"temperature": 1.7, "top_k": 0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "top_h": {"top_h": 0.5, "top_k": 0},
    "typical_p": {"typical_p": 0.7, "top_k": 0},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02, "top_k": 0},
    "eta_cutoff": {"eta_cutoff": 0.05, "top_k": 0},
    "renormalize_logits": {"top_p": 0.8, "renormalize_logits": True},
    "all": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    "processors": {"no_repeat_ngram_size": 3, "suppress_tokens": [14], "sequence_bias": [[[19], 3.0]], "top_p": 0.9},
}


def follow(
    model: Any, inputs: dict[str, Any], tokens: Tensor, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Any:
    """Run plain generate, its draws replaced by the columns of `tokens [B, T]`."""
    columns = iter(tokens.T)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", lambda probs, num_samples: next(columns)[:, None])
        return model.generate(**inputs, return_dict_in_generate=True, **settings)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("warper", WARPERS)
def test_law_of_every_position(
    model: Any, warper: str, method: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = PROMPTS[prompt]()
    settings = {"max_new_tokens": NEW, "do_sample": True, "output_scores": True, **WARPERS[warper]}
    torch.manual_seed(4)
    output = speculate(model, inputs, method, **settings)
    assert_speculated(output.stats, keeps=method == "draft_model")
    new = output.sequences[:, -NEW:]
    plain = follow(model, inputs, new, monkeypatch, **settings)
    assert plain.sequences.tolist() == output.sequences.tolist()
    assert len(output.scores) == len(plain.scores) == NEW
    for ours, theirs in zip(output.scores, plain.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    chosen = torch.stack(output.scores, dim=1).gather(2, new[..., None])
    assert bool((chosen > -torch.inf).all())  # nothing was drawn that the processors forbid


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("method", METHODS)
def test_same_seed_repeats_a_call(model: Any, method: str, prompt: str) -> None:
    texts = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        output = speculate(model, PROMPTS[prompt](), method, max_new_tokens=NEW, do_sample=True, top_p=0.9)
        texts.append(output.sequences.tolist())
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("method", METHODS)
def test_unseeded_calls_differ(model: Any, method: str) -> None:
    settings = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.5, "top_k": 0}
    texts = {tuple(speculate(model, single(), method, **settings).sequences[0].tolist()) for _ in range(6)}
    assert len(texts) == 6


@pytest.mark.parametrize("method", METHODS)
def test_one_generator(model: Any, method: str) -> None:
    settings = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0}
    texts = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(11)
        texts.append(speculate(model, single(), method, generator=generator, **settings).sequences.tolist())
        torch.rand(3)  # the default generator plays no part
    assert texts[0] == texts[1]
    shared = torch.Generator().manual_seed(11)
    first = speculate(model, single(), method, generator=shared, **settings).sequences
    second = speculate(model, single(), method, generator=shared, **settings).sequences
    assert first.tolist() == texts[0]
    assert second.tolist() != texts[0]


@pytest.mark.parametrize("method", METHODS)
def test_generator_a_row_makes_each_row_equal_its_single_run(model: Any, method: str) -> None:
    settings = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.3, "top_p": 0.95}
    seeds = (21, 22, 23)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    together = speculate(model, padded(), method, generator=generators, **settings)
    for row, (inputs, seed) in enumerate(zip(rows_of(padded()), seeds, strict=True)):
        alone = speculate(model, inputs, method, generator=torch.Generator().manual_seed(seed), **settings)
        assert together.sequences[row, -NEW:].tolist() == alone.sequences[0, -NEW:].tolist()


@pytest.mark.parametrize("method", METHODS)
def test_num_return_sequences(model: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = single()
    settings = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 3, "output_scores": True}
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2, 1)]
    output = speculate(model, inputs, method, generator=generators, **settings)
    rows = output.sequences.tolist()
    assert len(rows) == 3
    assert rows[0] == rows[2]
    assert rows[0] != rows[1]
    plain = follow(model, inputs, output.sequences[:, -NEW:], monkeypatch, **settings)
    for ours, theirs in zip(output.scores, plain.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_wrong_number_of_generators_is_refused(model: Any) -> None:
    settings = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
    with pytest.raises(ValueError, match=r"2 generators for 3 rows.*give one, or one a row"):
        speculate(model, single(), "prompt_lookup", generator=[torch.Generator(), torch.Generator()], **settings)


def test_copy_as_draft_keeps_every_token_when_both_laws_are_equal(model: Any) -> None:
    output = speculate(model, single(), "draft_model", max_new_tokens=40, do_sample=True, temperature=0.8, top_p=0.9)
    assert output.stats.acceptance_rate > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_law_on_every_family(family: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = speculating(fresh_model(family, attention))
    for warper, method in product(("default_top_k", "top_p", "all", "processors"), METHODS):
        settings = {"max_new_tokens": 40, "do_sample": True, "output_scores": True, **WARPERS[warper]}
        output = speculate(target, padded(), method, **settings)
        plain = follow(target, padded(), output.sequences[:, -40:], monkeypatch, **settings)
        for ours, theirs in zip(output.scores, plain.scores, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
