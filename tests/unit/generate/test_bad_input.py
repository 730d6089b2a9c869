"""Bad input of every kind ends in a ValueError that says what to do, before a token; nothing wrong is decoded."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from spechead import Proposal, SpeculativeConfig, disable_speculation, enable_speculation
from spechead.config import DraftingConfig, strictly
from spechead.context import Context
from tests.tiny import VOCAB, build, fresh_model, prompt_ids, tiny_config
from tests.tiny_heads import make_head


@pytest.fixture(scope="module")
def model() -> Any:
    return enable_speculation(fresh_model("llama"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "hold no token"),
        ({"input_ids": torch.zeros(0, 5, dtype=torch.long)}, "hold no token"),
        ({"attention_mask": torch.full((1, 12), 2)}, "other values than 0 and 1"),
        ({"attention_mask": torch.full((1, 12), -1)}, "other values than 0 and 1"),
        ({"generator": 7}, "torch.Generator"),
        ({"generator": ["x"]}, "torch.Generator"),
    ],
)
def test_calls_that_mean_nothing_are_refused(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(**{"input_ids": prompt_ids(), **arguments}, speculative="prompt_lookup", max_new_tokens=4)


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "x"},
        {"acceptance": "x"},
        {"num_draft_tokens": "3"},
        {"num_draft_tokens": 1.5},
        {"drafting": None},
        {"tree": 5},
    ],
)
def test_every_field_of_a_config_is_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        SpeculativeConfig(**fields)
    assert DraftingConfig(temperature=1).temperature == 1


def test_postponed_annotations_cannot_switch_the_checks_off() -> None:
    with pytest.raises(TypeError, match="postponed"):
        strictly(type("Config", (), {"__annotations__": {"depth": "int"}}))


@pytest.mark.parametrize("tree", [[0, 1], [None], [["a"]], [(0.5,)]])
def test_trees_that_are_no_paths_are_refused(tree: Any) -> None:
    model = fresh_model("llama")
    enable_speculation(model, head=make_head("medusa", model))
    with pytest.raises(ValueError, match="list of paths of ranks"):
        model.generate(prompt_ids(), speculative=SpeculativeConfig(method="medusa", tree=tree), max_new_tokens=4)


class Liar:
    """Proposes two nodes under every root, changed as told."""

    taps = ()

    def __init__(self, **changed: Any) -> None:
        self.changed = changed

    def propose(self, context: Context) -> Proposal:
        """Return the changed tree."""
        tokens = torch.cat([context.root[:, None], torch.tensor([[1, 2]])], 1)
        fields = {"tokens": tokens, "parents": torch.tensor([[-1, 0, 0]]), "real": torch.ones(1, 3, dtype=torch.bool)}
        changed = {name: value(tokens) if callable(value) else value for name, value in self.changed.items()}
        return Proposal(**{**fields, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": lambda tokens: tokens.float()}, "integers"),
        ({"parents": torch.tensor([[-1.0, 0.0, 0.0]]), "max_depth": 1}, "integers"),
        ({"real": torch.ones(1, 3).long()}, "bool"),
        ({"parents": torch.tensor([[-1, 0, 9]])}, "beyond"),
        ({"draft_probs": torch.full((1, 3, VOCAB), 2 / VOCAB)}, "sums to 1"),
        ({"draft_probs": torch.full((1, 3, VOCAB), 1e-6)}, "sums to 1"),
        ({"draft_probs": torch.ones(1, 3)}, r"\[B, N, V\]"),
        ({"tokens": torch.zeros(1, 0), "parents": torch.zeros(1, 0), "real": torch.zeros(1, 0)}, "N >= 1"),
    ],
)
def test_proposals_that_cannot_be_exact_are_refused(model: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(prompt_ids(), speculative=Liar(**changed), max_new_tokens=4)


@pytest.mark.parametrize("taps", [None, 5, ("a",), (0.5,)])
def test_taps_that_are_no_indices_are_refused(model: Any, taps: Any) -> None:
    liar = Liar()
    liar.taps = taps
    with pytest.raises(TypeError, match="hidden-state indices"):
        model.generate(prompt_ids(), speculative=liar, max_new_tokens=4)


def _drop(cache: DynamicCache) -> None:
    cache.layers.pop()


def _empty(cache: DynamicCache) -> None:
    cache.layers[1] = type(cache.layers[1])()


def _half(cache: DynamicCache) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.half(), layer.values.half()


def _fewer_heads(cache: DynamicCache) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :1], layer.values[:, :1]


@pytest.mark.parametrize("change", [_drop, _empty, _half, _fewer_heads])
def test_caches_that_this_model_cannot_have_filled_are_refused(model: Any, change: Any) -> None:
    cache = DynamicCache(config=model.config)
    ids = model.generate(prompt_ids(), speculative="prompt_lookup", cache=cache, max_new_tokens=4)
    change(cache)
    with pytest.raises(ValueError, match="that this model filled"):
        model.generate(ids, speculative="prompt_lookup", cache=cache, max_new_tokens=4)


def test_a_cache_of_inference_mode_is_continued_outside_it() -> None:
    model = fresh_model("llama")
    enable_speculation(model, head=make_head("eagle", model))
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        ids = model.generate(prompt_ids(), speculative="eagle", cache=cache, max_new_tokens=4).clone()
    ids = torch.cat([ids, prompt_ids(width=3)], 1)
    out = model.generate(ids, speculative="eagle", cache=cache, max_new_tokens=8)
    assert out.equal(model.generate(ids, max_new_tokens=8))


@pytest.mark.parametrize("size", [40, 60])
def test_embeddings_resized_after_enabling(size: int) -> None:
    model = fresh_model("llama")
    enable_speculation(model, draft_model=copy.deepcopy(model))
    model.resize_token_embeddings(size)
    ids = torch.arange(size - 8, size)[None].repeat(1, 2)
    for method in ("prompt_lookup", "draft_model"):
        out = model.generate(ids, speculative=method, max_new_tokens=12)
        assert out.equal(model.generate(ids, max_new_tokens=12))


def test_a_meta_model_and_dropout_are_refused_with_what_to_do() -> None:
    with torch.device("meta"):
        hollow = build(tiny_config("llama"))
    with pytest.raises(ValueError, match="load its weights"):
        enable_speculation(hollow)
    model = build(tiny_config("gpt2", attn_pdrop=0.5, resid_pdrop=0.5))
    enable_speculation(model)
    model.train()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        model.generate(prompt_ids(), speculative=Liar(), max_new_tokens=8)


def test_an_enabled_model_is_pickled_and_copied_with_what_is_attached() -> None:
    model = fresh_model("llama")
    enable_speculation(model, head=make_head("eagle", model), draft_model=copy.deepcopy(model))
    want = model.generate(prompt_ids(), max_new_tokens=8)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(other) is type(model)
        for method in ("eagle", "draft_model"):
            assert other.generate(prompt_ids(), speculative=method, max_new_tokens=8).equal(want)
        assert disable_speculation(other).generate(prompt_ids(), max_new_tokens=8).equal(want)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_mode_without_dropout_is_as_plain(checkpointing: bool) -> None:
    model = enable_speculation(fresh_model("llama")).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    want = model.generate(prompt_ids(), max_new_tokens=12)
    assert model.generate(prompt_ids(), speculative="prompt_lookup", max_new_tokens=12).equal(want)
