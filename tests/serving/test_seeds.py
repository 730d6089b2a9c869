"""Seeded rows: tokens by waiting times keyed by seed and place: the target's law, whatever the batch, and steady."""

import itertools
from collections import Counter

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

from spechead import DraftModelProposer, EagleProposer, MedusaProposer, PromptLookupProposer, Proposal, sampling
from spechead.decoding import speculative_decode, step
from spechead.proposers.auto import AutoProposer
from spechead.proposers.base import BaseProposer
from spechead.sampling import Draws, Sampler, seeded_token, waiting_times
from spechead.serving.ticket import choice_seed
from spechead.target import Target
from spechead.verify import verify
from tests import tiny
from tests.running import new_tokens, start
from tests.tiny_heads import make_head

NEW, PARTS = 16, 4
WARPERS = [TemperatureLogitsWarper(1.3), TopKLogitsWarper(12)]
PROMPTS = [tiny.prompt_ids(1, width, seed=width)[0].tolist() for width in (9, 4, 12)]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def inverse_cdf(p, u):
    """The token of a law at u: what a seed could pick instead."""
    sums = p.double().cumsum(0)
    return torch.searchsorted(sums, u * sums[-1], right=True).clamp(max=len(p) - 1)


def test_the_waiting_times_are_fixed_for_ever():
    wanted = [2.421022325396, 1.687649460113, 0.102025071445]
    assert [round(float(time), 12) for time in waiting_times(7, 2, 3)] == wanted
    assert torch.equal(waiting_times(7, 2, 9)[:3], waiting_times(7, 2, 3))
    assert len({float(waiting_times(*key, 1)) for key in ((-1, 0), (1, 0), (0, 1), (0, -1))}) == 4


def test_the_waiting_times_are_exponential_over_seeds_places_and_tokens():
    for times in (
        torch.cat([waiting_times(seed, 0, 1) for seed in range(4000)]),
        torch.cat([waiting_times(0, place, 1) for place in range(4000)]),
        torch.cat([waiting_times(choice_seed(5, index), 3, 1) for index in range(4000)]),
        waiting_times(3, 5, 4000),
    ):
        numbers = sorted((1 - torch.exp(-times)).tolist())
        assert 0 <= numbers[0] < numbers[-1] < 1
        distance = max(abs(u - rank / 4000) for rank, u in enumerate(numbers))
        assert distance < 1.95 / 4000**0.5  # Kolmogorov-Smirnov at 0.1 %


def test_each_token_is_taken_for_its_share_and_none_of_mass_zero():
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.2, 0.05])
    draws = 20_000
    counts = Counter(int(seeded_token(p, 1, place)) for place in range(draws))
    assert set(counts) == {1, 3, 4, 5}
    statistic = sum((counts[token] - draws * float(p[token])) ** 2 / (draws * float(p[token])) for token in counts)
    assert statistic < 16.3  # chi-square of 3 degrees of freedom at 0.1 %


def test_rounding_changes_as_few_tokens_as_it_must():
    """A vocabulary of real size, logits moved as another batch shape moves them: a walk over all ids changes often."""
    generator = torch.Generator().manual_seed(0)
    size, places, jitter = 49_152, 1500, 1e-4
    changed = {"waiting times": 0, "inverse": 0}
    for place in range(places):
        logits = 3 * torch.randn(size, generator=generator)
        moved = logits + jitter * torch.randn(size, generator=generator)
        first, second = torch.softmax(logits, 0), torch.softmax(moved, 0)
        changed["waiting times"] += int(seeded_token(first, 7, place) != seeded_token(second, 7, place))
        u = float(torch.rand((), generator=generator, dtype=torch.float64))
        changed["inverse"] += int(inverse_cdf(first, u) != inverse_cdf(second, u))
    assert changed["waiting times"] <= 3
    assert changed["inverse"] > 10


def law_of(prefix):
    """A law over three tokens in quarters, another one after every prefix."""
    a = 1 + (len(prefix) + sum(prefix)) % 2
    b = 1 + sum((i + 1) * token for i, token in enumerate(prefix)) % (PARTS - a - 1)
    return torch.tensor([a, b, PARTS - a - b], dtype=torch.float64) / PARTS


def drafts(shape, root):
    """Point-mass trees under a root: none, a chain, two children with one each."""
    tokens, parents = {
        "none": ([0], [-1]),
        "chain": ([0, 0, 1], [-1, 0, 1]),
        "tree": ([0, 1, 2, 0, 0], [-1, 0, 0, 1, 2]),
    }[shape]
    return Proposal(torch.tensor([tokens]), torch.tensor([parents]), torch.ones(1, len(tokens), dtype=torch.bool))


def decode(shape, length=3):
    """Decode one seeded row by `verify`, step after step."""
    emitted = []
    sampler = Sampler([], 0, True, None, seed=1)
    while len(emitted) < length:
        prefix, proposal = list(emitted), drafts(shape, 0)

        def probs_at(nodes, prefix=prefix, proposal=proposal):
            path, node = [], int(nodes[0])
            while node > 0:
                path.append(int(proposal.tokens[0, node]))
                node = int(proposal.parents[0, node])
            return law_of([*prefix, *reversed(path)])[None]

        def on_token(tokens, live):
            emitted.append(int(tokens[0]))
            return torch.tensor([len(emitted) >= length])

        verify(proposal, probs_at, Draws([sampler], lambda row: len(emitted)), on_token)
    return tuple(emitted)


@pytest.mark.parametrize("shape", ["none", "chain", "tree"])
def test_the_law_of_the_walk_is_the_targets_by_all_picks(shape, monkeypatch):
    """The pick at each place takes the middle of every quarter: outcomes then count exactly what the law says."""
    counts = Counter()
    for grid in itertools.product(range(PARTS), repeat=3):
        monkeypatch.setattr(
            sampling, "seeded_token", lambda p, seed, place, grid=grid: inverse_cdf(p, (grid[place] + 0.5) / PARTS)
        )
        counts[decode(shape)] += 1
    for outcome in itertools.product(range(3), repeat=3):
        expected = PARTS**3
        for place, token in enumerate(outcome):
            expected *= float(law_of(outcome[:place])[token])
        assert counts[outcome] == expected


def proposers():
    """Every way of drafting, drawn chains among them."""
    model = tiny.tiny_model("llama")
    draft = Target(tiny.tiny_model("llama", seed=1))
    return {
        "off": BaseProposer(),
        "prompt_lookup": PromptLookupProposer(4),
        "draft_model": DraftModelProposer(draft, 3),
        "copy": DraftModelProposer(Target(model), 3),
        "eagle chain": EagleProposer(make_head("eagle3", model), 3, tree="chain"),
        "eagle dynamic": EagleProposer(make_head("eagle", model), 3, tree="dynamic"),
        "medusa": MedusaProposer(make_head("medusa", model), 3),
        "auto": AutoProposer(PromptLookupProposer(4), DraftModelProposer(draft, 3)),
    }


def begin(proposer, prompt, seed, do_sample=True):
    """Start one row; its first token is drawn by its seed, too."""
    made = sampling.Sampler

    class Seeded(made):
        def __init__(self, processors, row, do_sample, generator=None):
            super().__init__(processors, row, do_sample, generator, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.running.Sampler", Seeded)
        return start(Target(tiny.tiny_model("llama")), proposer, [prompt], NEW, WARPERS, do_sample=do_sample)


def alone(proposer, prompt, seed):
    context = begin(proposer, prompt, seed)
    speculative_decode(context)
    return new_tokens(context, 0), context.stats


def in_company(proposer, prompt, seed):
    """The same row, joined to a batch in which an unseeded and a greedy row run, and which one row leaves."""
    context = begin(proposer, PROMPTS[1], None)
    context.add_rows(begin(proposer, PROMPTS[2], None, do_sample=False))
    step(context)
    context.add_rows(begin(proposer, prompt, seed))
    step(context)
    context.select_rows([2, 1])
    speculative_decode(context)
    return new_tokens(context, 0)


@pytest.mark.parametrize("method", proposers())
def test_a_seeded_row_is_the_same_with_any_proposer_alone_and_in_company(method):
    plain, _ = alone(BaseProposer(), PROMPTS[0], 5)
    drafted, stats = alone(proposers()[method], PROMPTS[0], 5)
    assert drafted == plain
    assert in_company(proposers()[method], PROMPTS[0], 5) == plain
    if method not in ("off", "auto"):
        assert stats.drafted_tokens > 0
    if method == "copy":
        assert stats.kept_tokens > 0
    other, _ = alone(proposers()[method], PROMPTS[0], 6)
    assert other != plain


@pytest.mark.parametrize("method", ["copy", "eagle chain"])
def test_the_comparison_sees_drafts_that_are_drawn(method, monkeypatch):
    """A seeded row whose drafts are drawn and accepted by coins is no function of its seed."""
    plain, _ = alone(BaseProposer(), PROMPTS[0], 5)
    monkeypatch.setattr(Sampler, "draws_drafts", property(lambda self: self.do_sample))
    drawn = [alone(proposers()[method], PROMPTS[0], 5)[0] for _ in range(4)]
    assert any(tokens != plain for tokens in drawn)


def test_a_place_must_be_known():
    draws = Draws([Sampler([], 0, True, None, seed=3)])
    with pytest.raises(ValueError, match="row 0 has seed 3"):
        draws.sample(torch.tensor([[0.5, 0.5]]), torch.tensor([True]))
