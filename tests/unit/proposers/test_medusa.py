"""spechead.proposers.medusa: which head guesses which token, ragged rows, limits, rows that join and leave."""

import pytest
import torch

from spechead import MedusaProposer, SpeculativeConfig, enable_speculation
from spechead.decoding import speculative_decode, step
from spechead.proposers.choices import MEDUSA_63
from spechead.target import Target
from tests import tiny
from tests.running import new_tokens, plain_greedy, start
from tests.tiny_heads import features, make_head, overfit
from tests.unit.proposers.described import drafted_paths, row_text
from tests.unit.test_context import PROMPTS, join_and_leave

CHOICES = [(0,), (1,), (0, 2), (1, 0), (0, 2, 1)]
NEW = 16


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def described(heads, model, ids):
    """The path of tokens of every choice: rank r of head i on the feature before the root."""
    hidden = features(heads, model, torch.tensor([ids]))[0, -2]  # the root is the last id, its feature not known yet
    ranked = heads(hidden).argsort(-1, descending=True)  # [K, V]
    return [tuple(int(ranked[head, rank]) for head, rank in enumerate(choice)) for choice in CHOICES]


@pytest.mark.parametrize("steps", [0, 3])
def test_head_i_guesses_the_token_i_places_behind_the_root_in_every_row(steps):
    model = tiny.tiny_model("llama")
    heads = make_head("medusa", model)
    context = start(Target(model), MedusaProposer(heads, tree=CHOICES), PROMPTS, 40)
    for _ in range(steps):
        step(context)
    proposal = context.proposer.propose(context)
    for row in range(len(PROMPTS)):
        assert drafted_paths(proposal, row) == described(heads, model, row_text(context, row))
    assert proposal.draft_probs is None


def test_heads_that_have_learnt_a_text_emit_it_k_plus_one_at_a_time():
    model = tiny.tiny_model("llama")
    text = PROMPTS[0] + plain_greedy(model, PROMPTS[0], 26)
    heads = make_head("medusa", model, num_heads=3)
    with torch.enable_grad():
        overfit(heads, model, torch.tensor([text]))
    context = start(Target(model), MedusaProposer(heads, tree="chain"), PROMPTS[:1], 25)
    speculative_decode(context)
    assert new_tokens(context, 0) == text[len(PROMPTS[0]) : -1]
    assert context.stats.emitted_per_step[0] == [(4, 3)] * 6


def test_done_rows_draft_nothing_and_the_others_go_on():
    model = tiny.tiny_model("llama")
    heads = make_head("medusa", model)
    context = start(Target(model), MedusaProposer(heads, tree=CHOICES), PROMPTS[:2], NEW)
    context.rows[0].max_length = context.rows[0].end + 2
    step(context)
    while not context.rows[0].stopped:
        step(context)
    proposal = context.proposer.propose(context)
    assert not proposal.real[0].any()
    assert drafted_paths(proposal, 1) == described(heads, model, row_text(context, 1))


def test_beyond_the_trained_positions_a_row_stops_drafting_and_goes_on():
    model = tiny.tiny_model("llama")
    heads = make_head("medusa", model, trained_positions=14)
    context = start(Target(model), MedusaProposer(heads), [PROMPTS[2], PROMPTS[1]], NEW)  # 12 and 4 tokens
    proposal = context.proposer.propose(context)
    assert (proposal.depths * proposal.real).max(1).values.tolist() == [2, 4]
    step(context)
    speculative_decode(context)
    assert new_tokens(context, 0) == plain_greedy(model, PROMPTS[2], NEW)
    assert new_tokens(context, 1) == plain_greedy(model, PROMPTS[1], NEW)
    last = context.proposer.propose(context)
    assert last.tokens.shape[1] == 1


def dynamic_tree(heads, model, ids, branching, size):
    """Every step's likeliest nodes, a path's chance being the product of what each head gives its token alone."""
    hidden = features(heads, model, torch.tensor([ids]))[0, -2]
    laws = torch.log_softmax(heads(hidden).float(), -1)  # [K, V]
    level, scores = {(): 0.0}, {}
    for law in laws:
        best = law.topk(branching)
        wide = sorted(level, key=lambda path: -level[path])[:branching]
        guesses = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        level = {(*path, token): level[path] + chance for path in wide for token, chance in guesses}
        scores |= level
    return set(sorted(scores, key=lambda path: -scores[path])[:size])


@pytest.mark.parametrize(("branching", "size", "depth"), [(3, 8, 4), (6, 24, 4), (2, 5, 3), (4, 60, 2)])
def test_the_dynamic_tree_of_every_row_is_as_described(branching, size, depth):
    model = tiny.fresh_model("llama").double()
    heads = make_head("medusa", model, num_heads=depth, std=0.5)
    settings = {"tree": "dynamic", "branching": branching, "tree_size": size}
    context = start(Target(model), MedusaProposer(heads, **settings), PROMPTS, 40)
    step(context)
    shapes = set()
    proposal = context.proposer.propose(context)
    for row in range(len(PROMPTS)):
        paths = drafted_paths(proposal, row)
        assert set(paths) == dynamic_tree(heads, model, row_text(context, row), branching, size)
        assert len(paths) == len(set(paths)) == context.proposer.nodes(depth)
        shapes.add(tuple(proposal.parents[row].tolist()))
    assert len(shapes) > 1 or size == 60
    assert proposal.draft_probs is None


def test_a_call_may_give_the_shape_of_a_dynamic_tree_and_of_no_other():
    model = enable_speculation(tiny.fresh_model("llama"))
    enable_speculation(model, head=make_head("medusa", model, tree="dynamic", tree_size=5, branching=2))
    call = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}

    def drafted(**settings):
        stats = model.generate(tiny.prompt_ids(), speculative=SpeculativeConfig("medusa", **settings), **call).stats
        return stats.drafted_tokens / stats.row_steps

    assert 4 < drafted() <= 5
    assert 8 < drafted(tree_size=9, branching=4) <= 9
    with pytest.raises(ValueError, match=r"branching=4 is for tree='dynamic'; this call drafts tree='static'"):
        drafted(tree="static", branching=4)


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
def test_rows_that_join_and_leave_equal_their_single_runs(tree):
    model = tiny.tiny_model("llama")
    target, proposer = Target(model), MedusaProposer(make_head("medusa", model), tree=tree)
    context, finished = join_and_leave(target, proposer, lambda *rows: {})
    assert context.all_done
    for name, prompt in enumerate(PROMPTS):
        alone = start(target, proposer, [prompt], NEW)
        speculative_decode(alone)
        tokens, steps = finished[name]
        assert tokens == plain_greedy(model, prompt, NEW)[: len(tokens)]
        assert steps == alone.stats.emitted_per_step[0][: len(steps)]


def test_rows_join_a_batch_that_has_not_drafted_yet():
    model = tiny.tiny_model("llama")
    heads = make_head("medusa", model)
    target, proposer = Target(model), MedusaProposer(heads, tree=CHOICES)
    context = start(target, proposer, PROMPTS[:1], NEW)
    context.add_rows(start(target, proposer, PROMPTS[1:2], NEW))
    proposal = proposer.propose(context)
    for row in range(2):
        assert drafted_paths(proposal, row) == described(heads, model, row_text(context, row))


def test_a_second_turn_drafts_as_a_fresh_run_does():
    model = tiny.fresh_model("llama")
    enable_speculation(model, head=make_head("medusa", model))
    call = {"max_new_tokens": 12, "do_sample": False, "speculative": "medusa", "return_dict_in_generate": True}
    prompt = tiny.prompt_ids(1, 9)
    first = model.generate(prompt, attention_mask=torch.ones_like(prompt), **call)
    second = torch.cat([first.sequences, torch.tensor([[4, 9]])], dim=1)
    mask = torch.ones_like(second)
    resumed = model.generate(second, attention_mask=mask, cache=first.cache, **call)
    fresh = model.generate(second, attention_mask=mask, **call)
    assert torch.equal(resumed.sequences, fresh.sequences)
    assert resumed.stats.emitted_per_step == fresh.stats.emitted_per_step
    assert resumed.stats.prompt_fed == 3


def test_a_vocabulary_smaller_than_the_trees_ranks_is_drafted_whole():
    model = tiny.build(tiny.tiny_config("llama", vocab_size=5))
    context = start(Target(model), MedusaProposer(make_head("medusa", model)), [[1, 2, 3]], NEW)
    proposal = context.proposer.propose(context)
    first = {path[0] for path in drafted_paths(proposal, 0)}
    assert first == set(range(5))
    speculative_decode(context)
    assert new_tokens(context, 0) == plain_greedy(model, [1, 2, 3], NEW)


def test_sizes_cut_the_published_tree():
    heads = make_head("medusa", tiny.tiny_model("llama"))
    assert MedusaProposer(heads).nodes(4) == len(MEDUSA_63)
    assert MedusaProposer(heads, num_draft_tokens=2).nodes(2) == 38
    assert MedusaProposer(heads, tree_size=12).nodes(4) == 12
    assert max(map(len, MedusaProposer(heads, tree_size=12).choices)) > 1
    assert MedusaProposer(heads, tree="chain").choices == [(0,) * depth for depth in range(1, 5)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_draft_tokens": 0}, r"must lie in 1\.\.4"),
        ({"num_draft_tokens": 5}, r"must lie in 1\.\.4"),
        ({"tree": "bush"}, "'bush' must be one of chain, static, dynamic"),
        ({"tree": "dynamic", "branching": 0}, "branching=0"),
        ({"tree": "dynamic", "tree_size": 0}, "tree_size=0"),
        ({"tree": [(0,) * depth for depth in range(1, 6)]}, "deeper than there are heads"),
        ({"tree_size": 0}, "tree_size=0"),
    ],
)
def test_what_cannot_be_drafted_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MedusaProposer(make_head("medusa", tiny.tiny_model("llama")), **settings)
