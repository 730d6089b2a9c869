"""Greedy decoding: the same ids as plain generate, at every length, alone and in left-padded batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from spechead import SpeculativeConfig
from tests.tiny import prompt_ids
from tests.unit.generate.harness import (
    METHODS,
    PROMPTS,
    llama,
    padded,
    rows_of,
    same_as_plain,
    single,
    speculate,
    speculating,
)

K = 4


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_equals_plain(model: Any, method: str, prompt: str) -> None:
    output = same_as_plain(model, PROMPTS[prompt](), method, max_new_tokens=40, do_sample=False)
    assert output.stats.method == method
    assert output.stats.near_ties == 0
    if method == "draft_model":
        assert output.stats.acceptance_length > 4


@pytest.mark.parametrize("method", METHODS)
def test_enabled_model_without_speculative_is_the_untouched_path(model: Any, method: str) -> None:
    untouched = llama().generate(**single(), max_new_tokens=20, do_sample=False)
    assert model.generate(**single(), max_new_tokens=20, do_sample=False).tolist() == untouched.tolist()
    assert model.generate(**single(), max_new_tokens=20, speculative=False).tolist() == untouched.tolist()
    assert speculate(model, single(), method, max_new_tokens=20).sequences.tolist() == untouched.tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("new_tokens", range(1, K + 3))
@pytest.mark.parametrize("method", METHODS)
def test_max_new_tokens_around_the_draft_length(model: Any, method: str, new_tokens: int, prompt: str) -> None:
    inputs = PROMPTS[prompt]()
    config = SpeculativeConfig(method=method, num_draft_tokens=K)
    plain = model.generate(**inputs, max_new_tokens=new_tokens)
    output = speculate(model, inputs, config, max_new_tokens=new_tokens)
    assert output.sequences.tolist() == plain.tolist()
    assert output.stats.emitted_tokens == (new_tokens - 1) * len(plain)
    if new_tokens > 2 and method == "draft_model":  # the second new token may only be the bonus
        assert output.stats.kept_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_max_length_counts_the_prompt(model: Any, method: str) -> None:
    output = same_as_plain(model, padded(), method, max_length=30)
    assert output.sequences.shape[1] == 30


@pytest.mark.parametrize("method", METHODS)
def test_one_token_prompt(model: Any, method: str) -> None:
    inputs = {"input_ids": torch.tensor([[14]])}
    same_as_plain(model, inputs, method, max_new_tokens=40)


def test_prompt_from_the_beginning_of_text_token(model: Any) -> None:
    plain = model.generate(max_new_tokens=12)
    output = model.generate(max_new_tokens=12, speculative="draft_model", return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert output.sequences[0, 0] == 1
    assert output.stats.kept_tokens > 0


@pytest.mark.parametrize("token", [14, 46])
def test_row_without_any_match_beside_rows_that_match(model: Any, token: int) -> None:
    inputs = padded()
    inputs["input_ids"][2] = torch.where(inputs["attention_mask"][2] == 1, token, 0)
    same_as_plain(model, inputs, "prompt_lookup", max_new_tokens=24)


@pytest.mark.parametrize("method", METHODS)
def test_every_row_equals_its_single_run(model: Any, method: str) -> None:
    together = speculate(model, padded(), method, max_new_tokens=24).sequences
    for row, inputs in enumerate(rows_of(padded())):
        alone = speculate(model, inputs, method, max_new_tokens=24)
        assert together[row, -24:].tolist() == alone.sequences[0, -24:].tolist()


@pytest.mark.parametrize("method", METHODS)
def test_real_token_that_has_the_pad_id(model: Any, method: str) -> None:
    ids = torch.tensor([[0, 0, 7, 0, 0, 7], [14, 46, 0, 14, 46, 14]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    same_as_plain(model, inputs, method, max_new_tokens=30)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunked_prefill(model: Any, method: str, chunk: int) -> None:
    output = same_as_plain(model, padded(), method, max_new_tokens=20, prefill_chunk_size=chunk)
    assert output.stats.prefill_forwards == -(-11 // chunk)


@pytest.mark.parametrize("method", METHODS)
def test_generation_config_object_and_positional_inputs(model: Any, method: str) -> None:
    ids = single()["input_ids"]
    config = GenerationConfig(max_new_tokens=20, do_sample=False, repetition_penalty=1.1)
    plain = model.generate(ids, config)
    output = model.generate(ids, config, speculative=method)
    assert output.tolist() == plain.tolist()
    assert torch.is_tensor(output)


def test_positional_and_keyword_of_one_argument_clash(model: Any) -> None:
    with pytest.raises(TypeError, match="inputs"):
        model.generate(single()["input_ids"], inputs=single()["input_ids"], speculative="prompt_lookup")


@pytest.mark.parametrize("method", METHODS)
def test_batch_takes_as_many_forwards_as_its_slowest_row(model: Any, method: str) -> None:
    steps = [speculate(model, inputs, method, max_new_tokens=24).stats.steps for inputs in rows_of(padded())]
    assert speculate(model, padded(), method, max_new_tokens=24).stats.steps == max(steps)


def test_batch_without_pad_token_when_rows_end_together() -> None:
    model = speculating(llama(pad_token_id=None))
    same_as_plain(model, {"input_ids": prompt_ids(batch=2, width=6)}, "draft_model", max_new_tokens=16)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.int32], ids=str)
def test_kinds_of_attention_mask(model: Any, kind: torch.dtype) -> None:
    inputs = padded()
    plain = model.generate(**inputs, max_new_tokens=16)
    inputs["attention_mask"] = inputs["attention_mask"].to(kind)
    assert speculate(model, inputs, "draft_model", max_new_tokens=16).sequences.tolist() == plain.tolist()


def test_inference_mode(model: Any) -> None:
    plain = model.generate(**padded(), max_new_tokens=16)
    with torch.inference_mode():
        output = speculate(model, padded(), "draft_model", max_new_tokens=16)
    assert output.sequences.tolist() == plain.tolist()
