"""A store of the target's hidden states on disk, so that epochs do not repeat the target's forward.

Layout of a store's directory: `index.json` (taps, sizes, where each row lies), `shard-*.safetensors` with `states`
[T, K, H] in the target's dtype (K = the taps asked for and, last, the state after the final norm), `best` [T] (the
target's own argmax where a token is supervised, else -1) and `mass` [T] (log of the sum of its exponentiated logits,
for the share of a draft vocabulary). Written by one process, shard by shard, so an interrupted write goes on where it
stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

logger = logging.get_logger(__name__)

INDEX_FILE = "index.json"
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass
class StoreIndex:
    """What a store holds: one `(row, shard, offset, length)` for each row, in the order written (shortest rows
    first)."""

    key: str
    taps: tuple[int, ...]
    hidden_size: int
    dtype: str
    row_count: int
    target_fingerprint: dict[str, Any]
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)

    def bytes_per_token(self) -> int:
        """Return the bytes one token takes: all states, its argmax (int32) and its mass (float32)."""
        return len(self.taps) * self.hidden_size * BYTES[self.dtype] + 8


@dataclass(frozen=True)
class RowFeatures:
    """One row's stored features: `states [L, K, H]`, `best [L]` int32, `mass [L]` float32."""

    states: Tensor
    best: Tensor
    mass: Tensor


def store_bytes(lengths: Sequence[int], index: StoreIndex) -> int:
    """Return the size of a store of rows of these lengths, without file headers."""
    return sum(lengths) * index.bytes_per_token()


class StoreWriter:
    """Writes rows in order into shards of at most `shard_bytes`; reopening a directory continues after its last whole
    shard."""

    def __init__(self, directory: Path, index: StoreIndex, shard_bytes: int = 512 * 2**20):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.shard_bytes = directory, shard_bytes
        self.index = index
        if (directory / INDEX_FILE).exists():
            self.index = read_index(directory)
            if (self.index.key, self.index.taps) != (index.key, index.taps):
                raise ValueError(
                    f"{directory} holds a store of other data, taps or target (key {self.index.key}, wanted "
                    f"{index.key}); give another directory or delete it."
                )
        self._pending: list[tuple[int, RowFeatures]] = []

    @property
    def written(self) -> int:
        """Number of rows that are safely on disk."""
        return len(self.index.rows)

    def add(self, row: int, features: RowFeatures) -> None:
        """Append the features of row number `row`; a full shard is written at once."""
        self._pending.append((row, features))
        tokens = sum(len(pending.best) for _, pending in self._pending)
        if tokens * self.index.bytes_per_token() >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard, then the index (atomically, so a kill leaves a readable store)."""
        if self._pending:
            shard = 1 + max((place[1] for place in self.index.rows), default=-1)
            parts = [features for _, features in self._pending]
            tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in ("states", "best", "mass")}
            save_file(tensors, self.directory / shard_name(shard))
            offset = 0
            for row, features in self._pending:
                self.index.rows.append((row, shard, offset, len(features.best)))
                offset += len(features.best)
            self._pending = []
        partial = self.directory / (INDEX_FILE + ".partial")
        partial.write_text(json.dumps(asdict(self.index)))
        os.replace(partial, self.directory / INDEX_FILE)


class FeatureStore:
    """Reads rows of a finished store by their number; shards stay memory-mapped."""

    def __init__(self, directory: Path, key: str | None = None):
        """Open a store.

        Args:
            directory: where it lies.
            key: the key of the rows, taps and target it must have been written for; None accepts any.

        Raises:
            ValueError: if the store is absent, unfinished or was written for something else.
        """
        if not (directory / INDEX_FILE).exists():
            raise ValueError(f"{directory} holds no feature store (no {INDEX_FILE}); write one with features: store.")
        self.directory, self.index = directory, read_index(directory)
        if key is not None and self.index.key != key:
            raise ValueError(
                f"The store in {directory} was written for other data, taps or target (key {self.index.key}, wanted "
                f"{key}); give another directory or delete it."
            )
        if len(self.index.rows) != self.index.row_count:
            raise ValueError(
                f"The store in {directory} holds {len(self.index.rows)} of {self.index.row_count} rows; "
                "finish writing it first (the same command continues)."
            )
        self._places = {row: (shard, offset, length) for row, shard, offset, length in self.index.rows}
        self._shards: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self.index.rows)

    def __getitem__(self, row: int) -> RowFeatures:
        shard, offset, length = self._places[row]
        slices = self._slices(shard)
        return RowFeatures(**{name: part[offset : offset + length] for name, part in slices.items()})

    def _slices(self, shard: int) -> dict[str, Any]:
        if shard not in self._shards:
            opened = safe_open(self.directory / shard_name(shard), framework="pt")
            self._shards[shard] = {name: opened.get_slice(name) for name in ("states", "best", "mass")}
        return self._shards[shard]


def shard_name(shard: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{shard:05d}.safetensors"


def read_index(directory: Path) -> StoreIndex:
    """Read a store's index."""
    raw = json.loads((directory / INDEX_FILE).read_text())
    raw["taps"] = tuple(raw["taps"])
    raw["rows"] = [tuple(place) for place in raw["rows"]]
    return StoreIndex(**raw)


def is_whole(directory: Path, key: str, taps: Sequence[int]) -> bool:
    """Whether a directory holds a finished store with this key and at least these taps."""
    if not (directory / INDEX_FILE).exists():
        return False
    index = read_index(directory)
    return index.key == key and set(taps) <= set(index.taps) and len(index.rows) == index.row_count
