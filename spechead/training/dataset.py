"""The rows a Trainer draws from, and where a batch's target features come from: online or a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from .batch import RowTable
from .ends import TargetEnds
from .features import read_states
from .store import FeatureStore


class Features(Protocol):
    """Adds `states` [B, L, K, H], `best` [B, L] and `mass` [B, L] to a batch."""

    def __call__(self, batch: dict[str, Tensor], taps: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the batch with the features of these taps (the final one last)."""


class OnlineFeatures:
    """Runs the frozen target once a batch."""

    def __init__(self, target: PreTrainedModel, ends: TargetEnds):
        self.target, self.ends = target.eval().requires_grad_(False), ends

    def __call__(self, batch: dict[str, Tensor], taps: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the batch with features; the clones are ordinary tensors, which autograd may save."""
        needed = torch.zeros_like(batch["supervised"])
        needed[:, :-1] = batch["supervised"][:, 1:]
        device = self.ends.embedding.weight.device
        read = read_states(self.target, self.ends, batch["input_ids"].to(device), taps, needed.to(device))
        states, best, mass = (part.to(batch["input_ids"].device, copy=True) for part in read)
        return batch | {"states": states.clone(), "best": best.clone(), "mass": mass.clone()}


class StoredFeatures:
    """Selects taps from what the dataset read from a store; a batch without rows gets zeros."""

    def __init__(self, store: FeatureStore):
        self.index = store.index

    def __call__(self, batch: dict[str, Tensor], taps: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the batch with exactly these taps.

        Raises:
            ValueError: if the store lacks one of them.
        """
        missing = [tap for tap in taps if tap not in self.index.taps]
        if missing:
            raise ValueError(
                f"The store holds taps {self.index.taps}, the head needs {missing} besides; write a store for this "
                "head."
            )
        shape = batch["input_ids"].shape
        if "states" not in batch:
            empty = torch.zeros(*shape, len(taps), self.index.hidden_size, dtype=getattr(torch, self.index.dtype))
            device = batch["input_ids"].device
            best = torch.full(shape, -1, dtype=torch.int32, device=device)
            return batch | {"states": empty.to(device), "best": best, "mass": torch.zeros(shape, device=device)}
        if taps == self.index.taps:
            return batch
        places = [self.index.taps.index(tap) for tap in taps]
        return batch | {"states": batch["states"][:, :, places]}


class RowDataset(Dataset):
    """Rows with `input_ids` and `spans`; with a store, their features too.

    Args:
        rows: the rows, all of them.
        numbers: which of them belong to this dataset (train or held out); a row keeps its number in the store.
        store: features of all rows, or None for online features.
    """

    def __init__(self, rows: RowTable, numbers: Sequence[int], store: FeatureStore | None = None):
        self.rows, self.numbers, self.store = rows, list(numbers), store
        self.lengths = [len(rows[number]["input_ids"]) for number in self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> dict[str, Any]:
        number = self.numbers[place]
        row = self.rows[number]
        item = {"number": number, "input_ids": row["input_ids"], "spans": row["spans"]}
        return item | {"features": self.store[number]} if self.store is not None else item
