"""From logits to the law a row samples from: one processor list a row, float32 logits in, probabilities out.

Processors must be functions of (ids, scores) of their row. Those that ignore the ids run once over all rows; the
others see exactly the `[1, P+t]` ids, left pads included, that plain decoding shows them. `Draws` is the randomness.
"""

from __future__ import annotations

import copy
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

PREFIX_FREE: tuple[type[LogitsProcessor], ...] = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
BLOCKS = (256, 128, 64)
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
        seed: makes the row's tokens functions of its law, this seed and their place, whoever shares the batch and
            whatever drafts (see `uniform`); no generator is used then.
    """

    processors: LogitsProcessorList
    row: int
    do_sample: bool
    generator: torch.Generator | None = None
    seed: int | None = None
    own: list[LogitsProcessor] = field(init=False)

    def __post_init__(self) -> None:
        self.own = [_of_row(processor, self.row) for processor in self.processors]

    @property
    def draws_drafts(self) -> bool:
        """Whether a draft model draws for this row; greedy and seeded rows take its best tokens, as point masses."""
        return self.do_sample and self.seed is None


def waiting_times(seed: int, position: int, size: int) -> Tensor:
    """Return the exponential times `[size]`, float64, that decide a seeded row's token.

    Made of the counter-based generator Philox under the 128-bit BLAKE2b digest of (seed, position), so that they are
    the same everywhere and for ever.

    Args:
        seed: 64-bit signed.
        position: tokens that the row has emitted before.
        size: of the vocabulary.
    """
    key = int.from_bytes(hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=16).digest(), "little")
    uniform = (np.random.Philox(key=key).random_raw(size) >> np.uint64(11)) * 2.0**-53  # [0, 1)
    return torch.from_numpy(-np.log1p(-uniform))


def seeded_token(p: Tensor, seed: int, position: int) -> Tensor:
    """Return the token whose waiting time over its mass in `p [V]` is the least: the Gumbel-max trick.

    It follows the law p, and rounding of p changes it about as rarely as it changes p: an inverse of the cumulative
    law would move at each of the V borders between tokens.
    """
    times = waiting_times(seed, position, len(p)).to(p.device).clamp(min=2.0**-60)
    return (p.double() / times).argmax()


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
    groups = _groups(samplers)
    if len(groups) == 1:
        return _run(samplers, ids, scores)
    out = scores.clone()
    for rows in groups:
        out[rows] = _run([samplers[row] for row in rows], [ids[row] for row in rows], scores[rows])
    return out


def _run(samplers: Sequence[Sampler], ids: Sequence[Tensor], scores: Tensor) -> Tensor:
    """Run one list of processors over the rows that share it."""
    processors = samplers[0].processors
    part = scores.clone() if processors else scores  # a processor may write into what it gets
    for place, processor in enumerate(processors):
        if type(processor) in PREFIX_FREE:
            part = processor(ids[0], part)
        else:
            each = [sampler.own[place](ids[row], part[row : row + 1]) for row, sampler in enumerate(samplers)]
            part = torch.cat(each)
    return part.to(scores.dtype)


def probabilities(samplers: Sequence[Sampler], scores: Tensor) -> Tensor:
    """Turn processed scores `[R, V]` into laws: one-hot at the argmax for greedy rows, softmax for the others."""
    greedy = [not sampler.do_sample for sampler in samplers]
    if not any(greedy):
        return torch.softmax(scores, dim=-1)
    best = torch.zeros_like(scores).scatter_(1, best_tokens(scores)[:, None], 1.0)
    if all(greedy):
        return best
    which = torch.tensor(greedy, device=scores.device)[:, None]
    return torch.where(which, best, torch.softmax(scores, dim=-1))


def is_near_tie(scores: Tensor, token: int) -> bool:
    """Whether another token's score in `scores [V]` lies within NEAR_TIE of the best one, `token`."""
    others = [part.max() for part in (scores[:token], scores[token + 1 :]) if len(part)]
    return any(bool(other >= scores[token] - NEAR_TIE) for other in others)


def best_tokens(scores: Tensor) -> Tensor:
    """Return the argmax of each row of `scores [R, V]`: block by block where V allows, which is twice as fast."""
    rows, size = scores.shape
    width = next((width for width in BLOCKS if size % width == 0), 0)
    if not width or scores.device.type != "cpu":
        return scores.argmax(-1)
    blocks = scores.reshape(rows, -1, width)
    block = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(rows), block].argmax(-1)
    return block * width + inside


class Draws:
    """The randomness of a batch, drawn in row order from each row's generator.

    A row draws from its own generator only when its own walk needs it, so that with one generator a row a sampled row
    equals its single run. A row with a seed draws nothing: its tokens follow from its law, seed and position, by the
    least of keyed waiting times, so that its sample is the same alone and in any batch. Its drafts must be point
    masses, whose walk goes to the child that equals the token.

    Args:
        samplers: one a row.
        emitted: how many tokens a row has emitted so far; needed for rows with a seed.
    """

    def __init__(self, samplers: Sequence[Sampler], emitted: Callable[[int], int] | None = None) -> None:
        self.samplers, self.emitted = samplers, emitted

    def _generators(self) -> list[torch.Generator | None] | torch.Generator | None:
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
        tokens = best_tokens(p)
        sampled = [row for row in live.nonzero().flatten().tolist() if self.samplers[row].do_sample]
        random = [row for row in sampled if self.samplers[row].seed is None]
        for row in sampled:
            if (seed := self.samplers[row].seed) is not None:
                if self.emitted is None:
                    raise ValueError(f"row {row} has seed {seed}; give Draws `emitted`, to know which token is drawn.")
                tokens[row] = seeded_token(p[row], seed, self.emitted(row))
        if not random:
            return tokens
        generators = self._generators()
        if not isinstance(generators, list):
            tokens[random] = torch.multinomial(p[random], 1, generator=generators).squeeze(1)
            return tokens
        for row in random:
            tokens[row] = torch.multinomial(p[row], 1, generator=generators[row])[0]
        return tokens


def draft_tokens(samplers: Sequence[Sampler], draws: Draws, law: Tensor, live: Tensor) -> Tensor:
    """Draw each live row's drafted token `[B]` from a draft's `law [B, V]`; seeded rows take the best, as greedy."""
    seeded = torch.tensor([sampler.seed is not None for sampler in samplers], device=law.device)
    return torch.where(seeded, law.argmax(-1), draws.sample(law, live & ~seeded))
