"""Every processor that a generation argument makes: the same ids as plain generate, with drafts on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import ATTENTION, FAMILIES, VOCAB, fresh_model
from tests.unit.generate.harness import METHODS, PROMPTS, same_as_plain, single, speculate, speculating

NEW = 18


def allowed_tokens(row: int, ids: Tensor) -> list[int]:
    """Allow other tokens in each row of the batch, and after each token."""
    step = 2 + row
    return [token for token in range(VOCAB) if (token + int(ids[-1])) % step == 0]


CASES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 3},
    "bad_words_ids": {"bad_words_ids": [[6], [18, 33], [13, 13, 13], [9, 33, 25]]},
    "suppress_tokens": {"suppress_tokens": [6, 13, 25]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [13, 25, 28, 32]},
    "min_length": {"min_length": 22, "eos_token_id": [6, 18]},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [6, 18]},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.6), "eos_token_id": 11},
    "sequence_bias": {"sequence_bias": [[[6], -9.0], [[30, 3], 12.0], [[31], 3.5]]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed_tokens},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "remove_invalid_values": {"remove_invalid_values": True},
    "forced_bos_token_id": {"forced_bos_token_id": 5},
    "several": {"repetition_penalty": 1.15, "no_repeat_ngram_size": 4, "suppress_tokens": [3], "min_new_tokens": 6},
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_processor(model: Any, case: str, method: str, prompt: str) -> None:
    settings = {"max_new_tokens": NEW, **CASES[case]}
    # The draft is the target without its processors and prompt lookup copies, so a ban on repetition keeps few drafts.
    same_as_plain(model, PROMPTS[prompt](), method, keeps=method == "draft_model", **settings)


@pytest.mark.parametrize("case", sorted(set(CASES) - {"remove_invalid_values", "forced_bos_token_id", "several"}))
def test_cases_change_the_text(model: Any, case: str) -> None:
    bare = {name: value for name, value in CASES[case].items() if name == "eos_token_id"}
    if case == "renormalize_logits":
        bare = {"renormalize_logits": True}
    without = model.generate(**single(), max_new_tokens=NEW, **bare)
    assert model.generate(**single(), max_new_tokens=NEW, **CASES[case]).tolist() != without.tolist()


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 6])
def test_forced_end_falls_on_the_last_token_of_any_length(model: Any, new_tokens: int) -> None:
    output = same_as_plain(
        model, PROMPTS["padded"](), "draft_model", False, max_new_tokens=new_tokens + 2, forced_eos_token_id=7
    )
    assert output.sequences[:, -1].tolist() == [7, 7, 7]


def test_forced_first_token_of_a_one_token_prompt(model: Any) -> None:
    inputs = {"input_ids": torch.tensor([[14]])}
    output = same_as_plain(model, inputs, "draft_model", max_new_tokens=16, forced_bos_token_id=5)
    assert output.sequences[0, 1] == 5


@pytest.mark.parametrize("minimum", range(7))
@pytest.mark.parametrize("method", METHODS)
def test_minimum_counts_each_position_of_a_draft(model: Any, method: str, minimum: int) -> None:
    greedy = model.generate(**single(), max_new_tokens=NEW)[0, 11:].tolist()
    ends = greedy[:5]  # likely at each of the first places
    settings = {"max_new_tokens": NEW, "min_new_tokens": minimum, "eos_token_id": ends}
    plain = model.generate(**single(), **settings)
    output = model.generate(**single(), speculative=method, **settings)
    assert output.tolist() == plain.tolist()
    assert output.shape[1] - 11 >= minimum


def test_penalty_of_each_row_ignores_that_rows_own_pads(model: Any) -> None:
    output = same_as_plain(model, PROMPTS["padded"](), "draft_model", max_new_tokens=NEW, repetition_penalty=2.5)
    assert output.stats.kept_tokens < output.stats.drafted_tokens  # the penalty is the target's alone


@pytest.mark.parametrize("place", range(1, 8))
def test_end_token_that_only_the_first_place_forbids(model: Any, place: int) -> None:
    end = model.generate(**single(), max_new_tokens=NEW)[0, 11 + place].item()
    settings = {"max_new_tokens": NEW, "begin_suppress_tokens": [end], "eos_token_id": end}
    plain = model.generate(**single(), **settings)
    output = model.generate(**single(), speculative="draft_model", return_dict_in_generate=True, **settings)
    assert output.sequences.tolist() == plain.tolist()
    assert plain[0, -1] == end
    if plain.shape[1] > 13:
        assert output.stats.kept_tokens > 0  # the draft, too, may say that the text ends


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_processor_on_every_family(family: str, attention: str, prompt: str) -> None:
    target, inputs = speculating(fresh_model(family, attention)), PROMPTS[prompt]()
    kept = dict.fromkeys(METHODS, 0)
    for case in CASES.values():
        settings = {"max_new_tokens": 30} | case
        plain = target.generate(**inputs, **settings)
        for method in METHODS:
            output = speculate(target, inputs, method, **settings)
            assert output.sequences.tolist() == plain.tolist()
            kept[method] += output.stats.kept_tokens
    assert kept["draft_model"] > 100
    assert kept["prompt_lookup"] > 0
