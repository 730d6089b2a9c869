"""A caller's cache: filled in place, one token short of the text after every turn, and continued in the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.tiny import fresh_model, prompt_ids
from tests.unit.generate.harness import METHODS, padded, single, speculate, speculating

NEW = 14
FAMILIES = ("llama", "mistral", "gemma3", "gpt2")  # the middle two have sliding windows, of 16 and of 8 tokens


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Any:
    return speculating(fresh_model(request.param))


def fed_tokens(model: PreTrainedModel) -> tuple[list[int], Any]:
    """Count the tokens of every forward of the model's embeddings; returns the list and the hook's handle."""
    fed: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, out: fed.append(args[0].numel()))
    return fed, hook


def whole(ids: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a text in which the pad id is a token like any other."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def second_prompt(sequences: Tensor) -> Tensor:
    return torch.cat([sequences, prompt_ids(batch=len(sequences), width=5, seed=9)], dim=1)


@pytest.mark.parametrize("method", METHODS)
def test_three_turns_equal_runs_without_a_cache(family: Any, method: str) -> None:
    cache = DynamicCache(config=family.config)
    ids, cached = single()["input_ids"], 0
    for _ in range(3):
        plain = family.generate(**whole(ids), max_new_tokens=NEW)
        fed, hook = fed_tokens(family)
        output = speculate(family, whole(ids), method, max_new_tokens=NEW, cache=cache)
        hook.remove()
        assert output.sequences.tolist() == plain.tolist()
        assert output.cache is cache
        assert output.stats.drafted_tokens > 0
        assert output.stats.prompt_fed == ids.shape[1] - cached
        assert sum(fed) == output.stats.prompt_fed + output.stats.nodes_fed
        cached = cache.get_seq_length()
        assert cached == plain.shape[1] - 1
        ids = second_prompt(output.sequences)


@pytest.mark.parametrize("method", METHODS)
def test_cache_passes_between_plain_and_speculative_turns(family: Any, method: str) -> None:
    for first, second in ((method, None), (None, method), ("draft_model", "prompt_lookup")):
        cache = DynamicCache(config=family.config)
        text = family.generate(**single(), max_new_tokens=NEW, cache=cache, speculative=first)
        ids = second_prompt(text)
        expected = family.generate(**whole(ids), max_new_tokens=NEW)
        continued = family.generate(**whole(ids), max_new_tokens=NEW, cache=cache, speculative=second)
        assert continued.tolist() == expected.tolist()
        assert cache.get_seq_length() == continued.shape[1] - 1


def test_keys_and_values_equal_plains(family: Any) -> None:
    caches = []
    for speculative in (None, "draft_model"):
        cache = DynamicCache(config=family.config)
        family.generate(**single(), max_new_tokens=NEW, cache=cache, speculative=speculative)
        caches.append(cache)
    assert [type(layer) for layer in caches[0].layers] == [type(layer) for layer in caches[1].layers]
    for plain, ours in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(ours.keys, plain.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values, plain.values, atol=1e-4, rtol=1e-4)
        assert ours.get_seq_length() == plain.get_seq_length()


@pytest.mark.parametrize("method", METHODS)
def test_batch_of_one_width_continues(model: Any, method: str) -> None:
    cache = DynamicCache(config=model.config)
    text = model.generate(**whole(prompt_ids(batch=3)), max_new_tokens=NEW, cache=cache, speculative=method)
    assert cache.get_seq_length() == text.shape[1] - 1
    ids = second_prompt(text)
    expected = model.generate(**whole(ids), max_new_tokens=NEW)
    output = speculate(model, whole(ids), method, max_new_tokens=NEW, cache=cache)
    assert output.sequences.tolist() == expected.tolist()
    assert output.stats.prompt_fed == 3 * 6


@pytest.mark.parametrize("method", METHODS)
def test_cache_after_a_stop_inside_an_accepted_run(model: Any, method: str) -> None:
    text = model.generate(**single(), max_new_tokens=NEW)[0].tolist()
    for end in text[13:18]:
        cache = DynamicCache(config=model.config)
        stopped = model.generate(**single(), max_new_tokens=NEW, eos_token_id=end, cache=cache, speculative=method)
        assert cache.get_seq_length() == stopped.shape[1] - 1
        ids = second_prompt(stopped)
        expected = model.generate(**whole(ids), max_new_tokens=NEW)
        continued = model.generate(**whole(ids), max_new_tokens=NEW, cache=cache, speculative=method)
        assert continued.tolist() == expected.tolist()


def test_rows_that_stopped_early_are_fed_again_in_the_next_turn(model: Any) -> None:
    settings = {"max_new_tokens": NEW, "eos_token_id": 30, "pad_token_id": 30}
    ids = prompt_ids(batch=3, seed=4)
    cache = DynamicCache(config=model.config)
    text = model.generate(**whole(ids), cache=cache, speculative="draft_model", **settings)
    lengths = [[*row[12:], 30].index(30) + 1 for row in text.tolist()]
    assert min(lengths) < max(lengths)
    assert cache.get_seq_length() == 12 + min(lengths) - 1
    ids = second_prompt(text)
    expected = model.generate(**whole(ids), max_new_tokens=NEW)  # end tokens between the turns are text like any other
    continued = model.generate(**whole(ids), max_new_tokens=NEW, cache=cache, speculative="draft_model")
    assert continued.tolist() == expected.tolist()


class Breaks:
    """A processor that raises at a given width."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self.width:
            raise RuntimeError("processor broke")
        return scores


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [11, 12, 15, 20])
def test_cache_after_an_error_holds_the_last_commit(model: Any, method: str, width: int) -> None:
    cache = DynamicCache(config=model.config)
    text = model.generate(**single(), max_new_tokens=NEW)
    with pytest.raises(RuntimeError, match="processor broke"):
        model.generate(
            **single(), max_new_tokens=NEW, cache=cache, speculative=method, logits_processor=[Breaks(width)]
        )
    assert 11 <= cache.get_seq_length() < width or width == 11 == cache.get_seq_length()
    inputs = whole(text[:, : width + 1])
    continued = model.generate(**inputs, max_new_tokens=10 + NEW - width, cache=cache, speculative=method)
    assert continued.tolist() == text.tolist()


def test_cache_is_left_alone_when_the_prompt_cannot_be_fed(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    first = model.generate(**single(), max_new_tokens=4, cache=cache, speculative="prompt_lookup")
    before = [layer.keys.clone() for layer in cache.layers]
    ids = torch.cat([first, torch.full((1, 3), model.config.vocab_size)], dim=1)  # beyond the embeddings
    with pytest.raises(IndexError):
        model.generate(**whole(ids), max_new_tokens=4, cache=cache, speculative="prompt_lookup")
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_cache_made_by_generate_is_returned_and_can_be_continued(model: Any) -> None:
    first = speculate(model, single(), "draft_model", max_new_tokens=NEW)
    ids = second_prompt(first.sequences)
    expected = model.generate(**whole(ids), max_new_tokens=NEW)
    assert model.generate(**whole(ids), max_new_tokens=NEW, cache=first.cache, speculative="draft_model").tolist() == (
        expected.tolist()
    )


def test_cache_without_a_config(model: Any) -> None:
    cache = DynamicCache()
    text = model.generate(**single(), max_new_tokens=NEW, cache=cache, speculative="draft_model")
    assert cache.get_seq_length() == text.shape[1] - 1


def test_left_padded_cache_equals_plains_where_it_is_not_padding(model: Any) -> None:
    plain, ours = (speculate(model, padded(), method, max_new_tokens=NEW).cache for method in (None, "draft_model"))
    assert ours.get_seq_length() == plain.get_seq_length() == 11 + NEW - 1
    pads = (1 - padded()["attention_mask"]).sum(1).tolist()
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        for row, pad in enumerate(pads):
            torch.testing.assert_close(mine.keys[row, :, pad:], theirs.keys[row, :, pad:], atol=1e-4, rtol=1e-4)


def test_second_turn_drafts_as_well_as_a_run_without_a_cache(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    text = model.generate(**single(), max_new_tokens=NEW, cache=cache, speculative="draft_model")
    ids = second_prompt(text)
    fresh = speculate(model, whole(ids), "draft_model", max_new_tokens=NEW)
    reused = speculate(model, whole(ids), "draft_model", max_new_tokens=NEW, cache=cache)
    assert reused.stats.acceptance_length == fresh.stats.acceptance_length > 4


@pytest.mark.parametrize("chunk", [2, 50])
def test_second_turn_fed_in_chunks(family: Any, chunk: int) -> None:
    cache = DynamicCache(config=family.config)
    text = family.generate(**single(), max_new_tokens=NEW, cache=cache, speculative="draft_model")
    inputs = whole(second_prompt(text))
    expected = family.generate(**inputs, max_new_tokens=NEW)
    output = speculate(family, inputs, "draft_model", max_new_tokens=NEW, cache=cache, prefill_chunk_size=chunk)
    assert output.sequences.tolist() == expected.tolist()
    assert output.stats.prefill_forwards == -(-6 // chunk)


def test_cache_of_another_number_of_rows_is_refused(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    text = model.generate(**single(), max_new_tokens=NEW, cache=cache)
    settings: dict[str, Any] = {"max_new_tokens": 4, "cache": cache, "do_sample": True, "num_return_sequences": 2}
    with pytest.raises(ValueError, match=r"the cache holds 1 rows and the call 2.*batch_repeat_interleave"):
        speculate(model, whole(text), "draft_model", **settings)
    cache.batch_repeat_interleave(2)
    assert speculate(model, whole(text), "draft_model", **settings).sequences.shape == (2, text.shape[1] + 4)
