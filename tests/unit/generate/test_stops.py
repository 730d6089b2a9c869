"""Where a generation ends: end tokens of every kind and stop strings, also in the middle of an accepted run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tests.unit.generate.harness import (
    METHODS,
    PROMPTS,
    llama,
    padded,
    same_as_plain,
    single,
    speculate,
    speculating,
    tokenizer,
)

NEW = 20


def greedy(model: Any) -> list[int]:
    return model.generate(**single(), max_new_tokens=NEW)[0, 11:].tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", range(NEW))
def test_each_token_of_a_run_declared_the_end(model: Any, place: int, method: str) -> None:
    text = greedy(model)
    end = text[place]
    settings = {"max_new_tokens": NEW, "eos_token_id": end, "output_scores": True, "output_logits": True}
    plain = model.generate(**single(), **settings)
    output = speculate(model, single(), method, **settings)
    length = text.index(end) + 1
    assert output.sequences.tolist() == plain.tolist()
    assert output.sequences[0, 11:].tolist() == text[:length]
    assert len(output.scores) == len(output.logits) == length
    assert output.stats.emitted_tokens == length - 1
    assert output.cache.get_seq_length() == 11 + length - 1
    if length > 3 and method == "draft_model":
        assert output.stats.kept_tokens > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "end", [None, 6, [6, 18], torch.tensor([6, 18]), torch.tensor(6)], ids=["none", "int", "list", "tensor", "scalar"]
)
def test_kinds_of_end_token(model: Any, end: Any, method: str) -> None:
    for prompt in PROMPTS.values():
        plain = model.generate(**prompt(), max_new_tokens=NEW, eos_token_id=end)
        output = speculate(model, prompt(), method, max_new_tokens=NEW, eos_token_id=end)
        assert output.sequences.tolist() == plain.tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("end", [1, 3, 6, 13, 26, 30, 31])
def test_rows_end_at_different_tokens(model: Any, end: int, method: str) -> None:
    output = same_as_plain(model, padded(), method, keeps=False, max_new_tokens=NEW, eos_token_id=end, pad_token_id=2)
    lengths = [[*row[11:], end].index(end) + 1 for row in output.sequences.tolist()]
    emitted = sum(min(length, NEW) for length in lengths) - 3
    assert output.stats.emitted_tokens == emitted
    assert sum(count for row in output.stats.emitted_per_step for count, _ in row) == emitted


def test_end_token_of_the_models_own_config() -> None:
    model = speculating(llama())
    model.generation_config.eos_token_id = [6, 19]
    assert same_as_plain(model, single(), "draft_model", max_new_tokens=NEW).sequences[0, -1] == 6
    longer = same_as_plain(model, single(), "draft_model", generation_config=GenerationConfig(eos_token_id=19))
    assert longer.sequences[0, -1] == 19


def texts(model: Any) -> list[str]:
    """Return stop strings cut from the greedy text: inside a token, a token, across tokens, the whole, and none."""
    words = [tokenizer().decode([token]) for token in greedy(model)]
    joined = "".join(words)
    two_letters = words[2]
    return [words[0], words[8], two_letters[0], two_letters[1], words[3] + words[4], joined[4:9], joined, "zzz"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("which", range(8))
def test_stop_string(model: Any, which: int, method: str) -> None:
    stop = texts(model)[which]
    settings = {"max_new_tokens": NEW, "stop_strings": stop, "tokenizer": tokenizer()}
    plain = model.generate(**single(), **settings)
    output = speculate(model, single(), method, **settings)
    assert output.sequences.tolist() == plain.tolist()
    if method == "draft_model" and plain.shape[1] > 13:
        assert output.stats.kept_tokens > 0
    assert (plain.shape[1] < 11 + NEW) == (which < 6)


@pytest.mark.parametrize("method", METHODS)
def test_several_stop_strings_in_a_batch(model: Any, method: str) -> None:
    settings: dict[str, Any] = {"stop_strings": texts(model)[1:5], "tokenizer": tokenizer()}
    # The end token, which does not occur, lets plain generate fill the rows that have stopped.
    same_as_plain(model, padded(), method, keeps=False, max_new_tokens=NEW, eos_token_id=46, **settings)


def test_stop_strings_of_a_generation_config(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=NEW, stop_strings=[texts(model)[1]])
    plain = model.generate(**single(), generation_config=config, tokenizer=tokenizer())
    output = speculate(model, single(), "draft_model", generation_config=config, tokenizer=tokenizer())
    assert output.sequences.tolist() == plain.tolist()
    assert plain.shape[1] < 11 + NEW


def test_stop_strings_beside_own_criteria(model: Any) -> None:
    def long_enough(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 14)

    settings = {"max_new_tokens": NEW, "stop_strings": [texts(model)[1]], "tokenizer": tokenizer()}
    output = same_as_plain(model, single(), "draft_model", stopping_criteria=[long_enough], **settings)
    assert output.sequences.shape[1] == 14


def test_stop_strings_without_a_tokenizer_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"stop_strings='ab' needs the tokenizer: generate\(..., tokenizer=tokenizer"):
        speculate(model, single(), "prompt_lookup", max_new_tokens=NEW, stop_strings="ab")


def test_earliest_of_stop_string_and_length_wins(model: Any) -> None:
    stop = texts(model)[4]
    reached = 5
    for new_tokens in (reached - 1, reached, reached + 1, reached + 4):
        settings = {"max_new_tokens": new_tokens, "stop_strings": [stop], "tokenizer": tokenizer()}
        output = same_as_plain(model, single(), "draft_model", **settings)
        assert output.sequences.shape[1] == 11 + min(new_tokens, reached)
