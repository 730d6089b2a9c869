"""One timed `generate` call of one method, and what is counted of it. Used by timing.compare alone.

Every method of a run is a model and the arguments that `generate` gets. Plain runs on an untouched instance: `twin`
makes a second instance that shares every weight, and only the twin is enabled, so no memory is doubled and the plain
path holds nothing of spechead.
"""

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..stats import DecodeStats
from .results import Load

# Arguments by which transformers' own speculation is switched on: it returns no figures, so they are counted outside.
TRANSFORMERS_OWN = ("prompt_lookup_num_tokens", "assistant_model")


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a second instance of a loaded model that shares its modules, weights and config.

    `enable_speculation(twin(model))` leaves `model` the untouched instance that plain is measured on: the class and
    the attached state are the twin's own, the tensors are the same.
    """
    return copy.copy(model)


@dataclass(frozen=True)
class Method:
    """A way of generating.

    Attributes:
        name: under which its figures are reported; "plain" is the one that the others are compared with.
        model: the instance it runs on.
        arguments: what `generate` gets besides the prompt and the load.
        described: `arguments` as the results file keeps them.
    """

    name: str
    model: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    described: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timed:
    """What one call gave: new ids of each row, wall-clock seconds, and figures (None for plain)."""

    tokens: list[list[int]]
    seconds: float
    seconds_to_first_token: float
    stats: DecodeStats | None


class Clock(BaseStreamer):
    """A streamer that notes when the first new token came, and how many came at a time."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.counts: list[int] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Note tokens; the first call brings the prompt."""
        if self._prompt_seen:
            self.first = self.first or time.perf_counter()
            self.counts.append(value.shape[-1])
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def run_once(method: Method, rows: Sequence[Sequence[int]], load: Load, seed: int) -> Timed:
    """Generate once, timed.

    Args:
        method: what to run.
        rows: prompt ids of each row of the batch; shorter rows are padded on the left.
        load: how many tokens, and at which temperature.
        seed: of this call's sampling.

    Raises:
        ValueError: if a prompt and its answer exceed the target's positions.
    """
    inputs = pad_left(method.model, rows, load.max_new_tokens)
    torch.manual_seed(seed)
    clock = Clock()
    with ForwardCounter(method) as counter:
        _synchronise(method.model.device)
        start = time.perf_counter()
        output = method.model.generate(
            **inputs,
            **sampling_arguments(load.temperature),
            **method.arguments,
            max_new_tokens=load.max_new_tokens,
            streamer=clock,
            return_dict_in_generate=True,
        )
        _synchronise(method.model.device)
        seconds = time.perf_counter() - start
    width = inputs["input_ids"].shape[1]
    tokens = [cut(row, end_ids(method.model)) for row in output.sequences[:, width:].tolist()]
    stats = counter.stats(clock.counts) if counter.active else getattr(output, "stats", None)
    return Timed(tokens, seconds, (clock.first or start) - start, stats)


def sampling_arguments(temperature: float) -> dict[str, Any]:
    """Return greedy decoding's arguments, or pure sampling's: no top-k or top-p, which transformers sets by itself."""
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def end_ids(model: Any) -> set[int]:
    """Return the ids that end an answer."""
    ids = model.generation_config.eos_token_id
    return set(ids) if isinstance(ids, list | tuple) else {ids} - {None}


def cut(row: Sequence[int], ends: set[int]) -> list[int]:
    """Return a row up to and with its first end token: what stands behind it is padding."""
    stop = next((place for place, token in enumerate(row, 1) if token in ends), len(row))
    return list(row[:stop])


def pad_left(model: Any, rows: Sequence[Sequence[int]], max_new_tokens: int) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask`, both [B, P], on the model's device."""
    width = max(len(row) for row in rows)
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and width + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {width} tokens and {max_new_tokens} new ones exceed the target's {limit} positions; leave "
            "the prompt out or ask for fewer new tokens."
        )
    pad = model.generation_config.pad_token_id
    fill = pad if pad is not None else next(iter(end_ids(model)), 0)
    ids = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows], device=model.device)  # [B, P]
    real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)  # [B, P]
    return {"input_ids": ids, "attention_mask": real}


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


class ForwardCounter:
    """Counts the forwards of transformers' own speculation from outside: how many tokens each was fed.

    Its first forward takes the prompt and drafts together; like our prefill it is left out of the figures, so that
    they mean the same for both.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        self.active = any(method.arguments.get(name) is not None for name in TRANSFORMERS_OWN)
        self.widths: list[int] = []

    def __enter__(self) -> "ForwardCounter":
        if self.active:
            self._hook = self.method.model.register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self._hook.remove()

    def _count(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None:
            self.widths.append(ids.shape[1])

    def stats(self, emitted: Sequence[int]) -> DecodeStats:
        """Return the figures of a one-row call.

        Args:
            emitted: tokens that came after each forward.
        """
        stats = DecodeStats(method=self.method.name, prefill_forwards=1, emitted_per_step=[[]])
        stats.first_tokens = next(iter(emitted), 0)
        deepest = max(self.widths[1:], default=1) - 1
        stats.tried_by_depth, stats.kept_by_depth = [0] * deepest, [0] * deepest
        for width, count in zip(self.widths[1:], emitted[1:], strict=True):
            drafted, kept = width - 1, min(count - 1, width - 1)
            stats.steps += 1
            stats.row_steps += 1
            stats.nodes_fed += width
            stats.drafted_tokens += drafted
            stats.kept_tokens += kept
            stats.emitted_tokens += count
            stats.emitted_per_step[0].append((count, kept))
            for depth in range(drafted):
                stats.tried_by_depth[depth] += 1
                stats.kept_by_depth[depth] += int(depth < kept)
        return stats
