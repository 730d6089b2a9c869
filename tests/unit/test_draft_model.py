"""spechead.proposers.draft_model: the law it reports, what it feeds, and where it stops."""

from typing import ClassVar

import pytest
import torch
from transformers import BloomConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from spechead import DraftModelProposer, enable_speculation
from spechead.config import DraftingConfig
from spechead.context import Context
from spechead.decoding import speculative_decode, step
from spechead.proposers.base import BaseProposer
from spechead.sampling import Draws
from spechead.target import Target
from tests import tiny
from tests.running import ForwardCount, new_tokens, plain_greedy, start

WARPERS = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(12), TopPLogitsWarper(0.9)]
PROMPTS = [tiny.prompt_ids(1, width, seed=width)[0].tolist() for width in (9, 5)]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def target():
    return Target(tiny.tiny_model("llama"))


def draft(family="llama", seed=1, **overrides):
    """A draft whose probe is over, so that forwards counted later are drafting."""
    model = (
        tiny.build(tiny.tiny_config(family, **overrides), seed=seed)
        if overrides
        else tiny.tiny_model(family, seed=seed)
    )
    wrapped = Target(model)
    assert wrapped.verdict.tier == "tree"
    return wrapped


class Noted(Draws):
    """Draws that note the law and the token of every sample."""

    log: ClassVar[list] = []

    def sample(self, p, live):
        tokens = super().sample(p, live)
        self.log.append((p.clone(), tokens.clone(), live.clone()))
        return tokens


class NotedContext(Context):
    @property
    def draws(self):
        return Noted([row.sampler for row in self.rows])


def begin(target, proposer, prompts=PROMPTS, max_new_tokens=30, **settings):
    context = start(target, proposer, prompts, max_new_tokens, kind=NotedContext, **settings)
    Noted.log = []
    return context


def expected_law(model, ids, warpers=(), temperature=None):
    """The draft's law after one row of ids, by a forward without cache."""
    scores = model(input_ids=torch.tensor([ids])).logits[:, -1]
    if temperature is not None:
        scores = scores / temperature
    for warper in warpers:
        scores = warper(None, scores)
    return torch.softmax(scores, -1)[0]


def drafted(context, proposal, row):
    return [*context.row_ids(row)[0, int(context.pads[row]) :].tolist(), *proposal.tokens[row, 1:].tolist()]


@pytest.mark.parametrize("steps", [0, 2])
def test_the_law_reported_is_the_law_drawn_from_and_the_drafts_own(target, steps):
    """Also on a cache that has seen rejections, and for left-padded rows."""
    proposer = DraftModelProposer(draft(), 4)
    context = begin(target, proposer, processors=WARPERS, do_sample=True)
    for _ in range(steps):
        step(context)
    Noted.log = []
    proposal = proposer.propose(context)
    assert proposal.tokens.shape == (2, 5)
    assert len(Noted.log) == 4
    for depth, (law, tokens, live) in enumerate(Noted.log, 1):
        assert live.all()
        assert torch.equal(proposal.tokens[:, depth], tokens)
        assert torch.equal(proposal.draft_probs[:, depth], law)
        for row in range(2):
            ids = drafted(context, proposal, row)[: int(context.cached[row]) + depth]
            torch.testing.assert_close(law[row], expected_law(proposer.draft.model, ids, WARPERS))


def test_the_drafts_own_temperature_takes_the_place_of_the_calls(target):
    proposer = DraftModelProposer(draft(), 2, drafting=DraftingConfig(temperature=2.5))
    context = begin(target, proposer, processors=WARPERS, do_sample=True)
    proposal = proposer.propose(context)
    for row in range(2):
        ids = drafted(context, proposal, row)[: int(context.cached[row]) + 1]
        law = expected_law(proposer.draft.model, ids, WARPERS[1:], 2.5)
        torch.testing.assert_close(proposal.draft_probs[row, 1], law)


def test_greedy_drafts_are_point_masses_at_the_drafts_best(target):
    proposer = DraftModelProposer(draft(), 3)
    context = begin(target, proposer)
    proposal = proposer.propose(context)
    assert proposal.draft_probs is None
    for row in range(2):
        ids = drafted(context, proposal, row)
        for depth in range(1, 4):
            law = expected_law(proposer.draft.model, ids[: int(context.cached[row]) + depth])
            assert int(proposal.tokens[row, depth]) == int(law.argmax())


def test_greedy_and_sampled_rows_side_by_side(target):
    proposer = DraftModelProposer(draft(), 3)
    context = begin(target, proposer, processors=[TemperatureLogitsWarper(2.0)], do_sample=True)
    context.rows[0].sampler.do_sample = False
    proposal = proposer.propose(context)
    assert proposal.point_mass[0, 1:].all()
    assert proposal.draft_probs[0, 1:].max(-1).values.tolist() == [1.0] * 3
    assert not proposal.point_mass[1, 1:].any()


@pytest.mark.parametrize(
    ("target_rows", "draft_rows", "shared"), [(48, 64, 40), (64, 48, 40), (48, 48, 7), (48, 64, 48)]
)
def test_only_shared_ids_are_drafted_and_q_covers_the_targets_rows(target_rows, draft_rows, shared):
    wide = Target(tiny.build(tiny.tiny_config("llama", vocab_size=target_rows)))
    proposer = DraftModelProposer(draft(vocab_size=draft_rows), 6, shared)
    context = begin(wide, proposer, processors=[TemperatureLogitsWarper(3.0)], do_sample=True)
    proposal = proposer.propose(context)
    laws = proposal.draft_probs[:, 1:]
    assert laws.shape[-1] == target_rows
    assert not laws[..., shared:].any()
    torch.testing.assert_close(laws.sum(-1), torch.ones(2, 6))
    assert (laws[..., :shared] > 0).any(-1).all()
    assert int(proposal.tokens[:, 1:].max()) < shared


def test_padded_vocabularies_decode_as_plain_does():
    model = tiny.fresh_model("llama")
    padded = tiny.build(tiny.tiny_config("llama", vocab_size=64))
    with torch.no_grad():
        for mine, theirs in zip(padded.parameters(), model.parameters(), strict=True):
            mine[: len(theirs)] = theirs  # a copy of the target under 16 more rows
    plain = plain_greedy(model, PROMPTS[0], 20)
    enable_speculation(model, draft_model=padded)
    out = model.generate(
        torch.tensor([PROMPTS[0]]),
        max_new_tokens=20,
        do_sample=False,
        speculative="draft_model",
        return_dict_in_generate=True,
    )
    assert out.sequences[0, len(PROMPTS[0]) :].tolist() == plain
    assert out.stats.acceptance_length > 4


def test_after_a_step_only_what_is_new_is_fed(target):
    """A copy keeps everything: its last token and the root are new. A stranger is rejected: the root alone is."""
    for seed in (0, 1):
        proposer = DraftModelProposer(draft(seed=seed), 4)
        context = begin(target, proposer, PROMPTS[:1])
        kept_all = []
        for turn in range(5):
            before = context.stats.emitted_tokens
            with ForwardCount(proposer.draft.model) as count:
                step(context)
            emitted = context.stats.emitted_tokens - before
            assert [shape[1] for shape in count.shapes[1:]] == [1] * 3
            assert count.shapes[0][1] == (2 if turn and kept_all[-1] else 1)
            kept_all.append(emitted == 5)
        assert all(kept_all) if seed == 0 else not any(kept_all)


def test_a_batchs_first_draft_forward_feeds_what_its_neediest_row_lacks(target):
    proposer = DraftModelProposer(draft(seed=0), 4)
    context = begin(target, proposer)
    with ForwardCount(proposer.draft.model) as count:
        step(context)
        step(context)
    assert count.shapes == [(2, 1)] * 4 + [(2, 2)] + [(2, 1)] * 3


@pytest.mark.parametrize("pauses", [0, 2])
def test_drafts_equal_those_of_a_fresh_start(pauses):
    """After partial acceptance, and after steps in which something else drafted: of a small vocabulary, so that tokens
    which the draft fed in vain come to stand where it fed them."""
    small = Target(tiny.build(tiny.tiny_config("llama", vocab_size=4)))
    proposer = DraftModelProposer(draft(seed=3, vocab_size=4), 4)
    context = begin(small, proposer, [[1, 2, 3, 1], [2, 0]], max_new_tokens=60)
    for _ in range(6):
        step(context)
        context.proposer = BaseProposer()
        for _ in range(pauses):
            step(context)
        context.proposer = proposer
        fresh = DraftModelProposer(proposer.draft, 4)
        rows = [context.row_ids(row)[0, int(context.pads[row]) :].tolist() for row in range(2)]
        again = proposer.propose(context)
        for row, ids in enumerate(rows):
            alone = begin(small, fresh, [ids[:-1]])
            alone.ids[0, len(ids) - 1], alone.root[0] = ids[-1], ids[-1]
            torch.testing.assert_close(again.tokens[row], fresh.propose(alone).tokens[0])


def test_a_confidence_stop_ends_the_chain_behind_the_token_it_drew(target):
    """Whatever was drawn is proposed: a token dropped for its value would bend the law."""
    threshold = 0.2
    proposer = DraftModelProposer(draft(), 6, drafting=DraftingConfig(confidence_threshold=threshold))
    context = begin(target, proposer, processors=[TemperatureLogitsWarper(0.7)], do_sample=True)
    lengths = set()
    for _ in range(8):
        Noted.log = []
        proposal = proposer.propose(context)
        for row in range(2):
            drawn = [(float(p[row, t[row]]), int(t[row])) for p, t, live in Noted.log if live[row]]
            real = proposal.real[row, 1:]
            assert proposal.tokens[row, 1:][real].tolist() == [token for _, token in drawn]
            assert all(sure >= threshold for sure, _ in drawn[:-1])
            assert len(drawn) == 6 or drawn[-1][0] < threshold
            lengths.add(len(drawn))
        step(context)
    assert len(lengths) > 1


def test_without_a_threshold_nothing_stops_the_chain(target):
    proposer = DraftModelProposer(draft(), 6)
    context = begin(target, proposer, processors=[TemperatureLogitsWarper(9.0)], do_sample=True)
    assert proposer.propose(context).real.all()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("prompts", [[9], [9, 5], [30, 12, 5], [16], [17, 3]])
def test_a_draft_whose_positions_run_out_stops_drafting_and_decoding_goes_on(target, family, prompts):
    """GPT-2's table has 16 rows and would raise beyond them; prompts may be longer than it, pads included."""
    texts = [tiny.prompt_ids(1, width, seed=width)[0].tolist() for width in prompts]
    proposer = DraftModelProposer(draft(family, max_position_embeddings=16), 4)
    context = begin(target, proposer, texts)
    depths = []
    while not context.all_done:
        cached = context.cached.clone()
        proposal = proposer.propose(context)
        depths += [(int(at), int(real[1:].sum())) for at, real in zip(cached, proposal.real, strict=True)]
        step(context)
    assert all(at + depth <= 16 for at, depth in depths if depth)
    assert any(depth for _, depth in depths) == (min(prompts) < 16)
    for row, text in enumerate(texts):
        assert new_tokens(context, row) == plain_greedy(target.model, text, 30)


@pytest.mark.parametrize("widths", [(30, 9), (9, 30)])
def test_rows_join_whether_or_not_the_draft_was_fed_their_prompts(target, widths):
    texts = [tiny.prompt_ids(1, width, seed=width)[0].tolist() for width in widths]
    proposer = DraftModelProposer(draft("gpt2", max_position_embeddings=16), 4)
    context = begin(target, proposer, texts[:1])
    context.add_rows(begin(target, proposer, texts[1:]))
    speculative_decode(context)
    assert context.stats.drafted_tokens > 0
    assert [new_tokens(context, row) for row in range(2)] == [plain_greedy(target.model, text, 30) for text in texts]


def test_a_draft_without_tree_masks_drafts_for_one_row_and_refuses_more(target):
    config = BloomConfig(vocab_size=tiny.VOCAB, hidden_size=32, n_layer=2, n_head=4)
    alibi = Target(tiny.build(config, "eager"))
    assert alibi.verdict.tier == "chain"
    context = begin(target, DraftModelProposer(alibi, 3), PROMPTS[:1])
    speculative_decode(context)
    assert new_tokens(context, 0) == plain_greedy(target.model, PROMPTS[0], 30)
    assert context.stats.drafted_tokens > 0
    context = begin(target, DraftModelProposer(alibi, 3))
    with pytest.raises(ValueError, match="one row's chain at a time; got 2 rows"):
        step(context)


def test_drafting_nothing_is_refused(target):
    with pytest.raises(ValueError, match="num_draft_tokens=0 proposes nothing"):
        DraftModelProposer(target, 0)
