"""One training batch: right-padded rows, which of their tokens are answers, and the target's features of them.

`entries(batch)` and `chains(supervised, depths)` hold the alignment that every head's training shares with decoding: a
mask is built on the ids of the tokens to predict, and a depth counts only where decoding could have reached it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .store import RowFeatures


class RowTable(Protocol):
    """Rows by number: a list of dicts, or `Rows` on disk."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, number: int, /) -> Mapping[str, Any]:
        """Return a row with `input_ids` and `spans`."""


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Pad rows into a batch; an empty list gives a batch of one row with nothing supervised.

    Args:
        rows: each with `input_ids`, `spans` (half-open ranges of answer tokens), `number` (the row's id in the data)
            and, when training from a store, `features` (`RowFeatures`).

    Returns:
        `input_ids` [B, L], `supervised` [B, L] bool (answer tokens), `numbers` [B] (-1 for an empty batch), and from a
        store `states` [B, L, K, H], `best` [B, L], `mass` [B, L].
    """
    if not rows:
        return {
            "input_ids": torch.zeros(1, 3, dtype=torch.long),
            "supervised": torch.zeros(1, 3, dtype=torch.bool),
            "numbers": torch.full((1,), -1),
        }
    length = max(3, max(len(row["input_ids"]) for row in rows))
    batch = {
        "input_ids": torch.zeros(len(rows), length, dtype=torch.long),
        "supervised": torch.zeros(len(rows), length, dtype=torch.bool),
        "numbers": torch.tensor([row["number"] for row in rows]),
    }
    for place, row in enumerate(rows):
        batch["input_ids"][place, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        for start, stop in row["spans"]:
            batch["supervised"][place, start:stop] = True
    if "features" in rows[0]:
        batch |= pad_features([row["features"] for row in rows], length)
    return batch


def pad_features(features: Sequence[RowFeatures], length: int) -> dict[str, Tensor]:
    """Pad the stored features of rows to one length: `states` [B, L, K, H], `best` [B, L], `mass` [B, L]."""
    first = features[0].states
    states = first.new_zeros(len(features), length, *first.shape[1:])
    best = torch.full((len(features), length), -1, dtype=torch.int32)
    mass = torch.zeros(len(features), length)
    for place, row in enumerate(features):
        rows = len(row.best)
        states[place, :rows], best[place, :rows], mass[place, :rows] = row.states, row.best, row.mass
    return {"states": states, "best": best, "mass": mass}


def chains(supervised: Tensor, depths: int) -> Tensor:
    """Return where each depth of an EAGLE head is trained.

    Entry i holds the feature of token i and token i+1, and predicts token i+2. Depth j at entry i has been drafted
    from the true entry i-j, whose own token i-j+1 had to be an answer token, and so had all after it up to the
    predicted one.

    Args:
        supervised: [B, L] bool, answer tokens.
        depths: J, depths trained (depth 0 reads true features).

    Returns:
        [B, L - 2, J] bool.
    """
    known = supervised[:, 1:-1]  # token i+1 of entry i
    reached = known & supervised[:, 2:]
    masks = [reached]
    for depth in range(1, depths):
        earlier = torch.zeros_like(known)
        earlier[:, depth:] = known[:, : max(known.shape[1] - depth, 0)]  # a short row has no such depth
        reached = reached & earlier
        masks.append(reached)
    return torch.stack(masks, dim=-1)


def supervised_entries(supervised: Tensor) -> Tensor:
    """Return the number [] of supervised entries of a batch: what a global batch's loss is divided by."""
    return (supervised[:, 1:-1] & supervised[:, 2:]).sum()
