"""Facts about transformers' caches that hf.py builds on; each test names one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from spechead import hf
from spechead.cache import RaggedCache
from tests.tiny import FAMILIES, GEMMA_WINDOW, MISTRAL_WINDOW, prompt_ids, tiny_model
from tests.unit.test_support_models import recurrent

KINDS: dict[str, list[type[CacheLayerMixin]]] = {family: [DynamicLayer] * 2 for family in FAMILIES}
KINDS["mistral"] = [DynamicSlidingWindowLayer] * 2
KINDS["gemma3"] = [DynamicSlidingWindowLayer, DynamicLayer, DynamicSlidingWindowLayer]


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_takes_the_cache_by_this_name(family: str) -> None:
    model = tiny_model(family)
    assert hf.takes(model, "cache")
    assert not hf.takes(model, "past_key_values")


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_of_layers_follow_from_the_config(family: str) -> None:
    cache = DynamicCache(config=tiny_model(family).config)
    assert [type(layer) for layer in cache.layers] == KINDS[family]
    assert hf.unsupported_layers(tiny_model(family).config) == []


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "mamba2"])
def test_recurrent_layers_have_kinds_of_their_own(kind: str) -> None:
    model = recurrent(kind)
    unsupported = hf.unsupported_layers(model.config)
    assert unsupported or model._is_stateful
    assert "DynamicLayer" not in unsupported


def test_kinds_are_compared_exactly_because_they_inherit() -> None:
    assert issubclass(DynamicSlidingWindowLayer, DynamicLayer)
    assert not issubclass(DummyLayer, DynamicLayer)


def test_abstract_methods_of_a_layer_are_those_that_ours_has() -> None:
    abstract = set(CacheLayerMixin.__abstractmethods__)
    assert abstract == {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"}
    assert not hf.RaggedLayer.__abstractmethods__
    for name in abstract:
        assert list(inspect.signature(getattr(hf.RaggedLayer, name)).parameters) == list(
            inspect.signature(getattr(CacheLayerMixin, name)).parameters
        )


def test_a_cache_can_be_made_of_given_layers() -> None:
    lent = hf.lend(RaggedCache(batch=2, capacity=8), num_layers=3)
    assert type(lent) is Cache
    assert len(lent.layers) == 3
    assert lent.get_seq_length() == 0


def filled(family: str, tokens: int, cache: Any = None) -> DynamicCache:
    model = tiny_model(family)
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        model(input_ids=prompt_ids(width=tokens), cache=cache)
        model(input_ids=prompt_ids(width=1), cache=cache)
    return cache


@pytest.mark.parametrize(("family", "window"), [("mistral", MISTRAL_WINDOW), ("gemma3", GEMMA_WINDOW)])
@pytest.mark.parametrize("tokens", [3, 40])
def test_sliding_layer_counts_all_tokens_and_keeps_a_window(family: str, window: int, tokens: int) -> None:
    layer = filled(family, tokens).layers[0]
    assert isinstance(layer, DynamicSlidingWindowLayer)
    assert layer.sliding_window == window
    assert layer.cumulative_length == layer.get_seq_length() == tokens + 1
    assert layer.keys.shape[2] == layer.values.shape[2] == min(tokens + 1, window - 1)


def test_full_layer_keeps_all_tokens_in_this_layout() -> None:
    layer = filled("llama", 9).layers[0]
    assert layer.keys.shape == (1, 2, 10, 8)  # [B, H, T, D]
    assert layer.get_seq_length() == 10


def test_a_cache_without_a_config_starts_without_layers_and_makes_full_ones() -> None:
    cache = DynamicCache()
    assert cache.layers == []
    assert [type(layer) for layer in filled("mistral", 4, cache).layers] == [DynamicLayer] * 2


def test_layers_start_uninitialised_and_can_be_filled_from_outside() -> None:
    layer = DynamicLayer()
    assert not layer.is_initialized
    states = torch.zeros(1, 2, 3, 8)
    layer.lazy_initialization(states, states)
    assert layer.is_initialized
    layer.keys, layer.values = states, states
    assert layer.get_seq_length() == 3


def test_offloading_is_an_attribute() -> None:
    assert DynamicCache().offloading is False


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lent_cache_gives_the_logits_of_the_models_own(family: str) -> None:
    model, ids = tiny_model(family), prompt_ids(width=30)
    ragged = RaggedCache(batch=1, capacity=32)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        ragged.open(30)
        forward = hf.call(model, ids, torch.arange(30)[None], None, hf.lend(ragged, model.config.num_hidden_layers))
    torch.testing.assert_close(forward.logits, expected, atol=1e-5, rtol=1e-5)
