"""Independent reference computations of the published heads: plain torch on tensors under the published names.

They follow the papers and share no line with spechead: everything is recomputed from scratch at every depth, so a
draft cache, masks and positions are checked too. One row only.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Tensors = Mapping[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def linear(t: Tensors, name: str, x: Tensor) -> Tensor:
    """Apply `name.weight` and, where there is one, `name.bias`."""
    y = x @ t[f"{name}.weight"].T
    return y + t[f"{name}.bias"] if f"{name}.bias" in t else y


def rotate(x: Tensor, theta: float) -> Tensor:
    """Turn [L, heads, d] by its positions 0..L-1, halves paired as in Llama."""
    length, _, dim = x.shape
    half = dim // 2
    angle = torch.arange(length)[:, None] * theta ** (-torch.arange(half) * 2.0 / dim)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(t: Tensors, name: str, x: Tensor, c: Mapping[str, Any]) -> Tensor:
    """Causal attention over all positions, query by query. [L, in] -> [L, H]."""
    heads, groups, dim, length = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], len(x)
    q = linear(t, f"{name}.q_proj", x).view(length, heads, dim)
    k = linear(t, f"{name}.k_proj", x).view(length, groups, dim)
    v = linear(t, f"{name}.v_proj", x).view(length, groups, dim)
    if f"{name}.q_norm.weight" in t:
        q = rms(q, t[f"{name}.q_norm.weight"], c["rms_norm_eps"])
        k = rms(k, t[f"{name}.k_norm.weight"], c["rms_norm_eps"])
    q, k = rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"])
    rows = []
    for i in range(length):
        parts = []
        for head in range(heads):
            group = head * groups // heads
            weights = (k[: i + 1, group] @ q[i, head] / dim**0.5).softmax(0)
            parts.append(weights @ v[: i + 1, group])
        rows.append(torch.cat(parts))
    return linear(t, f"{name}.o_proj", torch.stack(rows))


def feed_forward(t: Tensors, name: str, x: Tensor) -> Tensor:
    """Llama's gated MLP."""
    return linear(t, f"{name}.down_proj", silu(linear(t, f"{name}.gate_proj", x)) * linear(t, f"{name}.up_proj", x))


def after_attention(t: Tensors, name: str, residual: Tensor, mixed: Tensor, c: Mapping[str, Any]) -> Tensor:
    """The rest of a decoder layer."""
    x = residual + mixed
    return x + feed_forward(t, f"{name}.mlp", rms(x, t[f"{name}.post_attention_layernorm.weight"], c["rms_norm_eps"]))


def plain_layer(t: Tensors, name: str, x: Tensor, c: Mapping[str, Any], normed: bool = True) -> Tensor:
    """An ordinary Llama layer; without its input norm as EAGLE-1's first one."""
    inner = rms(x, t[f"{name}.input_layernorm.weight"], c["rms_norm_eps"]) if normed else x
    return after_attention(t, name, x, attend(t, f"{name}.self_attn", inner, c), c)


def eagle1(
    t: Tensors, c: Mapping[str, Any], table: Tensor, lm_head: Tensor, ids: Tensor, features: Tensor, extra: Tensor
) -> Tensor:
    """EAGLE-1 logits at the last entry, then at each depth of a chain that drafts `extra`.

    Args:
        t: Tensors under EAGLE's names.
        c: Layer sizes.
        table: Embedding table [V, H].
        lm_head: LM head of the target [V, H].
        ids: Tokens one ahead of the features [L].
        features: Features of the target [L, H].
        extra: Tokens drafted after them [D].

    Returns:
        [1 + D, V].
    """
    logits = []
    for depth in range(len(extra) + 1):
        x = linear(t, "fc", torch.cat([table[ids], features], dim=-1))
        for index in range(c["num_hidden_layers"]):
            x = plain_layer(t, f"layers.{index}", x, c, normed=index > 0)
        logits.append(lm_head @ x[-1])
        ids, features = torch.cat([ids, extra[depth : depth + 1]]), torch.cat([features, x[-1:]])
    return torch.stack(logits)


def eagle3(t: Tensors, c: Mapping[str, Any], table: Tensor, ids: Tensor, features: Tensor, extra: Tensor) -> Tensor:
    """EAGLE-3 logits over the draft vocabulary at the last entry, then at each depth of a chain that drafts `extra`.

    Args:
        t: Tensors under EAGLE-3's names; the first layer is `midlayer` or `layers.0`.
        c: Layer sizes and flags.
        table: Embedding table [V, H].
        ids: Tokens one ahead of the features [L].
        features: Three taps of the target [L, 3 * H_target].
        extra: Tokens drafted after them [D].

    Returns:
        [1 + D, size of the draft vocabulary].
    """
    eps = c["rms_norm_eps"]
    if c.get("norm_before_fc"):
        features = rms(features, t["input_norm.weight"], eps)
    if c.get("fc_norm"):
        thirds = features.chunk(3, dim=-1)
        features = torch.cat([rms(third, t[f"fc_norm.{i}.weight"], eps) for i, third in enumerate(thirds)], dim=-1)
    states, logits = linear(t, "fc", features), []
    first = "midlayer" if "midlayer.hidden_norm.weight" in t else "layers.0"
    for depth in range(len(extra) + 1):
        normed = rms(states, t[f"{first}.hidden_norm.weight"], eps)
        embedded = rms(table[ids], t[f"{first}.input_layernorm.weight"], eps)
        mixed = attend(t, f"{first}.self_attn", torch.cat([embedded, normed], dim=-1), c)
        x = after_attention(t, first, normed if c.get("norm_before_residual") else states, mixed, c)
        for index in range(1, c["num_hidden_layers"]):
            x = plain_layer(t, f"layers.{index}", x, c)
        out = rms(x[-1], t["norm.weight"], eps)
        logits.append(t["lm_head.weight"] @ out)
        following = out if c.get("norm_output") else x[-1]
        ids, states = torch.cat([ids, extra[depth : depth + 1]]), torch.cat([states, following[None]])
    return torch.stack(logits)


def medusa(blocks: list[list[tuple[Tensor, Tensor | None]]], lm_heads: list[Tensor], hidden: Tensor) -> Tensor:
    """Medusa logits [K, L, V] from each head's (weight, bias) blocks and its LM head."""
    outputs = []
    for layers, lm_head in zip(blocks, lm_heads, strict=True):
        x = hidden
        for weight, bias in layers:
            x = x + silu(x @ weight.T + (0 if bias is None else bias))
        outputs.append(x @ lm_head.T)
    return torch.stack(outputs)
