"""Import from and export to a caller's DynamicCache (spechead.hf), full and sliding layers, past the window."""

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from spechead import Proposal, hf
from spechead.target import Target
from tests import tiny

LENGTH = 21  # beyond both windows


def plain_run(model, ids, cache=None):
    """Feed ids by the library's own means; returns its cache and last logits."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    outputs = model(input_ids=ids, cache=cache, use_cache=True)
    return cache, outputs.logits[:, -1]


def ragged_of(target, source, batch=1):
    ragged = target.new_cache(batch, 4)  # smaller than what is imported: must grow
    hf.import_cache(source, ragged)
    return ragged


def feed_one_by_one(target, cache, tokens):
    """Feed tokens `[B, N]` to every row, one a forward; returns the last logits `[B, V]`."""
    for column in tokens.T:
        logits = target.forward(Proposal.root_only(column), cache).logits[:, -1]
        cache.advance(1)
    return logits


def states(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


@torch.no_grad()
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_an_imported_cache_is_continued_as_plain_continues_it(family):
    model = tiny.tiny_model(family)
    ids, more = tiny.prompt_ids(1, LENGTH), tiny.prompt_ids(1, 5, seed=1)
    source, _ = plain_run(model, ids)
    target = Target(model)
    ragged = ragged_of(target, source)
    assert ragged.lengths.tolist() == [LENGTH]
    _, expected = plain_run(model, more, source)
    torch.testing.assert_close(feed_one_by_one(target, ragged, more), expected)


@torch.no_grad()
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_an_imported_cache_is_continued_by_a_tree(family):
    model = tiny.tiny_model(family)
    ids = tiny.prompt_ids(1, LENGTH)
    source, _ = plain_run(model, ids)
    target = Target(model)
    ragged = ragged_of(target, source)
    nodes, parents = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[-1, 0, 0, 2]])
    forward = target.forward(Proposal(nodes, parents, torch.ones(1, 4, dtype=torch.bool)), ragged)
    _, expected = plain_run(model, torch.cat([ids, nodes[:, [0, 2, 3]]], dim=1))
    torch.testing.assert_close(forward.logits[:, 3], expected)


@torch.no_grad()
@pytest.mark.parametrize("start", [0, 5, LENGTH])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_an_exported_cache_is_what_plain_would_hold(family, start):
    """Started empty, inside the window or beyond it, then fed past it: types, lengths and states are plain's."""
    model = tiny.tiny_model(family)
    ids, more = tiny.prompt_ids(1, start), tiny.prompt_ids(1, LENGTH, seed=1)
    target = Target(model)
    mine = DynamicCache(config=model.config)
    if start:
        plain_run(model, ids, mine)
    ragged = ragged_of(target, mine)
    feed_one_by_one(target, ragged, more)
    kinds = [type(layer) for layer in mine.layers]
    hf.export_cache(ragged, mine, torch.zeros(1, dtype=torch.long), start + LENGTH)
    plain = DynamicCache(config=model.config)
    if start:
        plain_run(model, ids, plain)
    for token in more.T:
        plain_run(model, token[None], plain)
    assert mine.get_seq_length() == plain.get_seq_length() == start + LENGTH
    assert len(mine.layers) == len(plain.layers)
    if kinds:
        assert [type(layer) for layer in mine.layers][: len(kinds)] == kinds
    for layer, other in zip(mine.layers, plain.layers, strict=True):
        assert type(layer) is type(other)
        assert layer.get_seq_length() == other.get_seq_length()
        torch.testing.assert_close(layer.keys, other.keys)
        torch.testing.assert_close(layer.values, other.values)
    nxt = torch.tensor([[7]])
    torch.testing.assert_close(plain_run(model, nxt, mine)[1], plain_run(model, nxt, plain)[1])


@torch.no_grad()
def test_left_pads_and_early_ends_return_as_zero_slots():
    model = tiny.tiny_model("llama")
    target = Target(model)
    ids, mask = tiny.left_padded(2, 8)
    ragged = target.new_cache(2, 32)
    target.prefill(ids, mask, ragged)
    pads = (1 - mask).sum(1)
    assert pads.tolist() == [0, 3]
    ragged.strip(pads)
    target.forward(Proposal.root_only(torch.tensor([1, 2])), ragged)
    ragged.advance(torch.tensor([0, 1]))  # row 0 had ended
    mine = DynamicCache(config=model.config)
    hf.export_cache(ragged, mine, pads, 9)
    for keys, values in states(mine):
        assert keys.shape[2] == 9
        for state in (keys, values):
            assert not state[1, :, :3].any()
            assert not state[0, :, 8].any()
            assert state[1, :, 3:].abs().amax(-1).min() > 0
            assert state[0, :, :8].abs().amax(-1).min() > 0
    torch.testing.assert_close(mine.layers[0].keys[1, :, 3:], ragged.keys[0][1, :, :6])


@torch.no_grad()
def test_what_a_sliding_layer_dropped_is_zero_and_full_layers_are_whole():
    model = tiny.tiny_model("gemma3")
    source, _ = plain_run(model, tiny.prompt_ids(1, LENGTH))
    ragged = ragged_of(Target(model), source)
    dropped = LENGTH - (tiny.GEMMA_WINDOW - 1)
    for index, layer in enumerate(source.layers):
        keys = ragged.keys[index]
        if type(layer) is DynamicSlidingWindowLayer:
            assert not keys[:, :, :dropped].any()
            assert torch.equal(keys[:, :, dropped:LENGTH], layer.keys)
        else:
            assert torch.equal(keys[:, :, :LENGTH], layer.keys)


@torch.no_grad()
def test_export_mutates_the_callers_object_and_its_layers():
    model = tiny.tiny_model("mistral")
    cache, _ = plain_run(model, tiny.prompt_ids(1, 5))
    layers = list(cache.layers)
    ragged = ragged_of(Target(model), cache)
    feed_one_by_one(Target(model), ragged, tiny.prompt_ids(1, 3))
    hf.export_cache(ragged, cache, torch.zeros(1, dtype=torch.long), 8)
    assert all(mine is theirs for mine, theirs in zip(cache.layers, layers, strict=True))
    assert cache.get_seq_length() == 8


@torch.no_grad()
def test_a_cache_without_layer_types_gets_full_layers():
    model = tiny.tiny_model("llama")
    ragged = Target(model).new_cache(1, 8)
    feed_one_by_one(Target(model), ragged, tiny.prompt_ids(1, 4))
    cache = DynamicCache()
    hf.export_cache(ragged, cache, torch.zeros(1, dtype=torch.long), 4)
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, DynamicLayer]
    assert cache.get_seq_length() == 4


def test_an_empty_cache_holds_nothing():
    model = tiny.tiny_model("gemma3")
    cache = DynamicCache(config=model.config)
    assert hf.cached_length(cache) == 0
    assert ragged_of(Target(model), cache).lengths.tolist() == [0]


def test_other_caches_are_refused_by_name():
    config = tiny.tiny_config("llama")
    with pytest.raises(ValueError, match=r"StaticCache .*pass a DynamicCache"):
        hf.cached_length(StaticCache(config=config, max_cache_len=8))
    with pytest.raises(ValueError, match="cannot be used with speculative"):
        hf.cached_length("a string")
