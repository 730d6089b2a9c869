"""From logits to the law a row samples from: one processor list a row, float32 logits in, probabilities out.

Processors must be functions of (ids, scores) of their row. Those that ignore the ids run once over all rows; the others
see exactly the `[1, P+t]` ids, left pads included, that plain decoding shows them. `Draws` is the randomness.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

PREFIX_FREE: tuple[type[LogitsProcessor], ...] = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
NEAR_TIE = 1e-4  # greedy decisions closer than this, in logits, are counted: rounding may decide them


def _of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """Return the processor as the given row of its batch needs it, called with one row of ids."""
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and torch.is_tensor(processor.prompt_ignore_length):
        own = copy.copy(processor)
        own.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        return own
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        own, allowed = copy.copy(processor), processor._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = lambda _, sent: allowed(row, sent)
        return own
    return processor


@dataclass
class Sampler:
    """How one row samples.

    Attributes:
        processors: the list shared by the rows of one call; rows of equal lists are processed together.
        row: the row's index in that call, which row-bound processors need.
        do_sample: False is greedy.
        generator: the row's own, one shared with other rows, or None for the device's default.
    """

    processors: LogitsProcessorList
    row: int
    do_sample: bool
    generator: torch.Generator | None = None
    own: list[LogitsProcessor] = field(init=False)

    def __post_init__(self) -> None:
        self.own = [_of_row(processor, self.row) for processor in self.processors]


def warp(samplers: Sequence[Sampler], scores: Tensor, temperature: float | None = None) -> Tensor:
    """Apply each row's temperature, top-k and top-p to a draft's logits; the other processors are the target's alone.

    Args:
        samplers: R rows' settings.
        scores: float32 logits `[R, V]`; not modified.
        temperature: replaces the rows' own temperature.
    """
    out = scores.clone()
    for rows in _groups(samplers):
        part = out[rows] / (temperature or 1.0)
        for processor in samplers[rows[0]].processors:
            if isinstance(processor, TemperatureLogitsWarper) and temperature is not None:
                continue
            if isinstance(processor, (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)):
                part = processor(None, part)
        out[rows] = part
    return out


def _groups(samplers: Sequence[Sampler]) -> list[list[int]]:
    """Group rows that share one list of processors."""
    groups: dict[int, list[int]] = {}
    for row, sampler in enumerate(samplers):
        groups.setdefault(id(sampler.processors), []).append(row)
    return list(groups.values())


def process(samplers: Sequence[Sampler], ids: Sequence[Tensor], scores: Tensor) -> Tensor:
    """Run every row's processors.

    Args:
        samplers: R rows' settings.
        ids: their ids so far, each `[1, P+t]`.
        scores: float32 logits `[R, V]`; not modified.

    Returns:
        Processed scores `[R, V]`.
    """
    out = scores.clone()
    for rows in _groups(samplers):
        part = out[rows]
        for place, processor in enumerate(samplers[rows[0]].processors):
            if type(processor) in PREFIX_FREE:
                part = processor(ids[rows[0]], part)
            else:
                each = [samplers[row].own[place](ids[row], part[i : i + 1]) for i, row in enumerate(rows)]
                part = torch.cat(each)
        out[rows] = part.to(out.dtype)
    return out


def probabilities(samplers: Sequence[Sampler], scores: Tensor) -> Tensor:
    """Turn processed scores `[R, V]` into laws: one-hot at the argmax for greedy rows, softmax for the others."""
    greedy = [not sampler.do_sample for sampler in samplers]
    if not any(greedy):
        return torch.softmax(scores, dim=-1)
    best = torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
    if all(greedy):
        return best
    which = torch.tensor(greedy, device=scores.device)[:, None]
    return torch.where(which, best, torch.softmax(scores, dim=-1))


class Draws:
    """The randomness of a batch, drawn in row order from each row's generator.

    A row draws from its own generator only when its own walk needs it, so that with one generator a row a sampled row
    equals its single run.
    """

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self.samplers = samplers

    def _generators(self) -> torch.Generator | None | list[torch.Generator | None]:
        own = [sampler.generator for sampler in self.samplers]
        return own[0] if all(generator is own[0] for generator in own) else own

    def accept(self, probability: Tensor, live: Tensor) -> Tensor:
        """Toss each live row's coin: True iff u < probability, u uniform on [0, 1)."""
        generators = self._generators()
        device = probability.device
        if not isinstance(generators, list):
            u = torch.rand(len(live), generator=generators, device=device, dtype=torch.float64)
            return u < probability
        u = torch.ones(len(live), device=device, dtype=torch.float64)
        for row in live.nonzero().flatten().tolist():
            u[row] = torch.rand((), generator=generators[row], device=device, dtype=torch.float64)
        return live & (u < probability)

    def sample(self, p: Tensor, live: Tensor) -> Tensor:
        """Draw each live row's token from `p [B, V]`; greedy rows, whose p is one-hot, draw nothing."""
        tokens = p.argmax(-1)
        random = [row for row in live.nonzero().flatten().tolist() if self.samplers[row].do_sample]
        if not random:
            return tokens
        generators = self._generators()
        if not isinstance(generators, list):
            tokens[random] = torch.multinomial(p[random], 1, generator=generators).squeeze(1)
            return tokens
        for row in random:
            tokens[row] = torch.multinomial(p[row], 1, generator=generators[row])[0]
        return tokens
