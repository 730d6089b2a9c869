"""Attention over a step's few nodes on a CPU, without repeating the keys and values of grouped-query models.

transformers' `sdpa` copies keys and values once a query head where a mask is given, and leaves the grouping to a slow
kernel where none is. A step feeds few nodes before a long prefix, so there it is cheaper to lay the queries of a group
beside each other, as the library itself does for a single masked token. Other devices and models keep the library's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "spechead_grouped_sdpa"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend, in the form of transformers' attention functions; what it has no other way for goes to `sdpa`.

    Args:
        module: the attention layer.
        query: `[B, H, N, D]`.
        key: `[B, G, W, D]`, H a multiple of G.
        value: `[B, G, W, D]`.
        attention_mask: additive, `[B, 1, N, W]`, or None.
        options: dropout, scaling and whatever else the model passes.

    Returns:
        `[B, N, H, D]`, and None for weights.
    """
    batch, heads, nodes, _ = query.shape
    shared = heads // key.shape[1]
    plain = not options.get("dropout") and options.get("position_bias") is None and options.get("softcap") is None
    if attention_mask is None or attention_mask.shape[1] != 1 or shared == 1 or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    beside = query.reshape(batch, key.shape[1], shared * nodes, query.shape[3])
    mask = attention_mask.expand(-1, shared, -1, -1).reshape(len(attention_mask), 1, shared * nodes, -1)
    out = torch.nn.functional.scaled_dot_product_attention(
        beside, key, value, attn_mask=mask, scale=options.get("scaling")
    )
    return out.reshape(batch, heads, nodes, value.shape[3]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def implementation(config: PreTrainedConfig) -> str | None:
    """Return the attention implementation that a model was loaded with, also while a step of another thread runs."""
    chosen: str | None = config._attn_implementation
    return "sdpa" if chosen == NAME else chosen


def pays(config: PreTrainedConfig, device: torch.device) -> bool:
    """Whether steps of this model are cheaper so: on a CPU, with `sdpa`, where query heads share keys and values.

    Args:
        config: the text config.
        device: where it runs.
    """
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None)
    grouped = isinstance(heads, int) and isinstance(shared, int) and shared < heads
    return device.type == "cpu" and implementation(config) == "sdpa" and grouped


@contextmanager
def grouped(config: PreTrainedConfig) -> Iterator[None]:
    """Let a model whose layers read this config attend so for the forwards in the block."""
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
