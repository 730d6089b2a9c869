"""spechead.proposers.eagle: the head's entries, its limits, rows that join and leave, a conversation's next turn."""

import copy
import pickle

import pytest
import torch
from transformers import TemperatureLogitsWarper

from spechead import EagleProposer, SpeculativeConfig, enable_speculation
from spechead.config import DraftingConfig
from spechead.decoding import speculative_decode, step
from spechead.target import Target
from tests import tiny
from tests.running import ForwardCount, new_tokens, plain_greedy, start
from tests.tiny_heads import make_head, overfit
from tests.unit.proposers.described import Text, drafted_paths, row_text
from tests.unit.test_context import PROMPTS, join_and_leave

KINDS = pytest.mark.parametrize("kind", ["eagle", "eagle3"])
TREES = pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
DRAFT = {"eagle": {}, "eagle3": {"draft_vocab_size": 20}}
NEW = 16


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def learnt(kind, model, text):
    """A head that has learnt one text `[1, L]`."""
    head = make_head(kind, model, std=0.02)
    with torch.enable_grad():
        return overfit(head, model, text)


class Recorder(EagleProposer):
    """Notes what it drafted, and the true entries it had before its first draft."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drafted, self.resumed, self.contexts = [], [], []

    def start(self, context):
        super().start(context)
        self.resumed.append(context.state[id(self)].entries.tolist())
        self.contexts.append(context)

    def propose(self, context):
        proposal = super().propose(context)
        deepest = (context.cached[:, None] + proposal.depths) * (proposal.real & (proposal.depths > 0))
        self.drafted.append((proposal.real[:, 1:].sum(1).tolist(), deepest.max(1).values.tolist()))
        return proposal


class Checked(EagleProposer):
    """Compares its entries with those of whole texts, each time it has drafted."""

    model, checks = None, 0

    def propose(self, context):
        proposal = super().propose(context)
        state = context.state[id(self)]
        for row in proposal.real[:, 1:].any(1).nonzero().flatten().tolist():
            text = Text(self.head, self.model, row_text(context, row))
            count = len(text.ids[0]) - 1
            assert state.entries[row] == context.cached[row] == count
            for layer, fresh in enumerate(text.entries().layers):
                for ours, theirs in ((state.cache.keys, fresh.keys), (state.cache.values, fresh.values)):
                    torch.testing.assert_close(ours[layer][row, :, :count], theirs[0], atol=1e-9, rtol=1e-9)
                    self.checks += 1
        return proposal


@KINDS
@pytest.mark.parametrize(("tree", "layers"), [("chain", 1), ("static", 1), ("dynamic", 2)])
def test_after_catching_up_the_entries_are_those_of_a_fresh_run(kind, tree, layers):
    model = tiny.fresh_model("llama").double()
    prompts = [[7, 3, 11, 2], [30, 4, 4, 9, 1, 8, 2], [5, 6, 7, 8, 9]]
    texts = [torch.tensor([prompt + plain_greedy(model, prompt, NEW)])[:, :18] for prompt in prompts]
    head = make_head(kind, model, std=0.02, num_hidden_layers=layers)
    with torch.enable_grad():  # it has learnt two of the texts, of the third it knows nothing
        overfit(head, model, torch.cat(texts[:2]))
    proposer = Checked(head, tree=tree)
    proposer.model = model
    context = start(Target(model), proposer, prompts, NEW)
    speculative_decode(context)
    assert proposer.checks >= 2 * layers * (context.stats.row_steps - 3)
    assert context.stats.kept_tokens > context.stats.steps  # steps kept several tokens
    assert len({len(row) for row in context.stats.emitted_per_step}) > 1  # and rows kept different numbers


@KINDS
@pytest.mark.parametrize("batch", [1, 3])
def test_beyond_the_trained_positions_drafting_stops_and_decoding_goes_on(kind, batch):
    model, prompts = tiny.tiny_model("llama"), PROMPTS[:batch]
    limit = max(map(len, prompts)) + 6
    head = make_head(kind, model, trained_positions=limit, **DRAFT[kind])
    proposer = Recorder(head, num_draft_tokens=4)
    context = start(Target(model), proposer, prompts, NEW)
    speculative_decode(context)
    for row, prompt in enumerate(prompts):
        assert new_tokens(context, row) == plain_greedy(model, prompt, NEW)
        assert max(deepest[row] for _, deepest in proposer.drafted) == limit
    assert not any(proposer.drafted[-1][0])
    assert context.stats.drafted_tokens > 0


def test_a_head_that_is_past_its_positions_in_one_row_still_drafts_in_the_others():
    model = tiny.tiny_model("llama")
    head = make_head("eagle", model, trained_positions=8)
    proposer = Recorder(head)
    context = start(Target(model), proposer, [PROMPTS[2], PROMPTS[1]], NEW)  # 12 and 4 tokens
    step(context)
    assert proposer.drafted[0][0][0] == 0
    assert proposer.drafted[0][0][1] > 0
    speculative_decode(context)
    assert new_tokens(context, 1) == plain_greedy(model, PROMPTS[1], NEW)


def test_drafts_and_their_laws_stay_in_the_draft_vocabulary():
    model = tiny.tiny_model("llama")
    head = make_head("eagle3", model, draft_vocab_size=5)
    kept = set(head.draft_to_target.tolist())
    assert kept != set(range(5))
    context = start(
        Target(model), EagleProposer(head, tree="chain"), PROMPTS, NEW, [TemperatureLogitsWarper(1.0)], do_sample=True
    )
    proposal = context.proposer.propose(context)
    assert set(proposal.tokens[:, 1:].flatten().tolist()) <= kept
    laws = proposal.draft_probs[:, 1:]
    torch.testing.assert_close(laws.sum(-1), torch.ones_like(laws[..., 0]))
    assert set(laws.sum((0, 1)).nonzero().flatten().tolist()) == kept
    text = Text(head, model, row_text(context, 0))
    law = text.log_probs(())
    expected = torch.tensor([law.get(token, -torch.inf) for token in range(tiny.VOCAB)]).exp()
    torch.testing.assert_close(laws[0, 0], expected, atol=1e-5, rtol=1e-4)


def test_a_greedy_row_beside_a_sampled_one_drafts_point_masses():
    model = tiny.tiny_model("llama")
    head = make_head("eagle3", model, draft_vocab_size=20)
    context = start(Target(model), EagleProposer(head, tree="chain"), PROMPTS[:2], NEW, do_sample=True)
    context.rows[1].sampler.do_sample = False
    proposal = context.proposer.propose(context)
    assert not proposal.point_mass[0, 1:].any()
    assert proposal.point_mass[1, 1:].all()
    text = Text(head, model, row_text(context, 1))
    assert drafted_paths(proposal, 1) == [text.by_rank((0,) * depth) for depth in range(1, 6)]


@KINDS
@TREES
def test_rows_that_join_and_leave_equal_their_single_runs(kind, tree):
    model = tiny.fresh_model("llama").double()  # in float32 rounding may swap two of a random head's drafts
    target, proposer = Target(model), EagleProposer(make_head(kind, model, **DRAFT[kind]), tree=tree)
    context, finished = join_and_leave(target, proposer, lambda *rows: {})
    assert context.all_done
    for name, prompt in enumerate(PROMPTS):
        alone = start(target, proposer, [prompt], NEW)
        speculative_decode(alone)
        tokens, steps = finished[name]
        assert tokens == plain_greedy(model, prompt, NEW)[: len(tokens)]
        assert steps == alone.stats.emitted_per_step[0][: len(steps)]  # the same drafts were kept in the same steps


def test_rows_join_a_batch_that_has_not_drafted_yet():
    model = tiny.tiny_model("llama")
    target, proposer = Target(model), EagleProposer(make_head("eagle", model))
    context = start(target, proposer, PROMPTS[:1], NEW)
    context.add_rows(start(target, proposer, PROMPTS[1:2], NEW))
    speculative_decode(context)
    for row, prompt in enumerate(PROMPTS[:2]):
        assert new_tokens(context, row) == plain_greedy(model, prompt, NEW)
    assert context.stats.drafted_tokens > 0


class Conversation:
    """Two turns of a target whose head has learnt all of their text."""

    def __init__(self, kind, first=14, second=14):
        self.model = tiny.fresh_model("llama")
        self.prompt = tiny.prompt_ids(1, 10)
        self.call = {"do_sample": False, "return_dict_in_generate": True}
        one = self.generate(self.prompt, first).sequences
        self.second = torch.cat([one, torch.tensor([[21, 4, 17]])], dim=1)
        text = self.generate(self.second, second).sequences
        self.head = learnt(kind, self.model, text)
        self.first_new, self.second_new = first, second
        enable_speculation(self.model, head=self.head)

    def generate(self, ids, new, **settings):
        mask = torch.ones_like(ids)
        return self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, **self.call, **settings)

    def first(self):
        return self.generate(self.prompt, self.first_new, speculative=Recorder(self.head)).cache

    def next(self, cache, ids=None, head=None):
        """The second turn; returns its output, the true entries the head began with, and what the target was fed."""
        proposer = Recorder(head or self.head)
        ids = self.second if ids is None else ids
        with ForwardCount(self.model) as count:
            output = self.generate(ids, self.second_new, speculative=proposer, cache=cache)
        return output, proposer.resumed[0][0], count


@KINDS
def test_a_second_turn_drafts_as_well_as_a_fresh_run(kind):
    talk = Conversation(kind)
    fresh, none, _ = talk.next(None)
    output, entries, count = talk.next(talk.first())
    plain = talk.generate(talk.second, talk.second_new)
    assert torch.equal(output.sequences, plain.sequences)
    assert none == 0
    assert entries > 0
    assert fresh.stats.acceptance_length > 2
    assert output.stats.acceptance_length >= 0.95 * fresh.stats.acceptance_length
    assert output.stats.emitted_per_step == fresh.stats.emitted_per_step
    cached = talk.prompt.shape[1] + talk.first_new - 1
    assert count.shapes[0] == (1, talk.second.shape[1] - cached)  # nothing of the first turn was fed again
    assert count.fed == talk.second.shape[1] - cached + output.stats.nodes_fed


@KINDS
def test_the_resumed_entries_are_those_of_a_fresh_run(kind):
    talk = Conversation(kind)
    proposer = Recorder(talk.head)
    talk.generate(talk.second, talk.second_new, speculative=proposer, cache=talk.first())
    state = proposer.contexts[0].state[id(proposer)]
    text = row_text(proposer.contexts[0], 0)
    count = int(state.entries[0])
    fresh = Text(talk.head, talk.model, text[: count + 1]).entries()
    torch.testing.assert_close(state.cache.keys[0][0, :, :count], fresh.layers[0].keys[0], atol=1e-4, rtol=1e-4)
    assert count > talk.second.shape[1]


def test_a_copied_cache_carries_the_state_and_an_unpickled_one_starts_afresh():
    talk = Conversation("eagle3")
    cache = talk.first()
    copied, pickled = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    outputs = [talk.next(one) for one in (cache, copied, pickled)]
    assert [entries > 0 for _, entries, _ in outputs] == [True, True, False]
    for output, _, _ in outputs:
        assert torch.equal(output.sequences, outputs[0][0].sequences)
    assert outputs[1][0].stats.emitted_per_step == outputs[0][0].stats.emitted_per_step


def test_the_state_is_not_resumed_for_other_tokens_or_by_another_head():
    talk = Conversation("eagle")
    other = talk.second.clone()
    other[0, 3] = (other[0, 3] + 1) % tiny.VOCAB
    assert talk.next(talk.first(), ids=other)[1] == 0
    twin = copy.deepcopy(talk.head)
    output, entries, _ = talk.next(talk.first(), head=twin)
    assert entries == 0
    assert torch.equal(output.sequences, talk.generate(talk.second, talk.second_new).sequences)
    assert output.stats.drafted_tokens > 0
    cropped = talk.first()
    cropped.crop(-2)
    assert talk.next(cropped)[1] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"tree_size": 0}, "tree_size=0"),
        ({"branching": 0}, "branching=0"),
        ({"tree": "bush"}, "'bush' must be one of chain, static, dynamic"),
        ({"tree": []}, "drafts nothing"),
        ({"tree": [(0, 1)]}, "no parent"),
    ],
)
def test_what_drafts_nothing_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EagleProposer(make_head("eagle", tiny.tiny_model("llama")), **settings)


def drafted(model, **settings):
    out = model.generate(
        tiny.prompt_ids(),
        max_new_tokens=NEW,
        do_sample=False,
        speculative=SpeculativeConfig("eagle", **settings),
        return_dict_in_generate=True,
    )
    return out.stats.drafted_tokens / out.stats.row_steps


def test_a_heads_measured_confidence_threshold_is_its_default_and_a_call_may_give_another():
    model = enable_speculation(tiny.fresh_model("llama"))
    head = make_head("eagle3", model, num_draft_tokens=4, tree="chain", confidence_threshold=0.999)
    enable_speculation(model, head=head)
    assert drafted(model) < 1.5
    assert drafted(model, drafting=DraftingConfig(confidence_threshold=0)) > 2.5
    assert drafted(model, drafting=DraftingConfig(temperature=0.5)) < 1.5
    with pytest.raises(ValueError, match=r"temperature=0\.5 is for tree='chain'"):
        drafted(model, tree="dynamic", drafting=DraftingConfig(temperature=0.5))
    assert drafted(model, tree="static") > 15  # measured with chains; static trees have none
    with pytest.raises(ValueError, match=r"confidence_threshold=0\.3 stops chains and dynamic trees"):
        drafted(model, tree="static", drafting=DraftingConfig(confidence_threshold=0.3))


def test_medusa_heads_under_auto_refuse_what_only_a_drafting_model_has():
    model = enable_speculation(tiny.fresh_model("llama"))
    enable_speculation(model, head=make_head("medusa", model))
    config = SpeculativeConfig("auto", drafting=DraftingConfig(confidence_threshold=0.3))
    with pytest.raises(ValueError, match="means nothing to Medusa heads"):
        model.generate(tiny.prompt_ids(), max_new_tokens=4, do_sample=False, speculative=config)


@pytest.mark.parametrize("threshold", [-0.1, 1, 1.5])
def test_thresholds_that_are_no_chance_are_refused(threshold):
    with pytest.raises(ValueError, match="confidence_threshold"):
        DraftingConfig(confidence_threshold=threshold)
    with pytest.raises(ValueError, match="confidence_threshold"):
        make_head("eagle", tiny.tiny_model("llama"), confidence_threshold=threshold)


def test_a_given_tree_is_drafted_to_its_own_depth():
    model = tiny.tiny_model("llama")
    tree = [[0] * depth for depth in range(1, 8)]  # as a config.json holds it
    context = start(Target(model), EagleProposer(make_head("eagle", model), tree=tree), PROMPTS[:1], NEW)
    assert int(context.proposer.propose(context).depths.max()) == 7


@KINDS
def test_what_a_cache_carried_is_refused_by_name_once_the_model_was_cast(kind):
    model = enable_speculation(tiny.fresh_model("llama"))
    enable_speculation(model, head=make_head(kind, model))
    first = model.generate(
        tiny.prompt_ids(), max_new_tokens=6, do_sample=False, speculative="eagle", return_dict_in_generate=True
    )
    model.to(torch.bfloat16)
    for layer in first.cache.layers:
        layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()
    with pytest.raises(ValueError, match=r"torch\.float32.*give a cache that this model filled in its present dtype"):
        model.generate(first.sequences, max_new_tokens=4, do_sample=False, speculative="eagle", cache=first.cache)


@KINDS
def test_rows_that_end_apart_draw_as_their_single_runs(kind):
    model = enable_speculation(tiny.fresh_model("llama"))
    enable_speculation(model, head=make_head(kind, model, std=0.05))
    ids, mask = tiny.left_padded(4)
    settings = {"speculative": SpeculativeConfig("eagle", tree="chain"), "max_new_tokens": NEW, "do_sample": True}

    def sample(rows):
        own = [torch.Generator().manual_seed(row) for row in rows]
        return model.generate(ids[rows], attention_mask=mask[rows], generator=own, top_k=0, **settings)

    together = sample([0, 1, 2, 3])
    assert [sample([row]).tolist() for row in range(4)] == [[row] for row in together.tolist()]
