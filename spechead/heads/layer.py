"""The decoder layers of EAGLE heads: transformers' own Llama or Qwen3 parts, wired as each method needs them.

EAGLE-1's first layer lacks its input norm; EAGLE-3's first layer attends over the concatenated normed embedding and
normed state (2H wide). Later layers are ordinary. Attention goes through transformers' attention interface with an
additive mask, so any transformers cache and both sdpa and eager work, with gradients.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from typing_extensions import Self

from .base import Head, to_weight
from .config import DraftLayerConfig, Eagle3Config
from .initialise import copy_from_target

DECODER_LAYERS = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}


class DraftRotaryEmbedding(LlamaRotaryEmbedding):
    """Rotary positions whose frequencies stay in float32 when the head is cast (bfloat16 would shift positions)."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        kept = {name: buffer for name, buffer in self.named_buffers() if not buffer.is_meta}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self


def decoder_layer(config: DraftLayerConfig, index: int) -> nn.Module:
    """Return an ordinary layer of the config's style."""
    return DECODER_LAYERS[config.layer_style](config, index)


def first_eagle_layer(config: DraftLayerConfig) -> nn.Module:
    """Return EAGLE-1's first layer: an ordinary one whose attention reads its input un-normed."""
    layer = decoder_layer(config, 0)
    layer.input_layernorm = nn.Identity()
    return layer


class Eagle3Layer(nn.Module):
    """EAGLE-3's first layer: attention over cat(norm(embedding), norm(state)), residual from the state.

    Args:
        config: The head's config.
    """

    def __init__(self, config: Eagle3Config):
        super().__init__()
        plain: Any = decoder_layer(config, 0)
        self.norm_before_residual = config.norm_before_residual
        self.self_attn, self.mlp = plain.self_attn, plain.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, rows, bias=config.attention_bias))
        self.input_layernorm = plain.input_layernorm  # on the embedding
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = plain.post_attention_layernorm

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Return the layer's output, [B, N, H], from token embeddings and states, both [B, N, H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        mixed, _ = self.self_attn(torch.cat([self.input_layernorm(embeddings), normed], dim=-1), **attention)
        hidden = residual + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftLayerHead(Head):
    """What EAGLE-1 and EAGLE-3 heads have in common: embedding, positions, mask, layers, logits."""

    config: DraftLayerConfig
    rotary_emb: DraftRotaryEmbedding
    layers: nn.ModuleList
    embed_tokens: nn.Embedding

    def init_from_target(self, target: PreTrainedModel) -> list[str]:
        """Start training from the target's weights where names and shapes allow (see `heads/initialise.py`).

        Args:
            target: A target that this head fits.

        Returns:
            The names of this head's tensors that were copied, wholly or in part; the log names the rest.

        Raises:
            ValueError: If the target's decoder layers cannot be found.
        """
        return copy_from_target(self, target)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look token ids up in the target's embedding table, or in an own one. [B, N] -> [B, N, H].

        The table itself is read, as engines do: a factor that a family's embedding module puts on it (Gemma) belongs
        to the target's own layers. Modules whose weight is no plain table (quantised, offloaded, LoRA) are called.
        """
        if not self.config.share_embeddings:
            return self.embed_tokens(input_ids)
        module = self.shared("embeddings")
        ids = to_weight(input_ids, module)
        table = module.get_parameter("weight").detach()
        plain = isinstance(module, nn.Embedding) and table.is_floating_point() and not table.is_meta
        return (F.embedding(ids, table) if plain else module(ids)).to(input_ids.device)

    def attention_inputs(
        self,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> dict[str, Any]:
        """Return the keyword arguments of every layer's attention.

        Args:
            hidden: States, [B, N, H]; give the dtype and device.
            position_ids: RoPE positions, [B, N].
            attention_mask: Additive, [B, 1, N, W] with W = cached + N, or None = causal.
            cache: Keys and values of earlier calls; extended in place.

        Raises:
            ValueError: If the mask is not an additive float one.
        """
        dtype = query_dtype(hidden)
        if attention_mask is None:
            if hidden.shape[1] > 1:
                cached = 0 if cache is None else int(cache.get_seq_length())
                attention_mask = causal_mask(hidden.shape[1], cached, dtype, hidden.device)
        elif not attention_mask.is_floating_point():
            raise ValueError(
                f"attention_mask is {attention_mask.dtype}; give an additive float mask (0 = attend, finfo.min = "
                "not): eager attention would add a bool mask as 0 and 1."
            )
        elif attention_mask.dtype != dtype:
            attention_mask = attention_mask.clamp(min=torch.finfo(dtype).min).to(dtype)
        return {
            "position_embeddings": self.rotary_emb(hidden, position_ids),
            "attention_mask": attention_mask,
            "cache": cache,
        }


def query_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype that queries computed from these states have: autocast's, where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def causal_mask(length: int, cached: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an additive causal mask, [1, 1, N, cached + N]: 0 = attend, finfo.min = not."""
    future = torch.ones(length, cached + length, dtype=torch.bool, device=device).triu(cached + 1)
    mask = torch.zeros(length, cached + length, dtype=dtype, device=device)
    return mask.masked_fill(future, torch.finfo(dtype).min)[None, None]
