"""Batches of rows of similar length, the same for every number of processes and every resume.

The order is a function of (seed, epoch) alone. The number of batches is a multiple of `multiple` (processes times
gradient accumulation); what is missing is filled with empty batches, which the collator turns into a batch with
nothing supervised, so every process runs the same number of forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler
from transformers import PreTrainedConfig

from ..target import learned_positions

BUCKET = 16  # rows whose lengths round up to the same multiple of this may meet in a batch


def refuse_long_rows(lengths: Sequence[int], tokens_per_batch: int) -> None:
    """Raise ValueError if a row of these lengths fits no batch."""
    longest = max(lengths, default=0)
    if longest > tokens_per_batch:
        raise ValueError(
            f"tokens_per_batch={tokens_per_batch} is less than the longest row ({longest} tokens); raise it or lower "
            "max_length."
        )


def refuse_beyond_positions(longest: int, config: PreTrainedConfig, remedy: str) -> None:
    """Raise ValueError if so many tokens exceed a target's learned positions.

    Args:
        longest: tokens that the target is to read.
        config: the target's.
        remedy: what to lower.
    """
    most = learned_positions(config.get_text_config())
    if most is not None and longest > most:
        raise ValueError(f"{longest} tokens exceed the target's {most} positions; lower {remedy}.")


class LengthBatches(Sampler[list[int]]):
    """Yields lists of at most `rows_per_batch` row numbers whose padded size stays within `tokens_per_batch`."""

    def __init__(
        self,
        lengths: Sequence[int],
        tokens_per_batch: int,
        seed: int,
        multiple: int = 1,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        rows_per_batch: int | None = None,
    ):
        """Prepare the order of epoch 0.

        Args:
            lengths: tokens of each row.
            tokens_per_batch: padded tokens a batch may hold.
            seed: the order's seed.
            multiple: the number of batches is filled up to a multiple of this.
            shuffle: False keeps rows sorted by length (evaluation).
            rank: this process; it gets every `world_size`-th batch.
            world_size: number of processes; divides `multiple`.
            rows_per_batch: rows a batch may hold; None is any number.

        Raises:
            ValueError: if a row is longer than a batch may be, or `multiple` would give ranks unequal numbers of
            batches.
        """
        if multiple % world_size:
            raise ValueError(f"multiple={multiple} must be a multiple of world_size={world_size}.")
        refuse_long_rows(lengths, tokens_per_batch)
        self.lengths, self.tokens_per_batch = np.asarray(lengths, dtype=np.int64), tokens_per_batch
        self.bucketed = np.minimum(-(-self.lengths // BUCKET) * BUCKET, tokens_per_batch)
        self.seed, self.multiple, self.shuffle = seed, multiple, shuffle
        self.rank, self.world_size = rank, world_size
        self.rows_per_batch = len(self.lengths) if rows_per_batch is None else rows_per_batch
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Make the order of an epoch; called by the Trainer before each."""
        draw = np.random.default_rng([self.seed, epoch])
        # The number of batches must not change from epoch to epoch, so batches are cut from one order of bucketed
        # lengths; which rows of a bucket meet in a batch, and the order of the batches, are drawn.
        jitter = draw.random(len(self.lengths)) if self.shuffle else self.lengths
        order = np.lexsort((jitter, self.bucketed))
        batches = [order[start:stop].tolist() for start, stop in self._cuts()]
        if self.shuffle:
            draw.shuffle(batches)
        self._batches = batches + [[] for _ in range(-len(batches) % self.multiple)]

    def _cuts(self) -> list[tuple[int, int]]:
        ordered = np.sort(self.bucketed)
        cuts, start = [], 0
        for stop in range(1, len(ordered) + 1):
            rows = stop + 1 - start
            full = rows > self.rows_per_batch
            if stop == len(ordered) or full or ordered[stop] * rows > self.tokens_per_batch:
                cuts.append((start, stop))
                start = stop
        return cuts

    def __len__(self) -> int:
        return len(self._batches) // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._batches[self.rank :: self.world_size]
