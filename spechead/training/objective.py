"""What the trainer trains: a module that owns a head and turns a batch into its summed loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..heads.base import Head
from ..heads.medusa import MedusaHeads
from .ends import LogitRule
from .losses import LogitRows


class Objective(nn.Module):
    """Base of the objectives; `forward(input_ids, supervised, states, best, mass)` is a batch's loss and counts.

    Args:
        head: the head to train; nothing else of an objective has parameters or is saved.
        depths: J, predictions trained for each entry; `trained_depths` may hold them lower for a while.
        decay: weight of a depth against the one before.
    """

    head: Head
    decay: Tensor

    def __init__(self, head: Head, depths: int, decay: float):
        super().__init__()
        self.head, self.depths = head, depths
        self.trained_depths = depths
        self.register_buffer("decay", decay ** torch.arange(depths), persistent=False)

    @property
    def active_depths(self) -> int:
        """Predictions made now: all of them when evaluating."""
        return self.trained_depths if self.training else self.depths

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states that a batch must bring, the final one last."""
        return self.head.taps

    def lm_heads(self) -> list[LogitRows]:
        """Return what `head.logits` applies to its states when decoding: one LM head for all depths, or one a depth.

        A shared one is the target's with its bias, and frozen; own ones are trained. Both come with the head's scale.
        """
        rule = LogitRule(scale=self.head.config.logit_scale)
        if self.head.config.share_lm_head:
            return [LogitRows.frozen(self.head.shared("lm_head"), rule)]
        own = self.head.lm_heads if isinstance(self.head, MedusaHeads) else [self.head.lm_head]
        return [LogitRows(lm_head.get_parameter("weight"), rule) for lm_head in own]
