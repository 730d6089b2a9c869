"""spechead.bench.steps: parts that add up to the step, and drafts that are kept to the wanted depth."""

import pytest
import torch

from spechead import EagleProposer, MedusaProposer
from spechead.bench.steps import (
    WARM_UP,
    KeptProposer,
    StepParts,
    bushy_tree,
    middle,
    open_context,
    time_calls,
    time_forward,
    time_steps,
)
from spechead.proposers.base import BaseProposer
from spechead.target import Target
from spechead.tree import ancestors
from tests import tiny
from tests.running import new_tokens, plain_greedy
from tests.tiny_heads import make_head

PROMPT = tiny.prompt_ids(1, 10)
REPEATS, KEPT = 4, 2
ROOM = (KEPT + 1) * (WARM_UP + REPEATS) + 4


def proposers():
    model = tiny.tiny_model("llama")
    eagle = make_head("eagle3", model, draft_vocab_size=20)
    return {
        "chain": EagleProposer(eagle, tree="chain"),
        "dynamic": EagleProposer(eagle, tree="dynamic"),
        "medusa": MedusaProposer(make_head("medusa", model)),
    }


@pytest.mark.parametrize("name", ["chain", "dynamic", "medusa"])
def test_steps_keep_what_they_should_and_their_parts_are_all_there(name):
    model = tiny.tiny_model("llama")
    text = plain_greedy(model, PROMPT[0].tolist(), ROOM)
    proposer = KeptProposer(proposers()[name], torch.tensor(text), KEPT)
    with torch.no_grad():
        context = open_context(Target(model), proposer, PROMPT, ROOM)
    parts = time_steps(context, REPEATS)
    assert len(parts) == REPEATS
    assert new_tokens(context, 0) == text[: context.rows[0].emitted]
    assert min(kept for _, kept in context.stats.emitted_per_step[0]) >= KEPT
    for one in parts:
        assert min(one.draft, one.target, one.verify, one.keep) > 0
        assert one.whole == one.draft + one.target + one.verify + one.keep
        assert 0 < one.overhead < 1
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_batch_that_ends_too_early_is_refused():
    with torch.no_grad():
        context = open_context(Target(tiny.tiny_model("llama")), BaseProposer(), PROMPT, 4)
    with pytest.raises(ValueError, match="ended after 3 steps"):
        time_steps(context, 10)


def test_medians_are_taken_part_by_part():
    parts = [StepParts(1.0, 5.0, 1.0, 1.0), StepParts(2.0, 4.0, 3.0, 1.0), StepParts(3.0, 9.0, 2.0, 4.0)]
    assert middle(parts) == StepParts(2.0, 5.0, 2.0, 1.0)
    assert middle(parts).overhead == 0.5


@pytest.mark.parametrize("nodes", [1, 8, 32])
def test_forwards_are_timed_over_trees_and_leave_the_cache_as_it_was(nodes):
    with torch.no_grad():
        context = open_context(Target(tiny.tiny_model("llama")), BaseProposer(), PROMPT, 4)
    seconds = time_forward(context, nodes, 3)
    assert len(seconds) == 3
    assert min(seconds) > 0
    assert context.cached.tolist() == [10]


def test_the_trees_are_trees_of_the_wanted_size_within_the_vocabulary():
    tree = bushy_tree(32, torch.tensor([45]), 48)
    assert tree.tokens.shape == (1, 32)
    assert tree.tokens[0, 0] == 45
    assert int(tree.tokens.max()) < 48
    assert (tree.parents[0, 1:] < torch.arange(1, 32)).all()
    assert int(ancestors(tree.parents, 31)[1].max()) == tree.max_depth == 5


def test_the_first_calls_are_left_out():
    calls = []
    assert len(time_calls(lambda: calls.append(1), 5, torch.device("cpu"))) == 5
    assert len(calls) == 7
