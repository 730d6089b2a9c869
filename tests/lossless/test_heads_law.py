"""The law of sampled decoding with real heads, exact: every branch of drafting and verification enumerated in float64.

The shipped proposers and `step` run on a tiny target, all open branches as rows of one ragged batch; the law of four
emitted tokens must be the target's to 1e-9. Mutants of the shipped drafting show that the check finds what it is for.
"""

from functools import cache

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

from spechead import EagleProposer, MedusaProposer
from spechead.config import DraftingConfig
from spechead.context import Context
from spechead.decoding import speculative_decode
from spechead.proposers import eagle as eagle_module
from spechead.proposers.growth import grow_chain
from spechead.proposers.sprout import Sprout
from spechead.sampling import probabilities, process
from spechead.target import Target
from tests.lossless.enumeration import distance, mutated, outcomes
from tests.running import new_tokens, start
from tests.tiny import build, tiny_config
from tests.tiny_heads import make_head

NEW_TOKENS, TOLERANCE = 4, 1e-9
UNSURE = 0.35  # some branches stop after their first level, some go on
PROMPT = [1, 2, 0, 2, 1]
WARPERS = {"plain": (), "warped": (TemperatureLogitsWarper(1.4), TopKLogitsWarper(3))}
TREES = {
    "chain": "chain",
    "dynamic": "dynamic",
    "static": [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 2)],
}
CELLS = [
    ("eagle", 3, {}, "chain", "plain", None),
    ("eagle", 4, {}, "chain", "warped", 0.6),
    ("eagle", 4, {}, "dynamic", "warped", None),
    ("eagle", 5, {}, "static", "plain", None),
    ("eagle3", 4, {"draft_vocab_size": 3}, "chain", "plain", None),
    ("eagle3", 5, {"draft_vocab_size": 2}, "chain", "warped", None),
    ("eagle3", 4, {"draft_vocab_size": 3}, "dynamic", "plain", None),
    ("eagle3", 5, {"draft_vocab_size": 4}, "static", "warped", None),
    ("medusa", 4, {}, "chain", "warped", None),
    ("medusa", 5, {}, "static", "plain", None),
    ("medusa", 5, {}, "dynamic", "warped", None),
]


@cache
def tiny_target(vocab):
    """A target whose laws are neither flat nor nearly certain."""
    config = tiny_config("llama", vocab_size=vocab, hidden_size=16, intermediate_size=16)
    return build(config, seed=vocab, std=0.25).double()


def proposer_of(kind, vocab, overrides, tree, temperature, threshold=None):
    head = make_head(kind, tiny_target(vocab), seed=vocab, std=0.4, **overrides)
    if kind == "medusa":
        return MedusaProposer(head, tree=TREES[tree], **({"tree_size": 7} if tree == "dynamic" else {}))
    drafting = DraftingConfig(temperature=temperature, confidence_threshold=threshold)
    return EagleProposer(head, tree=TREES[tree], branching=3, tree_size=7, drafting=drafting)


def enumerated(draws):
    """A context whose randomness is `draws`, and whose laws keep the target's float64."""

    class Enumerated(Context):
        @property
        def draws(self):
            return draws

        def probs_at(self, proposal, logits):
            def law(nodes):
                samplers = [row.sampler for row in self.rows]
                raw = logits[torch.arange(self.batch), nodes.clamp(min=0)]
                assert raw.dtype == torch.float64
                scores = process(samplers, [self.row_ids(row) for row in range(self.batch)], raw)
                self._pending = {row: (raw[row], scores[row]) for row in range(self.batch)}
                return probabilities(samplers, scores)

            return law

    return Enumerated


def law_of_decoding(vocab, proposer, warpers):
    """Decode on every branch; returns the law of the new tokens, and how many were drafted, kept and refused."""
    target, drafts = Target(tiny_target(vocab)), []

    def run(cases, draws):
        context = start(
            target, proposer, [PROMPT] * len(cases), NEW_TOKENS, warpers, do_sample=True, kind=enumerated(draws)
        )
        speculative_decode(context)
        drafts.append((context.stats.drafted_tokens, context.stats.kept_tokens))
        return [tuple(new_tokens(context, row)) for row in range(len(cases))]

    law = {}
    for _, tokens, weight in outcomes([None], run):
        law[tokens] = law.get(tokens, 0.0) + weight
    drafted, kept = map(sum, zip(*drafts, strict=True))
    return law, drafted, kept


@cache
def law_of_target(vocab, name):
    """The law of plain sampling: whole forwards of the target, one per prefix."""
    processors, model = WARPERS[name], tiny_target(vocab)
    law = {(): 1.0}
    for _ in range(NEW_TOKENS):
        prefixes = list(law)
        ids = torch.tensor([PROMPT + list(prefix) for prefix in prefixes])
        scores = model(input_ids=ids).logits[:, -1]
        for processor in processors:
            scores = processor(ids, scores)
        p = torch.softmax(scores, dim=-1)
        law = {
            (*prefix, token): law[prefix] * float(p[row, token])
            for row, prefix in enumerate(prefixes)
            for token in range(vocab)
            if p[row, token] > 0
        }
    return law


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    ("kind", "vocab", "overrides", "tree", "warpers", "temperature"),
    [pytest.param(*cell, id=f"{cell[0]}-{cell[3]}-{cell[4]}-{cell[1]} ids") for cell in CELLS],
)
def test_the_law_of_sampled_decoding_is_the_targets(kind, vocab, overrides, tree, warpers, temperature):
    proposer = proposer_of(kind, vocab, overrides, tree, temperature)
    law, drafted, kept = law_of_decoding(vocab, proposer, WARPERS[warpers])
    assert drafted > kept > 0
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert distance(law, law_of_target(vocab, warpers)) < TOLERANCE


STOPS = [
    ("eagle", 3, {}, "chain", UNSURE),
    ("eagle3", 4, {"draft_vocab_size": 3}, "chain", UNSURE),
    ("eagle", 3, {}, "dynamic", 0.9),
    ("eagle3", 5, {"draft_vocab_size": 4}, "dynamic", 0.5),
]


@pytest.mark.parametrize(("kind", "vocab", "overrides", "tree", "threshold"), STOPS)
def test_stopping_where_the_head_is_unsure_leaves_the_law_alone(kind, vocab, overrides, tree, threshold):
    full = law_of_decoding(vocab, proposer_of(kind, vocab, overrides, tree, None), ())
    law, drafted, kept = law_of_decoding(vocab, proposer_of(kind, vocab, overrides, tree, None, threshold), ())
    assert full[1] > drafted > kept > 0
    assert distance(law, law_of_target(vocab, "plain")) < TOLERANCE


def test_the_check_kills_a_chain_that_drops_the_token_it_was_unsure_of(monkeypatch):
    edit = (
        "real.append(growing)",
        "real.append(growing & (chance * law.gather(1, drawn[:, None])[:, 0] >= threshold))",
    )
    monkeypatch.setattr(eagle_module, "grow_chain", mutated(grow_chain, edit))
    law, _, _ = law_of_decoding(3, proposer_of("eagle", 3, {}, "chain", None, UNSURE), ())
    assert distance(law, law_of_target(3, "plain")) > 1e-3


MUTANTS = {
    "q of another temperature than drawn from": (
        "grow_chain",
        ("laws.append(torch.where(draws, law,", "laws.append(torch.where(draws, torch.softmax(2 * logits, dim=-1),"),
    ),
    "the best token drafted, the law reported": (
        "grow_chain",
        ("drawn = draft_tokens(samplers, context.draws, law, growing & (reach >= level))", "drawn = law.argmax(-1)"),
    ),
    "q not moved to the target's ids": (
        "target_laws",
        ("self.target_ids(torch.arange(laws.shape[2], device=laws.device))", "torch.arange(laws.shape[2])"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_kills_mutants(name, monkeypatch):
    where, edit = MUTANTS[name]
    if where == "grow_chain":
        monkeypatch.setattr(eagle_module, "grow_chain", mutated(grow_chain, edit))
    else:
        monkeypatch.setattr(Sprout, "target_laws", mutated(Sprout.target_laws, edit))
    proposer = proposer_of("eagle3", 4, {"draft_vocab_size": 3}, "chain", None)
    law, _, _ = law_of_decoding(4, proposer, ())
    assert distance(law, law_of_target(4, "plain")) > 1e-4
