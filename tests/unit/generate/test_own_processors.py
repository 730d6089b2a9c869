"""A caller's own processors and criteria: they see the ids that plain generate shows them, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor, StoppingCriteria

from tests.unit.generate.harness import METHODS, PROMPTS, assert_speculated, padded, same_as_plain, single, speculate

NEW = 20


class Log(LogitsProcessor):
    """Notes the ids of every call, a row at a time."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.dtype == torch.float32
        self.seen += input_ids.tolist()
        return scores


class NotTwice(LogitsProcessor):
    """Forbids the last token, in place."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_(1, input_ids[:, -1:], -torch.inf)


class Countdown(LogitsProcessor):
    """Lowers token 25 by the number of calls so far: state that only the number and order of calls can spoil."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores[:, 25] -= self.calls
        return scores


class Criterion(StoppingCriteria):
    """Stops a row by a function of its ids, and notes what it was shown."""

    def __init__(self, stops: Callable[[list[int]], bool]) -> None:
        self.stops = stops
        self.seen: list[list[int]] = []
        self.scores: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen += input_ids.tolist()
        self.scores.append(scores)
        return torch.tensor([self.stops(row) for row in input_ids.tolist()])


def with_processor(model: Any, inputs: dict[str, Any], processor: Any, method: Any, **settings: Any) -> Any:
    settings = {"max_new_tokens": NEW, **settings}
    return speculate(model, inputs, method, logits_processor=LogitsProcessorList([processor]), **settings)


@pytest.mark.parametrize("method", METHODS)
def test_processor_sees_the_ids_of_plain_in_order(model: Any, method: str) -> None:
    plain, ours = Log(), Log()
    with_processor(model, single(), plain, None)
    output = with_processor(model, single(), ours, method)
    assert_speculated(output.stats)
    assert ours.seen == plain.seen
    assert [len(ids) for ids in ours.seen] == list(range(11, 11 + NEW))


@pytest.mark.parametrize("method", METHODS)
def test_processor_sees_each_rows_ids_with_its_pads_in_order(model: Any, method: str) -> None:
    plain, ours = Log(), Log()
    with_processor(model, padded(), plain, None)
    with_processor(model, padded(), ours, method)
    for row in padded()["input_ids"].tolist():
        mine = [ids for ids in ours.seen if ids[:11] == row]
        assert mine == [ids for ids in plain.seen if ids[:11] == row]
        assert len(mine) == NEW


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("method", METHODS)
def test_processor_that_writes_in_place(model: Any, method: str, prompt: str) -> None:
    inputs = PROMPTS[prompt]()
    plain = with_processor(model, inputs, NotTwice(), None, output_logits=True)
    ours = with_processor(model, inputs, NotTwice(), method, output_logits=True)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert_speculated(ours.stats)
    assert bool(torch.isfinite(torch.stack(ours.logits)).all())  # the raw logits are kept from its hands


@pytest.mark.parametrize("method", METHODS)
def test_processor_with_state_gets_the_calls_of_plain_for_one_row(model: Any, method: str) -> None:
    plain = with_processor(model, single(), Countdown(), None)
    ours = with_processor(model, single(), Countdown(), method)
    assert ours.sequences.tolist() == plain.sequences.tolist()


def test_processors_in_a_plain_list(model: Any) -> None:
    settings: dict[str, Any] = {"max_new_tokens": NEW, "logits_processor": [NotTwice()]}
    same_as_plain(model, single(), "draft_model", **settings)


RULES: dict[str, Callable[[list[int]], bool]] = {
    "last_two": lambda ids: ids[-2:] == [30, 6],
    "length": lambda ids: len(ids) >= 17,
    "first_token": lambda ids: True,
    "repeats": lambda ids: ids[-1] in ids[-8:-1],
    "never": lambda ids: False,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", RULES)
def test_criterion_is_asked_after_every_token(model: Any, rule: str, method: str) -> None:
    plain, ours = Criterion(RULES[rule]), Criterion(RULES[rule])
    expected = model.generate(**single(), max_new_tokens=NEW, stopping_criteria=[plain])
    output = speculate(model, single(), method, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([ours]))
    assert output.sequences.tolist() == expected.tolist()
    assert ours.seen == plain.seen
    assert output.stats.emitted_tokens == expected.shape[1] - 12


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", RULES)
def test_criterion_in_a_batch_stops_rows_apart(model: Any, rule: str, method: str) -> None:
    # An end token gives plain generate something to fill stopped rows with; 47 does not occur before they stop.
    settings: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": 47, "pad_token_id": 0}
    expected = model.generate(**padded(), stopping_criteria=[Criterion(RULES[rule])], **settings)
    output = speculate(model, padded(), method, stopping_criteria=[Criterion(RULES[rule])], **settings)
    assert output.sequences.tolist() == expected.tolist()


def test_stopped_rows_are_filled_where_plain_would_write_on(model: Any) -> None:
    """Without an end token plain generate lets stopped rows write on until all have; here a stopped row has ended."""
    criterion = Criterion(lambda ids: ids[-2:] == [3, 9])
    output = speculate(model, padded(), "draft_model", max_new_tokens=NEW, stopping_criteria=[criterion])
    row = output.sequences[0, 11:].tolist()
    stop = row.index(9) + 1
    assert row[stop - 2 : stop] == [3, 9]
    assert row[stop:] == [0] * (NEW - stop)


@pytest.mark.parametrize("method", METHODS)
def test_criterion_gets_the_scores_so_far(model: Any, method: str) -> None:
    settings = {"max_new_tokens": NEW, "output_scores": True}
    plain, ours = Criterion(RULES["repeats"]), Criterion(RULES["repeats"])
    speculate(model, single(), None, stopping_criteria=[plain], **settings)
    speculate(model, single(), method, stopping_criteria=[ours], **settings)
    assert [len(scores) for scores in ours.scores] == [len(scores) for scores in plain.scores]
    for mine, theirs in zip(ours.scores[-1], plain.scores[-1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("end", [14, 40])
def test_own_length_criterion_takes_the_place_of_the_argument(model: Any, end: int) -> None:
    settings: dict[str, Any] = {"max_new_tokens": NEW, "stopping_criteria": [MaxLengthCriteria(end)]}
    output = same_as_plain(model, padded(), "draft_model", **settings)
    assert output.sequences.shape[1] == end


def test_time_limit_is_looked_at_after_every_token(model: Any) -> None:
    output = speculate(model, single(), "draft_model", max_new_tokens=NEW, stopping_criteria=[MaxTimeCriteria(0.0)])
    assert output.sequences.shape[1] == 12
    assert speculate(model, single(), "draft_model", max_new_tokens=NEW, max_time=0.0).sequences.shape[1] == 12


def test_criterion_that_answers_for_rows_it_was_not_given_is_refused(model: Any) -> None:
    def three(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([False, True, False])

    with pytest.raises(ValueError, match="function returned 3 values for one row"):
        speculate(model, padded(), "draft_model", max_new_tokens=NEW, stopping_criteria=[three])
