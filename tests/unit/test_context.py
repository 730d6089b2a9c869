"""spechead.context and the step that drives it: rows join, leave and run as they would alone."""

import pytest
import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from spechead import DraftModelProposer, PromptLookupProposer, Proposal
from spechead.decoding import speculative_decode, step
from spechead.proposers.base import BaseProposer, WrappedProposer
from spechead.target import Target
from tests import tiny
from tests.running import ForwardCount, new_tokens, plain_greedy, start

NEW = 16
PROMPTS = [tiny.prompt_ids(1, width, seed=width)[0].tolist() for width in (9, 4, 12, 7)]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def proposer_of(method, family):
    if method == "prompt_lookup":
        return PromptLookupProposer(4)
    draft = tiny.tiny_model(family, seed=0 if method == "copy" else 1)
    return DraftModelProposer(Target(draft), 3)


def join_and_leave(target, proposer, single, **settings):
    """Two rows start, two join after two steps, the second leaves, then the rest runs out; returns rows by prompt."""
    context = start(target, proposer, PROMPTS[:2], NEW, **single(0, 1), **settings)
    names, finished = [0, 1], {}
    step(context)
    step(context)
    context.add_rows(start(target, proposer, PROMPTS[2:], NEW, **single(2, 3), **settings))
    names += [2, 3]
    step(context)
    finished[1] = (new_tokens(context, 1), context.stats.emitted_per_step[1])
    context.select_rows([3, 0, 2])  # row 1 leaves unfinished, and the others change places
    names = [3, 0, 2]
    speculative_decode(context)
    for place, name in enumerate(names):
        finished[name] = (new_tokens(context, place), context.stats.emitted_per_step[place])
    return context, finished


@pytest.mark.parametrize("method", ["prompt_lookup", "random", "copy"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_greedy_rows_that_join_and_leave_equal_their_single_runs(family, method):
    model = tiny.tiny_model(family)
    target, proposer = Target(model), proposer_of(method, family)
    context, finished = join_and_leave(target, proposer, lambda *rows: {})
    assert context.all_done
    for name, prompt in enumerate(PROMPTS):
        alone = start(target, proposer_of(method, family), [prompt], NEW)
        speculative_decode(alone)
        expected = plain_greedy(model, prompt, NEW)
        assert new_tokens(alone, 0) == expected
        tokens, steps = finished[name]
        assert tokens == expected[: len(tokens)]
        assert steps == alone.stats.emitted_per_step[0][: len(steps)]  # the same drafts were kept in the same steps
        if name != 1:
            assert len(tokens) == NEW


@pytest.mark.parametrize("method", ["prompt_lookup", "random"])
def test_sampled_rows_with_their_own_generators_equal_their_single_runs(method):
    target = Target(tiny.tiny_model("llama"))
    warpers = [TemperatureLogitsWarper(1.5), TopKLogitsWarper(20)]

    def single(*rows):
        return {"generators": [torch.Generator().manual_seed(100 + row) for row in rows]}

    _, finished = join_and_leave(target, proposer_of(method, "llama"), single, processors=warpers, do_sample=True)
    for name, prompt in enumerate(PROMPTS):
        alone = start(
            target, proposer_of(method, "llama"), [prompt], NEW, processors=warpers, do_sample=True, **single(name)
        )
        speculative_decode(alone)
        tokens, steps = finished[name]
        assert tokens == new_tokens(alone, 0)[: len(tokens)]
        assert steps == alone.stats.emitted_per_step[0][: len(steps)]


def test_one_target_forward_a_step_serves_all_rows():
    model = tiny.fresh_model("llama")
    target = Target(model)
    assert target.verdict.tier == "tree"  # probed before the count starts
    with ForwardCount(model) as count:
        context, _ = join_and_leave(target, PromptLookupProposer(4), lambda *rows: {})
    assert count.forwards == context.stats.steps + 2  # two prompts' forwards: the first batch's, the second's
    assert [shape[0] for shape in count.shapes[:6]] == [2, 2, 2, 2, 4, 3]


class Features(BaseProposer):
    """Drafts two guesses in a tree and takes its features only every third step."""

    taps = (0, 2)

    def __init__(self):
        self.calls, self.gathered = 0, {}

    def start(self, context):
        context.state[id(self)] = [[] for _ in context.rows]

    def propose(self, context):
        self.calls += 1
        if self.calls % 3 == 0:
            self.take(context)
        tokens = torch.stack(
            [context.root.clamp(min=0), torch.full_like(context.root, 5), context.root.clamp(min=0)], 1
        )
        parents = torch.tensor([[-1, 0, 0]]).expand(context.batch, -1)
        return Proposal(tokens, parents, (~context.done)[:, None].expand(-1, 3))

    def take(self, context):
        states, length = context.fresh[id(self)].take()
        for row, kept in enumerate(context.state[id(self)]):
            kept.append({tap: state[row, : length[row]] for tap, state in states.items()})

    def select_rows(self, context, index):
        context.state[id(self)] = [context.state[id(self)][row] for row in index.tolist()]

    def add_rows(self, context, other):
        context.state[id(self)] += other.state[id(self)]


def test_features_are_those_of_every_cached_position_once_and_in_order():
    model, proposer = tiny.tiny_model("llama"), Features()
    context, _ = join_and_leave(Target(model), proposer, lambda *rows: {})
    proposer.take(context)
    for place, name in enumerate((3, 0, 2)):
        cached = int(context.cached[place])
        tokens = [*PROMPTS[name], *new_tokens(context, place)]
        assert cached == len(tokens) - 1
        outputs = model(input_ids=torch.tensor([tokens[:cached]]), output_hidden_states=True)
        for tap in proposer.taps:
            got = torch.cat([part[tap] for part in context.state[id(proposer)][place]])
            torch.testing.assert_close(got, outputs.hidden_states[tap][0])


def test_room_ends_with_the_length_the_row_and_the_position_table():
    config = tiny.tiny_config("gpt2", max_position_embeddings=16)
    context = start(Target(tiny.build(config)), BaseProposer(), [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7]], 30)
    assert context.room().tolist() == [16 - 1 - 3, 16 - 1 - 7]
    context.rows[0].max_length = context.rows[0].end + 3
    assert context.room().tolist() == [2, 8]
    context.rows[1].stopped = True
    assert context.room().tolist() == [2, 0]


def test_tokens_at_does_not_count_pads():
    context = start(Target(tiny.tiny_model("llama")), BaseProposer(), [[7, 8, 9, 10], [5, 6]], 4)
    assert context.tokens_at(torch.tensor([[0, 3], [0, 1]])).tolist() == [[7, 10], [5, 6]]
    assert context.row_ids(1).tolist()[0][:4] == [0, 0, 5, 6]


def test_clip_takes_out_what_is_too_deep_and_columns_that_nobody_uses():
    context = start(Target(tiny.tiny_model("llama")), BaseProposer(), [[1, 2, 3]], 3)
    root = int(context.root[0])
    parents = torch.tensor([[-1, 0, 0, 1, 2]])
    tree = Proposal(
        torch.tensor([[root, 4, 5, 6, 7]]), parents, torch.ones(1, 5, dtype=torch.bool), torch.rand(1, 5, 48)
    )
    clipped = context.clip(tree)  # one of three new tokens is out, one place is the bonus token's
    assert clipped.tokens.tolist() == [[root, 4, 5]]
    assert clipped.real.tolist() == [[True, True, True]]
    assert clipped.draft_probs.shape == (1, 3, 48)
    assert clipped.max_depth == 1
    context.rows[0].max_length = context.rows[0].end + 1
    assert context.clip(tree).tokens.tolist() == [[root]]


def test_what_pads_a_proposal_need_not_be_a_token():
    context = start(Target(tiny.tiny_model("llama")), BaseProposer(), PROMPTS[:2], 8)
    tokens = torch.stack([context.root, torch.tensor([5, -1])], 1)
    real = torch.tensor([[True, True], [True, False]])
    assert context.clip(Proposal(tokens, torch.tensor([[-1, 0]] * 2), real)).tokens[1].tolist() == [
        int(tokens[1, 0]),
        0,
    ]


def bad_proposals(root):
    ok = torch.ones(1, 2, dtype=torch.bool)
    chain = torch.tensor([[-1, 0]])
    yield "node 0 must be each row's root", Proposal(torch.tensor([[root + 1, 1]]), chain, ok)
    yield (
        "node 0 must be each row's root",
        Proposal(torch.tensor([[root, 1]] * 2), chain.expand(2, -1), ok.expand(2, -1)),
    )
    yield "real, except in done rows", Proposal(torch.tensor([[root, 1]]), chain, ~ok)  # would never get anywhere
    yield "outside 0..47", Proposal(torch.tensor([[root, 48]]), chain, ok)
    yield "outside 0..47", Proposal(torch.tensor([[root, -1]]), chain, ok)


@pytest.mark.parametrize("case", range(5))
def test_a_proposal_that_cannot_be_verified_is_refused(case):
    context = start(Target(tiny.tiny_model("llama")), BaseProposer(), [[1, 2, 3]], 8)
    complaint, proposal = list(bad_proposals(int(context.root[0])))[case]
    with pytest.raises(ValueError, match=complaint):
        context.clip(proposal)


def test_a_callers_object_that_returns_no_proposal_is_refused():
    class Wrong:
        taps = ()

        def propose(self, context):
            return [1, 2, 3]

    context = start(Target(tiny.tiny_model("llama")), WrappedProposer(Wrong()), [[1, 2, 3]], 8)
    with pytest.raises(TypeError, match=r"Wrong\.propose must return a spechead\.Proposal; got list"):
        step(context)


def test_columns_are_streamed_once_and_in_order_rows_that_ended_as_pads():
    columns = []
    model = tiny.tiny_model("llama")
    full = plain_greedy(model, PROMPTS[1], NEW)
    end = full[6]

    def stop(ids, scores):
        return torch.tensor([int(ids[0, -1]) == end and ids.shape[1] < 12 + NEW])

    target = Target(model)
    context = start(target, proposer_of("copy", "llama"), PROMPTS[:2], NEW, criteria=[stop], on_column=columns.append)
    speculative_decode(context)
    rows = torch.stack(columns, 1)
    for row in range(2):
        emitted = new_tokens(context, row)
        assert rows[row, : len(emitted)].tolist() == emitted
        assert not rows[row, len(emitted) :].any()
    assert len(new_tokens(context, 1)) == full.index(end) + 1


def test_a_rows_own_stream_gets_each_of_its_tokens():
    context = start(Target(tiny.tiny_model("llama")), proposer_of("copy", "llama"), PROMPTS[:2], NEW)
    streams = [new_tokens(context, row) for row in range(2)]
    for row, stream in zip(context.rows, streams, strict=True):
        row.on_token = stream.append
    speculative_decode(context)
    assert streams == [new_tokens(context, row) for row in range(2)]


def test_processors_see_every_prefix_in_order_pads_included():
    class Spy(LogitsProcessor):
        def __init__(self):
            self.seen = {}

        def __call__(self, input_ids, scores):
            self.seen.setdefault(tuple(input_ids[0, :9].tolist()), []).append(input_ids[0].tolist())
            return scores

    spy = Spy()
    context = start(Target(tiny.tiny_model("llama")), proposer_of("copy", "llama"), PROMPTS[:2], NEW, processors=[spy])
    speculative_decode(context)
    assert len(spy.seen) == 2
    for row, prefixes in enumerate(spy.seen.values()):
        ids = context.row_ids(row)[0].tolist()
        assert prefixes == [ids[: 9 + t] for t in range(NEW)]


def test_near_ties_of_greedy_rows_are_counted():
    class Tie(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.zeros_like(scores)

    context = start(Target(tiny.tiny_model("llama")), BaseProposer(), PROMPTS[:2], 3, processors=[Tie()])
    speculative_decode(context)
    assert context.stats.near_ties == 6
