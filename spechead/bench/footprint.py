"""What a model takes, from its config alone: parameters on the meta device, cached bytes a token, widths.

Used by plan.py. Nothing is downloaded but config.json, and no weight is ever allocated.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from .. import hf
from ..cache import RaggedCache
from ..heads.config import HeadConfig
from ..heads.load import HEADS
from ..heads.sizes import head_dim, size, text_config


@dataclass(frozen=True)
class Footprint:
    """A model's sizes.

    Attributes:
        name: of the model.
        parameters, active: all, and those that one token uses (fewer in a mixture of experts).
        weight_bytes: of parameters and buffers, shared ones once.
        cached: bytes of keys and values a token of a row, all layers.
        layers, hidden, intermediate, heads, head_size, vocabulary: of the text model; `intermediate` is what one token
            passes through.
        bytes: of one number.
        grouped: whether several query heads share keys and values, which masked attention then repeats.
        positions: how long a text may be; None where nothing says so.
    """

    name: str
    parameters: int
    active: int
    weight_bytes: int
    cached: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    head_size: int
    vocabulary: int
    bytes: int
    grouped: bool
    positions: int | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether a token uses a part of the parameters only."""
        return self.active < self.parameters

    def activations(self, tokens: int) -> int:
        """Return bytes at the widest place of a layer: gate, its activation, product; state, residual, norm."""
        return tokens * self.bytes * (3 * self.intermediate + 3 * self.hidden)

    def repeated(self, rows: int, width: int) -> int:
        """Return bytes of keys and values repeated for all heads, one layer at a time."""
        return 2 * rows * width * self.heads * self.head_size * self.bytes if self.grouped else 0


def footprint(config: PreTrainedConfig, name: str, dtype: torch.dtype | None = None) -> Footprint:
    """Size a causal LM.

    Args:
        config: its config.
        name: to show.
        dtype: it would be loaded in; None takes the config's, else float32.

    Raises:
        ValueError: if it keeps state that speculation cannot roll back, or no causal LM can be built of it.
    """
    kind = dtype or config.dtype or torch.float32
    if isinstance(kind, str):  # saving a config turns its dtype into text
        kind = getattr(torch, kind)
    unsupported = hf.unsupported_layers(config)
    if unsupported or config.is_encoder_decoder:
        reason = ", ".join(unsupported) or "an encoder-decoder"
        raise ValueError(f"{name} cannot be speculated on ({reason}): rejected drafts cannot be rolled back.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=kind)  # which writes the dtype into it
    text = text_config(config)
    heads = size(text, "num_attention_heads", {})
    width = intermediate_of(text)
    return Footprint(
        name=name,
        parameters=_count(model),
        active=_count(model) - idle_parameters(model, text),
        weight_bytes=_bytes(model),
        cached=cached_bytes(model, text),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=width,
        heads=heads,
        head_size=head_dim(text, heads, {}),
        vocabulary=text.vocab_size,
        bytes=torch.empty((), dtype=kind).element_size(),
        grouped=size(text, "num_key_value_heads", {}, heads) < heads,
        positions=getattr(text, "max_position_embeddings", None),
    )


def head_footprint(config: HeadConfig, target: Footprint) -> Footprint:
    """Size a head; it follows the target's dtype, and what it shares with the target is not its own."""
    with torch.device("meta"):
        head = HEADS[type(config)](config)
    own = _count(head)
    heads = getattr(config, "num_attention_heads", 0)
    shared = getattr(config, "num_key_value_heads", 0)
    dim = getattr(config, "head_dim", 0)
    # The LM head is read for every level too, also where it is the target's.
    read = config.hidden_size * target.vocabulary if config.share_lm_head else 0
    layers = config.num_hidden_layers if heads else 0
    return Footprint(
        name=type(head).__name__,
        parameters=own,
        active=own + read,
        weight_bytes=own * target.bytes,
        cached=2 * layers * shared * dim * target.bytes,
        layers=layers,
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", config.hidden_size),
        heads=heads,
        head_size=dim,
        vocabulary=getattr(config, "draft_vocab_size", 0) or target.vocabulary,
        bytes=target.bytes,
        grouped=shared < heads,
        positions=config.trained_positions,
    )


@torch.no_grad()
def cached_bytes(model: nn.Module, text: PreTrainedConfig) -> int:
    """Return the bytes that a token adds to a row's cache, by a forward of one token on the meta device.

    Families whose forward reads values, which the meta device has none of, are sized from their config.
    """
    cache = RaggedCache(1, 1)
    cache.open(1)
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    try:
        hf.call(model.eval(), ids, ids, None, hf.lend(cache, text.num_hidden_layers))
    except RuntimeError:
        heads = size(text, "num_attention_heads", {})
        shared = size(text, "num_key_value_heads", {}, heads)
        number = next(model.parameters()).element_size()
        return 2 * text.num_hidden_layers * shared * head_dim(text, heads, {}) * number
    return cache.nbytes()


def idle_parameters(model: nn.Module, text: PreTrainedConfig) -> int:
    """Return the expert parameters that one token does not use."""
    count = _first(text, ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"))
    used = _first(text, ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"))
    if not count or not used:
        return 0
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return experts * (count - used) // count


def intermediate_of(text: PreTrainedConfig) -> int:
    """Return the width that one token passes through in a layer's feed-forward part."""
    used = _first(text, ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"))
    expert = _first(text, ("moe_intermediate_size",))
    if used and expert:
        return used * expert
    dense = size(text, "intermediate_size", {}, getattr(text, "n_inner", None) or 4 * text.hidden_size)
    return dense * (used or 1)


def _first(text: PreTrainedConfig, names: tuple[str, ...]) -> int | None:
    values: list[Any] = [getattr(text, name, None) for name in names]
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
