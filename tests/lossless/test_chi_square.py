"""Sampled output follows the target's law: thousands of chains from `generate` against plain forwards, by chi-square.

Where tests/lossless/test_law.py enumerates, this runs the real generator, warpers and all: temperature, top-k, top-p.
"""

import functools

import pytest
import torch
from scipy.stats import chi2
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from spechead import DraftModelProposer, SpeculativeConfig, enable_speculation
from spechead import verify as verify_module
from tests import tiny
from tests.lossless.enumeration import argmax_draft, completed, mutated

VOCAB, NEW, CHAINS = 6, 4, 3000
PROMPT = (1, 2, 3, 4, 1, 2)  # prompt lookup has something to copy
SETTINGS = {"temperature": 1.2, "top_k": 4, "top_p": 0.97}
WARPERS = (TemperatureLogitsWarper(1.2), TopKLogitsWarper(4), TopPLogitsWarper(0.97))


@functools.lru_cache
def model(seed):
    return tiny.build(tiny.tiny_config("llama", vocab_size=VOCAB, pad_token_id=None), seed=seed, std=0.2)


@functools.lru_cache
def enabled():
    draft, target = model(1), model(0)
    return enable_speculation(target, draft_model=draft)


@functools.lru_cache
def expected():
    """The target's law of four new tokens, by forwards without cache."""
    pipeline = LogitsProcessorList(WARPERS)

    @functools.lru_cache
    @torch.no_grad()
    def law(prefix):
        ids = torch.tensor([[*PROMPT, *prefix]])
        return torch.softmax(pipeline(ids, enabled()(input_ids=ids).logits[:, -1]), -1)[0].double()

    return completed([((), 1.0)], law, NEW)


def chains(method, depth, **kwargs):
    torch.manual_seed(7)
    out = enabled().generate(
        torch.tensor([PROMPT]),
        do_sample=True,
        max_new_tokens=NEW,
        num_return_sequences=CHAINS,
        pad_token_id=0,
        speculative=SpeculativeConfig(method=method, num_draft_tokens=depth),
        return_dict_in_generate=True,
        **SETTINGS,
        **kwargs,
    )
    assert out.stats.kept_tokens > CHAINS / 10  # it speculated
    return [tuple(row) for row in out.sequences[:, len(PROMPT) :].tolist()]


def p_value(samples):
    """Chi-square of the samples against the law; cells with fewer than five expected are pooled."""
    law = expected()
    assert set(samples) <= set(law), "a chain came out that the target cannot say"
    counts = dict.fromkeys(law, 0)
    for sample in samples:
        counts[sample] += 1
    rare = {key for key, p in law.items() if p * len(samples) < 5}
    cells = [(counts[key], law[key] * len(samples)) for key in law if key not in rare]
    cells.append((sum(counts[key] for key in rare), sum(law[key] for key in rare) * len(samples)))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


@pytest.mark.parametrize(("method", "depth"), [("draft_model", 1), ("draft_model", 3), ("prompt_lookup", 3)])
def test_sampled_chains_follow_the_targets_law(method, depth):
    assert p_value(chains(method, depth)) > 1e-3


def test_rows_with_their_own_generators_follow_it_too():
    generators = [torch.Generator().manual_seed(seed) for seed in range(CHAINS)]
    assert p_value(chains("draft_model", 3, generator=generators)) > 1e-3


def test_the_check_catches_an_argmax_draft_reported_with_softmax_q(monkeypatch):
    monkeypatch.setattr(DraftModelProposer, "_draw", argmax_draft(DraftModelProposer._draw))
    assert p_value(chains("draft_model", 3)) < 1e-9


def test_the_check_catches_a_residual_that_is_not_taken(monkeypatch):
    edit = ("p = torch.where((rejected & ~empty)", "p = torch.where((rejected & empty)")
    monkeypatch.setattr(verify_module, "try_drawn", mutated(verify_module.try_drawn, edit))
    assert p_value(chains("draft_model", 3)) < 1e-9


def test_the_check_catches_a_copy_looked_for_at_another_temperature(monkeypatch):
    edit = ("drawn = draws.sample(p, undecided)", "drawn = draws.sample(p.pow(0.8), undecided)")
    monkeypatch.setattr(verify_module, "choose", mutated(verify_module.choose, edit))
    assert p_value(chains("prompt_lookup", 3)) < 1e-9
