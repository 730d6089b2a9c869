"""spechead.sampling: rows' processors, laws and draws."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spechead.sampling import NEAR_TIE, Draws, Sampler, best_tokens, is_near_tie, probabilities, process, warp

VOCAB = 6


def scores(batch=3, seed=0):
    return torch.randn(batch, VOCAB, generator=torch.Generator().manual_seed(seed))


def samplers(processors, batch=3, do_sample=True, generators=None):
    shared = LogitsProcessorList(processors)
    return [Sampler(shared, row, do_sample, generators[row] if generators else None) for row in range(batch)]


class Spy(LogitsProcessor):
    """Adds the row's own length, and notes the ids it was shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        return scores + input_ids.shape[1]


def test_prefix_free_warpers_equal_a_call_over_the_batch():
    processors = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(4), TopPLogitsWarper(0.9)]
    raw = scores()
    expected = LogitsProcessorList(processors)(torch.zeros(3, 2, dtype=torch.long), raw.clone())
    got = process(samplers(processors), [torch.zeros(1, 2, dtype=torch.long)] * 3, raw)
    assert torch.equal(got, expected)


def test_prefix_dependent_processors_see_their_own_rows_prefix():
    spy = Spy()
    ids = [torch.tensor([[1, 2]]), torch.tensor([[3]]), torch.tensor([[4, 5, 0]])]
    got = process(samplers([spy]), ids, torch.zeros(3, VOCAB))
    assert spy.seen == [[[1, 2]], [[3]], [[4, 5, 0]]]
    assert got[:, 0].tolist() == [2, 1, 3]


def test_the_order_of_the_processors_is_kept():
    raw = scores()
    ids = [torch.tensor([[1, 2, 1]])] * 3
    processors = [TemperatureLogitsWarper(0.5), NoRepeatNGramLogitsProcessor(2), TopKLogitsWarper(2)]
    expected = torch.cat([LogitsProcessorList(processors)(i, raw[r : r + 1].clone()) for r, i in enumerate(ids)])
    assert torch.equal(process(samplers(processors), ids, raw), expected)


def test_rows_of_other_calls_keep_their_own_lists():
    raw = scores(2)
    mixed = [*samplers([TemperatureLogitsWarper(0.5)], 1), *samplers([TopKLogitsWarper(1)], 1)]
    got = process(mixed, [torch.zeros(1, 1, dtype=torch.long)] * 2, raw)
    assert torch.equal(got[0], raw[0] / 0.5)
    assert int(torch.isfinite(got[1]).sum()) == 1


def test_raw_scores_are_left_alone():
    class InPlace(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, 0] = 99.0
            return scores

    raw = scores()
    before = raw.clone()
    process(samplers([InPlace()]), [torch.zeros(1, 1, dtype=torch.long)] * 3, raw)
    assert torch.equal(raw, before)


def test_a_repetition_penalty_with_rowwise_ignored_prompts():
    processor = RepetitionPenaltyLogitsProcessor(2.0)
    processor.prompt_ignore_length = torch.tensor([1, 2])
    got = process(samplers([processor], 2), [torch.tensor([[1, 2]]), torch.tensor([[1, 2]])], torch.ones(2, VOCAB))
    assert got[0].tolist() == [1, 1, 0.5, 1, 1, 1]  # token 1 lies in row 0's ignored prompt
    assert got[1].tolist() == [1, 1, 1, 1, 1, 1]


def test_a_prefix_constraint_is_asked_for_its_own_batch_id():
    asked = []

    def allowed(batch_id, sent):
        asked.append((batch_id, sent.tolist()))
        return [batch_id]

    processor = PrefixConstrainedLogitsProcessor(allowed, 1)
    rows = samplers([processor], 3)
    got = process([rows[0], rows[2]], [torch.tensor([[5]]), torch.tensor([[4, 3]])], torch.zeros(2, VOCAB))
    assert asked == [(0, [5]), (2, [4, 3])]
    assert got.argmax(-1).tolist() == [0, 2]


def test_laws_of_greedy_and_sampled_rows():
    raw = scores(2)
    one = LogitsProcessorList()
    mixed = [Sampler(one, 0, False), Sampler(one, 1, True)]
    law = probabilities(mixed, raw)
    assert law[0].tolist() == torch.nn.functional.one_hot(raw[0].argmax(), VOCAB).tolist()
    assert torch.equal(law[1], torch.softmax(raw[1], -1))
    assert torch.equal(probabilities(mixed[:1], raw[:1]), law[:1])
    assert torch.equal(probabilities(mixed[1:], raw[1:]), law[1:])


def test_a_greedy_tie_goes_to_the_first_token_as_in_plain():
    law = probabilities(samplers([], 1, do_sample=False), torch.tensor([[0.0, 1.0, 1.0, 0.0]]))
    assert law.tolist() == [[0, 1, 0, 0]]


def test_the_drafts_law_takes_temperature_top_k_and_top_p_only():
    raw = scores()
    processors = [Spy(), TemperatureLogitsWarper(0.5), TopKLogitsWarper(3), TopPLogitsWarper(0.8)]
    expected = LogitsProcessorList(processors[1:])(None, raw.clone())
    assert torch.equal(warp(samplers(processors), raw), expected)
    assert processors[0].seen == []


def test_the_drafts_own_temperature_replaces_the_calls():
    raw = scores()
    own = warp(samplers([TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]), raw, temperature=2.0)
    assert torch.equal(own, TopKLogitsWarper(3)(None, raw / 2.0))


@pytest.mark.parametrize("generators", [None, [torch.Generator(), torch.Generator(), torch.Generator()]])
def test_a_coin_is_strict(generators, monkeypatch):
    """u = 0 must not accept what has probability 0."""
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.zeros(*shape, dtype=torch.float64))
    live = torch.tensor([True, True, False])
    coin = Draws(samplers([], generators=generators)).accept(torch.tensor([0.0, 1e-9, 0.0]), live)
    assert coin.tolist() == [False, True, False]


def test_coins_have_their_probability():
    draws = Draws(samplers([], 4000, generators=[torch.Generator().manual_seed(5)] * 4000))
    live = torch.ones(4000, dtype=torch.bool)
    share = draws.accept(torch.full((4000,), 0.3), live).double().mean()
    assert abs(float(share) - 0.3) < 4 * math.sqrt(0.21 / 4000)
    assert draws.accept(torch.full((4000,), 1.0), live).all()


def test_samples_follow_the_law_and_greedy_rows_draw_nothing():
    law = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0, 0.0])
    generator = torch.Generator().manual_seed(3)
    draws = Draws(samplers([], 4000, generators=[generator] * 4000))
    tokens = draws.sample(law.expand(4000, -1), torch.ones(4000, dtype=torch.bool))
    shares = torch.bincount(tokens, minlength=VOCAB) / 4000
    assert float((shares - law).abs().max()) < 0.04
    before = generator.get_state()
    greedy = Draws(samplers([], 1, do_sample=False, generators=[generator]))
    assert greedy.sample(law[None], torch.tensor([True])).tolist() == [0]
    assert torch.equal(generator.get_state(), before)


def test_a_row_with_its_own_generator_draws_only_when_it_is_asked():
    generators = [torch.Generator().manual_seed(row) for row in range(3)]
    draws = Draws(samplers([], generators=generators))
    before = [generator.get_state() for generator in generators]
    law = torch.full((3, VOCAB), 1 / VOCAB)
    live = torch.tensor([True, False, True])
    for call in (lambda: draws.accept(torch.full((3,), 0.5), live), lambda: draws.sample(law, live)):
        call()
        moved = [not torch.equal(g.get_state(), b) for g, b in zip(generators, before, strict=True)]
        assert moved == [True, False, True]
        before = [generator.get_state() for generator in generators]


def test_a_row_of_a_batch_draws_what_it_would_draw_alone():
    law = torch.rand(3, VOCAB, generator=torch.Generator().manual_seed(1))
    law = law / law.sum(1, keepdim=True)
    live = torch.ones(3, dtype=torch.bool)
    together = Draws(samplers([], generators=[torch.Generator().manual_seed(row) for row in range(3)]))
    batch = [(together.accept(torch.full((3,), 0.5), live), together.sample(law, live)) for _ in range(20)]
    for row in range(3):
        alone = Draws(samplers([], 1, generators=[torch.Generator().manual_seed(row)]))
        for coin, token in batch:
            assert bool(coin[row]) == bool(alone.accept(torch.tensor([0.5]), live[:1]))
            assert int(token[row]) == int(alone.sample(law[row : row + 1], live[:1]))


def test_one_seed_repeats_a_shared_stream():
    law = torch.full((3, VOCAB), 1 / VOCAB)
    live = torch.ones(3, dtype=torch.bool)

    def run(seed):
        torch.manual_seed(seed)
        draws = Draws(samplers([]))
        return [draws.sample(law, live).tolist() + draws.accept(law[:, 0], live).tolist() for _ in range(10)]

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("size", [1, 7, 63, 64, 640, 1000, 49152, 50257])
def test_the_best_token_is_the_first_of_the_best(size):
    generator = torch.Generator().manual_seed(size)
    scores = torch.randint(0, 4, (6, size), generator=generator).float()  # full of ties
    scores[1] = -torch.inf
    scores[2, size // 2] = torch.inf
    first = [int((row == row.max()).nonzero()[0, 0]) for row in scores]
    assert best_tokens(scores).tolist() == first
    assert best_tokens(scores.T.contiguous().T).tolist() == first, "columns that are not contiguous"


def test_a_near_tie_is_another_score_within_the_bound():
    scores = torch.tensor([1.0, 5.0, 2.0, 5.0 - NEAR_TIE / 2])
    assert is_near_tie(scores, 1)
    assert not is_near_tie(scores[:3], 1)
    assert is_near_tie(torch.tensor([3.0, 3.0]), 0)
    assert is_near_tie(torch.tensor([3.0, 3.0]), 1)
    assert not is_near_tie(torch.tensor([3.0]), 0)
    assert not is_near_tie(torch.tensor([-torch.inf, 3.0, -torch.inf]), 1)
