"""A softmax over part of a vocabulary that stands for the whole of it, drawn anew for each batch.

The rows that matter most are always there: the most frequent tokens, and the tokens that the target itself would
choose in this batch. Of the others a few are drawn, and their logits raised by log(others / drawn), so that the sum of
exponentials is the whole vocabulary's in expectation. The LM head is most of a small head's training, so this is most
of its cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DRAWN_SHARE = 0.25  # rows drawn from the others, per kept row


class SampledRows:
    """Draws the LM head rows of a batch.

    Args:
        size: rows of the whole LM head.
        kept: rows that are always in.
    """

    def __init__(self, size: int, kept: Sequence[int] | Tensor):
        self.size = size
        self.kept = torch.zeros(size, dtype=torch.bool)
        self.kept[torch.as_tensor(kept).cpu()] = True
        self.drawn = max(1, int(DRAWN_SHARE * int(self.kept.sum())))

    def draw(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of a batch, and what is added to their logits.

        Args:
            wanted: ids that must be in besides the kept ones, any shape; negative ones are ignored.

        Returns:
            Row ids [R] int64, and offsets [R] float32, on the device of `wanted`.
        """
        always = self.kept.clone()
        always[wanted[wanted >= 0].long().cpu()] = True
        others = (~always).nonzero().flatten()
        drawn = others[torch.randperm(len(others))[: self.drawn]]
        ids = torch.cat([always.nonzero().flatten(), drawn])
        offsets = torch.zeros(len(ids))
        if len(drawn):
            offsets[-len(drawn) :] = math.log(len(others) / len(drawn))
        return ids.to(wanted.device), offsets.to(wanted.device)
