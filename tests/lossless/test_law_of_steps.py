"""The law of whole decoding, exact: prompt, steps, draft model, processors and caches, every branch enumerated.

Runs the shipped context, steps and proposers on tiny models, all branches as rows of one batch, and compares the law
of four new tokens with the library's own forwards and processors. The laws are float32 here, so the bound is 1e-6; the
mutants of this file live in what float64 laws by hand cannot reach.
"""

import functools

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from spechead import DraftModelProposer, PromptLookupProposer, Proposal
from spechead.config import DraftingConfig
from spechead.context import Context
from spechead.decoding import speculative_decode
from spechead.proposers.base import BaseProposer
from spechead.target import Target
from tests import tiny
from tests.lossless.enumeration import argmax_draft, completed, distance, misreported, mutated, outcomes
from tests.running import new_tokens, start

VOCAB, NEW, TOLERANCE = 3, 4, 1e-6
PROMPT = (1, 2, 0, 1, 2)
WARPERS = (TemperatureLogitsWarper(1.4), TopKLogitsWarper(2))


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@functools.lru_cache
def model(family, seed, vocab=VOCAB):
    return tiny.build(tiny.tiny_config(family, vocab_size=vocab, pad_token_id=None), seed=seed, std=0.15)


def law_by_steps(proposer, processors=WARPERS, family="llama"):
    """The law of the new tokens when every branch of drafting and verifying is decoded."""
    target = Target(model(family, 0))

    def run(cases, draws):
        class Enumerated(Context):
            @property
            def draws(self):
                return draws

        context = start(
            target, proposer, [list(case) for case in cases], NEW, processors, do_sample=True, kind=Enumerated
        )
        speculative_decode(context)
        drafted.append(context.stats.drafted_tokens)
        return [tuple(new_tokens(context, row)) for row in range(len(cases))]

    drafted = []
    parts = [(tokens, weight) for _, tokens, weight in outcomes([PROMPT], run)]
    assert sum(weight for _, weight in parts) == pytest.approx(1.0)
    assert all(drafted)
    return completed(parts, None, NEW)


@functools.lru_cache
def expected(processors=WARPERS, family="llama"):
    """The target's own law, by forwards without cache."""
    pipeline = LogitsProcessorList(processors)

    def law(prefix):
        ids = torch.tensor([[*PROMPT, *prefix]])
        scores = pipeline(ids, model(family, 0)(input_ids=ids).logits[:, -1].float())
        return torch.softmax(scores, -1)[0].double()

    return completed([((), 1.0)], functools.lru_cache(law), NEW)


def far(proposer, processors=WARPERS, family="llama"):
    return distance(law_by_steps(proposer, processors, family), expected(processors, family))


def draft_model(family="llama", **drafting):
    return DraftModelProposer(Target(model(family, 1)), 2, drafting=DraftingConfig(**drafting))


class Siblings(BaseProposer):
    """Draws two children of the root without replacement, and one under the first, by laws of the token above."""

    table = torch.softmax(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)), -1)

    def propose(self, context):
        root, room = context.root.clamp(min=0), context.room()
        first = self.table[root]
        x = context.draws.sample(first, room > 0)
        second = first.scatter(1, x[:, None], 0.0)
        second = second / second.sum(1, keepdim=True)
        y = context.draws.sample(second, room > 0)
        z = context.draws.sample(self.table[x], room > 1)
        laws = torch.stack([torch.zeros_like(first), first, second, self.table[x]], 1)
        parents = torch.tensor([[-1, 0, 0, 1]]).expand(context.batch, -1)
        real = torch.stack([~context.done, room > 0, room > 0, room > 1], 1)
        return Proposal(torch.stack([root, x, y, z], 1), parents, real, laws)


class Fork(BaseProposer):
    """Three point masses under the root and one under the second: a tree whose kept nodes move in the cache."""

    def propose(self, context):
        root = context.root.clamp(min=0)
        tokens = torch.stack([root, root, (root + 1) % VOCAB, (root + 2) % VOCAB, root], 1)
        parents = torch.tensor([[-1, 0, 0, 0, 2]]).expand(context.batch, -1)
        return Proposal(tokens, parents, (~context.done)[:, None].expand(-1, 5))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "make",
    [
        draft_model,
        lambda family: draft_model(family, confidence_threshold=0.4),
        lambda family: draft_model(family, temperature=0.5),
        lambda family: PromptLookupProposer(2),
        lambda family: Fork(),
    ],
    ids=["draft model", "confidence stop", "draft temperature", "prompt lookup", "fork"],
)
def test_the_law_of_decoding_is_the_targets(make, family):
    assert far(make(family), family=family) < TOLERANCE


def test_full_laws():
    assert far(draft_model(), WARPERS[:1]) < TOLERANCE
    assert far(Fork(), WARPERS[:1]) < TOLERANCE


def test_a_tree_of_drawn_siblings():
    assert far(Siblings()) < TOLERANCE


def test_processors_that_read_the_text():
    """The target's law depends on the prefix; the draft, which knows nothing of it, only keeps less."""
    assert far(draft_model(), (NoRepeatNGramLogitsProcessor(2), *WARPERS)) < TOLERANCE
    assert far(Fork(), (NoRepeatNGramLogitsProcessor(2), *WARPERS)) < TOLERANCE


class Unprocessed(LogitsProcessor):
    """Stands for any processor: a strong push to token 0."""

    def __call__(self, input_ids, scores):
        return scores + torch.tensor([1.5, 0.0, 0.0])


def bonus_from_raw_logits(monkeypatch):
    shipped = Context.probs_at

    def probs_at(self, proposal, logits):
        law, rows = shipped(self, proposal, logits), torch.arange(self.batch)

        def mutant(nodes):
            leaf = ~((proposal.parents == nodes[:, None]) & proposal.real).any(1)
            raw = torch.softmax(logits[rows, nodes.clamp(min=0)], -1)
            return torch.where(leaf[:, None], raw, law(nodes))

        return mutant

    monkeypatch.setattr(Context, "probs_at", probs_at)


def redrawn(mutant, *arguments):
    def apply(monkeypatch):
        monkeypatch.setattr(DraftModelProposer, "_draw", mutant(DraftModelProposer._draw, *arguments))

    return apply


def dropping(monkeypatch):
    edit = ("real.append(live)", "real.append(live & self._confident(law, token))")
    monkeypatch.setattr(DraftModelProposer, "propose", mutated(DraftModelProposer.propose, edit))


# name: (patch of the shipped code, proposer that shows it)
MUTANTS = {
    "argmax draft reported with softmax q": (redrawn(argmax_draft), draft_model),
    "q warped otherwise than drawn": (redrawn(misreported, 0.5), draft_model),
    "q sharper than drawn": (redrawn(misreported, 2.0), draft_model),
    "bonus token from unprocessed logits": (bonus_from_raw_logits, draft_model),
    "a drawn token dropped by its value": (dropping, lambda: draft_model(confidence_threshold=0.4)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_law_check_kills_the_mutant(mutant, monkeypatch):
    patch, make = MUTANTS[mutant]
    processors = (Unprocessed(), *WARPERS) if "bonus" in mutant else WARPERS
    patch(monkeypatch)
    assert far(make(), processors) > 1e-3
