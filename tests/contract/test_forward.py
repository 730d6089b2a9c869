"""Facts about transformers' forwards that hf.py and target.py build on; each test names one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from spechead import hf
from tests.tiny import ATTENTION, FAMILIES, prompt_ids, tiny_model

FINAL_NORM = {"gpt2": "transformer.ln_f", "gpt_neox": "gpt_neox.final_layer_norm", "phi": "model.final_layernorm"}
LAYERS = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}


def causal(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the additive causal mask `[1, 1, W, W]` of finfo.min."""
    above = torch.ones(width, width, dtype=torch.bool).triu(1)
    return torch.zeros(width, width, dtype=dtype).masked_fill(above, torch.finfo(dtype).min)[None, None]


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_can_be_asked_for_by_index(family: str) -> None:
    model, ids = tiny_model(family), prompt_ids()
    layers = model.config.num_hidden_layers
    entering: dict[int, Tensor] = {}
    normed: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, k=k: entering.update({k: args[0] if args else kwargs["hidden_states"]}),
            with_kwargs=True,
        )
        for k, layer in enumerate(model.get_submodule(LAYERS.get(family, "model.layers")))
    ]
    norm = model.get_submodule(FINAL_NORM.get(family, "model.norm"))
    hooks.append(norm.register_forward_hook(lambda module, args, out: normed.append(out)))
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=[*range(layers + 1)]).hidden_states
    for hook in hooks:
        hook.remove()
    assert len(states) == layers + 1
    for k in range(layers):  # index k = entering layer k
        assert torch.equal(states[k], entering[k])
    assert torch.equal(states[layers], normed[0])  # index n = after the final norm


def test_states_that_are_not_asked_for_are_none_and_zero_alone_means_none() -> None:
    model, ids = tiny_model("llama"), prompt_ids()
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=[0]).hidden_states
        assert states[0].shape == (1, 12, 32)
        assert states[1] is None
        assert states[2] is None
        assert model(input_ids=ids, output_hidden_states=0).hidden_states is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_applied_to_the_last_positions_asked_for(family: str) -> None:
    model, ids = tiny_model(family), prompt_ids()
    if not hf.takes(model, "logits_to_keep"):
        pytest.fail(f"{family} lost logits_to_keep: prefill would compute all logits")
    with torch.no_grad():
        whole, last = model(input_ids=ids).logits, model(input_ids=ids, logits_to_keep=1).logits
    torch.testing.assert_close(last, whole[:, -1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("make", [create_causal_mask, create_sliding_window_causal_mask])
def test_four_dimensional_masks_pass_through(attention: str, make: Any) -> None:
    model = tiny_model("mistral", attention)
    mask = torch.zeros(1, 1, 3, 8)
    embeds = torch.zeros(1, 3, 32)
    cache = DynamicCache(config=model.config)
    assert make(config=model.config, inputs_embeds=embeds, attention_mask=mask, cache=cache) is mask


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma3"])
def test_an_additive_mask_decides_who_sees_whom(family: str, attention: str) -> None:
    model, ids = tiny_model(family, attention), prompt_ids()
    positions = torch.arange(12)[None]
    hidden = causal(12)
    hidden[..., 4:, 3] = torch.finfo(torch.float32).min  # token 3 is there for itself alone
    changed = ids.clone()
    changed[0, 3] = (ids[0, 3] + 1) % 48
    with torch.no_grad():
        plain = model(input_ids=ids, position_ids=positions).logits
        given = model(input_ids=ids, position_ids=positions, attention_mask=causal(12)).logits
        one, other = (
            model(input_ids=tokens, position_ids=positions, attention_mask=hidden).logits for tokens in (ids, changed)
        )
    torch.testing.assert_close(given, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(one[:, 4:], other[:, 4:], atol=1e-4, rtol=1e-4)
    assert float((one[:, 3] - other[:, 3]).abs().max()) > 1e-2


@pytest.mark.parametrize("attention", ATTENTION)
def test_models_with_layer_types_take_a_mask_a_type(attention: str) -> None:
    model, ids = tiny_model("gemma3", attention), prompt_ids(width=20)
    positions = torch.arange(20)[None]
    distance = positions[0][:, None] - positions[0][None, :]
    sliding = causal(20).masked_fill(distance >= model.config.sliding_window, torch.finfo(torch.float32).min)
    masks = {"full_attention": causal(20), "sliding_attention": sliding}
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        given = model(input_ids=ids, position_ids=positions, attention_mask=masks).logits
        wrong = model(
            input_ids=ids, position_ids=positions, attention_mask=masks | {"sliding_attention": causal(20)}
        ).logits
    assert set(masks) == set(model.config.layer_types)
    torch.testing.assert_close(given, plain, atol=1e-4, rtol=1e-4)
    assert float((wrong - plain).abs().max()) > 1e-2


def test_a_bool_mask_is_silently_wrong_in_eager() -> None:
    """Why masks are additive: eager adds a bool mask as 0 and 1."""
    model, ids = tiny_model("llama", "eager"), prompt_ids()
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        given = model(input_ids=ids, attention_mask=causal(12) == 0).logits
    assert float((given - plain).abs().max()) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_position_ids_are_honoured(family: str) -> None:
    model, ids = tiny_model(family), prompt_ids()
    assert hf.takes(model, "position_ids")
    spread = torch.arange(12)[None].clone()
    spread[:, 6:] += 5
    with torch.no_grad():
        near, far = (
            model(input_ids=ids, position_ids=positions).logits for positions in (torch.arange(12)[None], spread)
        )
    torch.testing.assert_close(near[:, :6], far[:, :6], atol=1e-5, rtol=1e-5)
    assert float((near[:, 6:] - far[:, 6:]).abs().max()) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_default_to_slots_shared_by_all_rows(family: str) -> None:
    """Why positions are always given: rows of their own lengths would get the longest row's."""
    model = tiny_model(family)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=prompt_ids(2), cache=cache)
        default = model(input_ids=prompt_ids(2, 1), cache=cache).logits
        other = DynamicCache(config=model.config)
        model(input_ids=prompt_ids(2), cache=other)
        given = model(input_ids=prompt_ids(2, 1), cache=other, position_ids=torch.full((2, 1), 12)).logits
    torch.testing.assert_close(default, given, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_learned_tables_are_told_from_computed_positions_by_the_config(family: str) -> None:
    from spechead.target import Target

    limit = Target(tiny_model(family)).max_positions
    assert limit == (256 if family == "gpt2" else None)
