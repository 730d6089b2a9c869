"""Everything that depends on the installed transformers version, in one file, held by tests/contract.

The forward's argument names, the cache layer interface, import from and export to `DynamicCache`, the masks a model
takes, hidden-state capture, and the kinds of cache layers. A rename upstream is one line here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging

from .cache import RaggedCache

logger = logging.get_logger(__name__)

TESTED_MINOR = "5.24"


def warn_if_untested() -> None:
    """Say once when the installed transformers is not the minor version that the contract tests were run on."""
    if not transformers.__version__.startswith(TESTED_MINOR + "."):
        logger.warning_once(
            f"spechead is tested with transformers {TESTED_MINOR}.x; {transformers.__version__} is installed. "
            f"If anything looks odd, install transformers=={TESTED_MINOR}.*"
        )


@dataclass(frozen=True)
class Forward:
    """What one target forward gave: logits `[B, N, V]` and the taps asked for, `{tap: [B, N, H]}`."""

    logits: Tensor
    taps: dict[int, Tensor]


class RaggedLayer(CacheLayerMixin):
    """One layer of a RaggedCache as a transformers cache layer; full keys and values whatever the layer's window."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: RaggedCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: RaggedCache allocates at its first write."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[B, H, N, D]` and return all that may be attended to."""
        return self.cache.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key width, and offset 0."""
        return self.cache.width, 0

    def get_seq_length(self) -> int:
        """Return the slots in use before the forward in progress."""
        return self.cache.start

    def get_max_length(self) -> int:
        """Return -1: the buffer grows."""
        return -1


def lend(cache: RaggedCache, num_layers: int) -> Cache:
    """Wrap a ragged cache so that a model's forward can write to it."""
    return Cache(layers=[RaggedLayer(cache, index) for index in range(num_layers)])


def unsupported_layers(config: PreTrainedConfig) -> list[str]:
    """Name the kinds of cache layer that a ragged cache cannot stand in for (recurrent, hybrid, indexed)."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    return sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers if type(layer) not in plain})


def named_arguments(generate: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments of a call of `generate`.

    Raises:
        TypeError: as the call itself would, for too many arguments or one given twice.
    """
    bound = inspect.signature(generate).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        rest = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named.update(value if rest else {name: value})
    return named


def ranks_run_together(model: nn.Module) -> bool:
    """Whether each forward gathers sharded weights from all ranks (DeepSpeed ZeRO-3, FSDP)."""
    distributed = torch.distributed
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    return world > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def has_virtual_tokens(model: nn.Module) -> bool:
    """Whether a PeftModel is generating with this model, whose prompt-learning adapter prepares the inputs."""
    owner = getattr(model.__dict__.get("prepare_inputs_for_generation"), "__self__", None)
    return bool(getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False))


def takes(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    kind: Any = type(model)
    return argument in _parameters(kind)


@functools.cache
def _parameters(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


def call(
    model: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Any,
    cache: Cache,
    taps: Iterable[int] = (),
    last_only: bool = False,
    **extra: Any,
) -> Forward:
    """Run a causal LM's own forward over `input_ids [B, N]` on a lent cache.

    Args:
        model: the target or the draft.
        input_ids: `[B, N]`.
        position_ids: `[B, N]`.
        attention_mask: what `model_masks` made, a 2-D padding mask, or None for the library's own causal mask.
        cache: from `lend`.
        taps: hidden states to capture, as indices of transformers' `hidden_states`.
        last_only: logits of the last position only.
        extra: further tensors for the forward.

    Returns:
        Logits `[B, N, V]` (`[B, 1, V]` with last_only) and taps.
    """
    arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": True, **extra}
    arguments["cache" if takes(model, "cache") else "past_key_values"] = cache
    if takes(model, "position_ids"):
        arguments["position_ids"] = position_ids
    if last_only and takes(model, "logits_to_keep"):
        arguments["logits_to_keep"] = 1
    wanted = sorted(set(taps))
    if wanted:
        arguments["output_hidden_states"] = wanted
    outputs = model(**arguments, return_dict=True)
    logits = outputs.logits[:, -1:] if last_only else outputs.logits
    return Forward(logits, {tap: outputs.hidden_states[tap] for tap in wanted})


def hidden_states(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, taps: Iterable[int]
) -> dict[int, Tensor]:
    """Capture taps of whole sequences, `{tap: [B, L, H]}`, without cache, the LM head at the last position only.

    For training: `input_ids [B, L]`, `attention_mask [B, L]` of 0 and 1 or None; taps as in `call`.
    """
    wanted = sorted(set(taps))
    arguments: dict[str, Any] = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
    outputs = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        output_hidden_states=wanted,
        use_cache=False,
        return_dict=True,
        **arguments,
    )
    return {tap: outputs.hidden_states[tap] for tap in wanted}


def model_masks(
    config: PreTrainedConfig, form: str, allowed: Tensor, queries: Tensor, keys: Tensor, dtype: torch.dtype
) -> Any:
    """Build the masks a model takes, from booleans and positions.

    Args:
        config: the text config.
        form: "dict" (one mask a layer type) or "tensor".
        allowed: `[B, N, W]` True where a query may attend by tree and cache.
        queries: positions of the queries `[B, N]`.
        keys: positions of the keys `[B, W]`.
        dtype: the query's dtype.

    Returns:
        An additive mask `[B, 1, N, W]` of 0 and finfo.min, or a dict of them.
    """

    def additive(mask: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=dtype, device=mask.device)
        return torch.where(mask[:, None], zero, torch.finfo(dtype).min)

    distance = queries[:, :, None] - keys[:, None, :]
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = {"full_attention": allowed}
    if window is not None:
        kinds["sliding_attention"] = allowed & (distance < window)
    if chunk is not None:
        kinds["chunked_attention"] = allowed & (queries[:, :, None] // chunk == keys[:, None, :] // chunk)
    if form == "dict":
        return {kind: additive(kinds[kind]) for kind in set(config.layer_types)}
    layer_types = getattr(config, "layer_types", None)
    return additive(kinds[layer_types[0]] if layer_types else kinds.get("sliding_attention", allowed))


def mask_forms(config: PreTrainedConfig) -> list[str]:
    """List the mask forms to try on a model, the likelier first."""
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        return ["tensor"]
    return ["dict", "tensor"] if len(set(layer_types)) == 1 else ["dict"]


def cached_length(cache: Any) -> int:
    """Return the number of tokens in a caller's cache.

    Raises:
        ValueError: if it is not a DynamicCache of full and sliding layers.
    """
    kinds = {type(layer) for layer in getattr(cache, "layers", [])}
    if type(cache) is not DynamicCache or kinds - {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer}:
        names = sorted(kind.__name__ for kind in kinds)
        raise ValueError(
            f"cache={type(cache).__name__} with layers {names} cannot be used with speculative=...; "
            "pass a DynamicCache of full or sliding attention layers, or none."
        )
    if cache.offloading:
        raise ValueError("an offloaded cache cannot be used with speculative=...; pass a plain DynamicCache, or none.")
    return max((layer.get_seq_length() for layer in cache.layers if type(layer) is not DummyLayer), default=0)


def cached_rows(cache: Any) -> int:
    """Return the number of rows in a caller's cache that holds tokens."""
    return next(layer.keys.shape[0] for layer in cache.layers if layer.is_initialized)


def import_cache(source: DynamicCache, into: RaggedCache) -> None:
    """Copy a caller's cache; what a sliding layer dropped stays zero, which no later query attends to."""
    length = cached_length(source)
    into.reserve(length)
    for index, layer in enumerate(source.layers):
        if type(layer) is DummyLayer or not layer.is_initialized or layer.keys.numel() == 0:
            continue
        into.open(0)
        into.write(index, layer.keys[:, :, :0], layer.values[:, :, :0])
        for buffers, states in ((into.keys, layer.keys), (into.values, layer.values)):
            buffers[index][:, :, length - states.shape[2] : length] = states
    into.lengths = torch.full_like(into.lengths, length)


def export_cache(source: RaggedCache, into: DynamicCache, pads: Tensor, length: int) -> None:
    """Write a ragged cache back into the caller's DynamicCache, in place.

    Args:
        source: the ragged cache.
        into: the same object that was imported, or an empty one; its layer types are kept.
        pads: `[B]` left pads of the prompt, which return as zero slots.
        length: common length, which no row's slots and pads fall short of.
    """
    slots = torch.arange(length, device=pads.device)[None, :] - pads[:, None]  # [B, length]
    valid = (slots >= 0) & (slots < source.lengths[:, None])
    for index in sorted(source.keys):
        while len(into.layers) <= index:
            into.layers.append(DynamicLayer())
        layer = into.layers[index]
        states = []
        for buffer in (source.keys[index], source.values[index]):
            rows = torch.arange(len(pads), device=buffer.device)[:, None]
            taken = buffer[rows, :, slots.clamp(min=0, max=buffer.shape[2] - 1).to(buffer.device)].transpose(1, 2)
            states.append(taken * valid[:, None, :, None].to(buffer.device, buffer.dtype))
        if not layer.is_initialized:
            layer.lazy_initialization(*states)
        if isinstance(layer, DynamicSlidingWindowLayer):
            states = [state[:, :, -layer.sliding_window + 1 :].contiguous() for state in states]
            layer.cumulative_length = length
        layer.keys, layer.values = states


def decode_mode(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Return the context in which the library runs its own one-token steps (it swaps expert kernels there)."""
    optimize = getattr(model, "_optimize_model_for_decode", None)
    return optimize() if optimize is not None else nullcontext()
