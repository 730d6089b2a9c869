"""Training of Medusa heads (Medusa-1): frozen target, soft targets, a later head counts `decay` times the one before.

Head k (from 0) reads the final state of token i and predicts token i+2+k. Seen from the predicted token of entry e =
i+k, head k reads state e-k: the heads of one entry share the target's law, as the depths of an EAGLE entry do, and are
trained where decoding can use them: on chains of answer tokens from i+1 on.

The LM head is the target's and frozen, or each head's own; with `kept` rows the softmax is a sampled one (see
`sampled.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..heads.medusa import MedusaHeads
from .batch import chains
from .eagle import gather_entries
from .ends import TargetEnds
from .losses import LogitRows, soft_cross_entropy
from .objective import Objective
from .sampled import SampledRows


class MedusaObjective(Objective):
    """The weighted divergence of all heads from the target's law.

    Args:
        heads: the heads to train, bound to `ends`.
        ends: the target's LM head.
        decay: weight of a head against the one before.
        kept: LM head rows that are always in the loss; None = all rows.
    """

    def __init__(self, heads: MedusaHeads, ends: TargetEnds, decay: float = 0.8, kept: Sequence[int] | None = None):
        super().__init__(heads, heads.config.num_heads, decay)
        self.law = LogitRows.frozen(ends.lm_head, ends.rule)
        self.sampled = SampledRows(len(self.law.weight), kept) if kept is not None else None

    def forward(
        self, input_ids: Tensor, supervised: Tensor, states: Tensor, best: Tensor, mass: Tensor
    ) -> dict[str, Tensor]:
        """Return the loss of a batch, summed over entries; arguments and result as in `Eagle3Objective`."""
        gathered = gather_entries(chains(supervised, self.depths))
        real = gathered.real
        final = states[:, :, -1]
        outputs = []
        for depth, blocks in enumerate(self.head.blocks):
            index = (gathered.entries - depth).clamp(min=0)
            state = final.gather(1, index[:, :, None].expand(-1, -1, final.shape[-1]))[real]  # [T, H]
            state = state.to(blocks[0].linear.weight.dtype)
            for block in blocks:
                state = block(state)
            outputs.append(state)
        hidden = torch.stack(outputs, dim=1)  # [T, K, H]
        reached = gathered.depths[real]
        chosen = gathered.take(best[:, 1:-1])[real]
        lm_heads, law = self.lm_heads(), self.law
        if self.sampled is not None and torch.is_grad_enabled():
            drawn = self.sampled.draw(chosen)
            lm_heads, law = [lm_head.take(*drawn) for lm_head in lm_heads], law.take(*drawn)
        loss, by_depth, guess = soft_cross_entropy(
            hidden,
            lm_heads,
            gathered.take(final[:, 1:-1])[real],
            gathered.take(mass[:, 1:-1])[real],
            reached * self.decay,
            law,
        )
        correct = (guess == chosen[:, None]) & reached
        return {
            "loss": loss,
            "entries": real.sum(),
            "loss_by_depth": by_depth / self.decay,
            "correct": correct.sum(0),
            "tried": reached.sum(0),
        }
