"""spechead.proposers.growth: what is drafted, against a slow description; node outputs against single chains."""

import copy

import pytest
import torch

from spechead import EagleProposer
from spechead.config import DraftingConfig
from spechead.decoding import step
from spechead.proposers.growth import grow_dynamic
from spechead.proposers.sprout import Sprout
from spechead.target import Target
from tests import tiny
from tests.running import start
from tests.tiny_heads import make_head
from tests.unit.proposers.described import Text, drafted_paths, row_text

PROMPTS = [tiny.prompt_ids(1, width, seed=width)[0].tolist() for width in (9, 4, 12)]
BATCHES = pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["three rows", "one row"])
CHOICES = [(0,), (2,), (0, 1), (2, 0), (0, 1, 3), (0, 1, 3, 0), (0, 1, 3, 1)]  # two levels are fed one node alone


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def head_of(kind, target):
    return make_head(kind, target, **({"draft_vocab_size": 20} if kind == "eagle3" else {}))


def drafting(kind, prompts, steps=2, **settings):
    """A context after some steps, the proposal of its next one, and each row's text; in float64, free of rounding."""
    model = tiny.fresh_model("llama").double()
    head = head_of(kind, model)
    proposer = EagleProposer(head, **settings)
    context = start(Target(model), proposer, prompts, max_new_tokens=40)
    for _ in range(steps):
        step(context)
    texts = [Text(head, model, row_text(context, row)) for row in range(len(prompts))]
    return context, proposer.propose(context), texts


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@BATCHES
def test_the_dynamic_tree_of_every_row_is_as_described(kind, depth, prompts):
    _, proposal, texts = drafting(kind, prompts, num_draft_tokens=depth, tree="dynamic", branching=3, tree_size=8)
    for row, text in enumerate(texts):
        paths = drafted_paths(proposal, row)
        assert len(set(paths)) == len(paths) == (8 if depth > 1 else 3)
        assert set(paths) == text.dynamic_tree(depth, 3, 8)
        assert [len(path) for path in paths] == sorted(len(path) for path in paths)
    assert (proposal.parents[:, 1:] < torch.arange(1, proposal.parents.shape[1])).all()
    assert proposal.draft_probs is None


SURE = (0.01, 0.05, 0.2, 0.51, 0.6, 0.9)  # between the chances of the likeliest paths of these heads


def stop(threshold):
    return DraftingConfig(confidence_threshold=threshold)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@BATCHES
def test_a_row_that_is_unsure_grows_its_tree_no_deeper_than_described(kind, prompts):
    depths, sizes = set(), set()
    for threshold in SURE:
        settings = {"num_draft_tokens": 4, "tree": "dynamic", "branching": 3, "tree_size": 8}
        _, proposal, texts = drafting(kind, prompts, steps=0, drafting=stop(threshold), **settings)
        for row, text in enumerate(texts):
            paths = drafted_paths(proposal, row)
            assert set(paths) == text.dynamic_tree(4, 3, 8, threshold)
            depths.add(max(map(len, paths)))
            sizes.add(len(paths))
        widest = int(proposal.real.sum(1).max())
        assert proposal.real[:, :widest].any(0).all(), "what is left out leaves no column behind"
    assert len(depths) > 2
    assert 1 in sizes
    assert len(sizes) > 2


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@BATCHES
def test_a_row_that_is_unsure_drafts_its_chain_no_further_than_described(kind, prompts):
    lengths = set()
    for threshold in SURE:
        settings = {"num_draft_tokens": 4, "tree": "chain"}
        _, proposal, texts = drafting(kind, prompts, steps=0, drafting=stop(threshold), **settings)
        for row, text in enumerate(texts):
            sure = text.sure_depth(4, threshold)
            assert drafted_paths(proposal, row) == [text.by_rank((0,) * depth) for depth in range(1, sure + 1)]
            lengths.add(sure)
        assert proposal.max_depth == int(proposal.real.sum(1).max()) - 1
    assert len(lengths) > 2


def test_a_static_tree_is_not_stopped():
    head = head_of("eagle", tiny.fresh_model("llama"))
    with pytest.raises(ValueError, match=r"confidence_threshold=0\.3 stops chains and dynamic trees"):
        EagleProposer(head, tree=CHOICES, drafting=stop(0.3))


def test_a_tree_larger_than_its_nodes_keeps_them_all():
    _, proposal, texts = drafting("eagle", PROMPTS[:1], num_draft_tokens=2, tree="dynamic", branching=2, tree_size=50)
    assert set(drafted_paths(proposal, 0)) == texts[0].dynamic_tree(2, 2, 50)
    assert len(drafted_paths(proposal, 0)) == 2 + 4


def test_branching_beyond_the_heads_vocabulary_takes_all_of_it():
    _, proposal, texts = drafting("eagle3", PROMPTS[:1], num_draft_tokens=2, branching=30, tree_size=500)
    assert set(drafted_paths(proposal, 0)) == texts[0].dynamic_tree(2, 30, 500)
    assert len(drafted_paths(proposal, 0)) == 20 + 20 * 20


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@BATCHES
def test_the_static_tree_of_every_row_is_as_described(kind, prompts):
    _, proposal, texts = drafting(kind, prompts, tree=CHOICES)
    for row, text in enumerate(texts):
        assert drafted_paths(proposal, row) == [text.by_rank(choice) for choice in CHOICES]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@BATCHES
def test_the_greedy_chain_of_every_row_is_as_described(kind, prompts):
    _, proposal, texts = drafting(kind, prompts, tree="chain", num_draft_tokens=4)
    for row, text in enumerate(texts):
        assert drafted_paths(proposal, row) == [text.by_rank((0,) * depth) for depth in range(1, 5)]


@pytest.mark.parametrize(
    ("tree", "threshold"), [("chain", 0), ("dynamic", 0), ("static", 0), ("chain", 0.2), ("dynamic", 0.2)]
)
def test_a_row_drafts_in_a_ragged_batch_what_it_drafts_alone(tree, threshold):
    _, together, texts = drafting("eagle3", PROMPTS, tree=tree, drafting=stop(threshold))
    assert len({len(text.ids[0]) for text in texts}) > 1
    for row, prompt in enumerate(PROMPTS):
        _, alone, _ = drafting("eagle3", [prompt], tree=tree, drafting=stop(threshold))
        assert drafted_paths(together, row) == drafted_paths(alone, 0)


def sprouts(kind, prompts):
    """The sprout of a step's start, one to grow from as often as wanted."""
    context, _, texts = drafting(kind, prompts, tree="chain", num_draft_tokens=1)
    proposer = context.proposer
    state = context.state[id(proposer)]
    state.cache.truncate(state.entries)
    last = torch.stack([text.output(()) for text in texts])
    position = context.cached - 1
    return (lambda: Sprout(proposer.head, copy.deepcopy(state.cache), position, last)), texts


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_node_of_a_tree_has_the_output_of_its_path_fed_as_a_chain(kind):
    grow, _ = sprouts(kind, PROMPTS)
    levels = [[(5, -1), (9, -1)], [(7, 0), (7, 1), (3, 1)], [(11, 4), (2, 2)]]  # (token, fed parent) by depth
    tree = grow()
    outputs, paths = [], []
    for depth, level in enumerate(levels, 1):
        parents = torch.tensor([[parent for _, parent in level]]).expand(3, -1)
        above = [tree.hidden if parent < 0 else outputs[parent] for _, parent in level]
        tokens = torch.tensor([[token for token, _ in level]]).expand(3, -1)
        out = tree.feed(tokens, torch.stack(above, 1), parents, depth)
        outputs += out.unbind(1)
        paths += [((token,) if parent < 0 else (*paths[parent], token)) for token, parent in level]
    for path, output in zip(paths, outputs, strict=True):
        chain = grow()
        hidden = chain.hidden
        for depth, token in enumerate(path, 1):
            parent = torch.full((3, 1), depth - 2)
            hidden = chain.feed(torch.full((3, 1), token), hidden[:, None], parent, depth)[:, 0]
        torch.testing.assert_close(output, hidden, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(chain.logits(hidden[:, None]), tree.logits(output[:, None]), atol=1e-9, rtol=1e-9)


def test_a_done_row_drafts_nothing():
    grow, texts = sprouts("eagle", PROMPTS)
    root = torch.tensor([3, -1, 4])
    proposal = grow_dynamic(grow(), root, 3, 3, 7)
    assert proposal.real.any(1).tolist() == [True, False, True]
    assert proposal.tokens[:, 0].tolist() == [3, 0, 4]
    assert set(drafted_paths(proposal, 2)) == texts[2].dynamic_tree(3, 3, 7)


def test_equal_scores_never_part_a_child_from_its_parent():
    """A head that is certain gives children the very score of their parent."""
    grow, _ = sprouts("eagle", PROMPTS[:1])
    sprout = grow()
    sure = torch.full((48,), -1e9, dtype=torch.float64)
    sure[7] = 0.0
    sprout.logits = lambda hidden: sure.expand(*hidden.shape[:2], -1)
    proposal = grow_dynamic(sprout, torch.tensor([1]), 4, 2, 4)
    assert drafted_paths(proposal, 0) == [(7,) * depth for depth in range(1, 5)]
    assert proposal.parents.tolist() == [[-1, 0, 1, 2, 3]]
