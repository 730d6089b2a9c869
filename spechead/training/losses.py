"""Losses of head training, over an LM head that is never applied to more than a chunk of positions at once.

Each is a cross entropy between the target's law over the head's vocabulary and the head's own, computed with its
gradient in the forward pass (loss -sum p log q, gradient q - p), so the [T, D] logits of one chunk are all that ever
exists. The target's law of a position serves every depth that predicts this position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .ends import LogitRule

CHUNK_BYTES = 64 * 2**20  # float32 logits of head and target held at once


@dataclass(frozen=True)
class TargetLaw:
    """Where the target's law over the head's vocabulary comes from.

    Attributes:
        weight: [D, H] rows of the target's LM head, in the order of the head's vocabulary.
        rule: what the target does to the product.
        offset: [D] added to the logits of target and head alike, or None: rows that stand for many others.
    """

    weight: Tensor
    rule: LogitRule
    offset: Tensor | None = None

    def rows(self, ids: Tensor, offset: Tensor) -> TargetLaw:
        """Return the law over some rows alone."""
        return TargetLaw(self.weight[ids.to(self.weight.device)], self.rule, offset)

    def log_probs(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log law [C, D] over the head's vocabulary and its log normaliser [C] for final states [C, H]."""
        logits = self.rule(F.linear(final.to(self.weight.dtype), self.weight).float())
        if self.offset is not None:
            logits = logits + self.offset
        log_probs = F.log_softmax(logits, dim=-1)
        return log_probs, logits[:, 0] - log_probs[:, 0]


class SoftCrossEntropy(torch.autograd.Function):
    """Weighted sum of KL(target law || head's law) over positions and depths; see `soft_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        final: Tensor,
        mass: Tensor,
        weights: Tensor,
        law: TargetLaw,
        training: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss [], loss by depth [J] and the head's best draft ids [T, J]; keep the gradients for backward."""
        positions, depths, width = hidden.shape
        dtype = (
            torch.get_autocast_dtype(hidden.device.type)
            if torch.is_autocast_enabled(hidden.device.type)
            else hidden.dtype
        )
        rows = weight.to(dtype)
        want_hidden, want_weight = (training and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        by_depth = hidden.new_zeros(depths, dtype=torch.float32)
        best = torch.zeros(positions, depths, dtype=torch.long, device=hidden.device)
        chunk = max(1, CHUNK_BYTES // (4 * rows.shape[0] * (depths + 1)))
        for start in range(0, positions, chunk):
            part = slice(start, start + chunk)
            log_p, own_mass = law.log_probs(final[part])  # [C, D], [C]
            p = log_p.exp()
            scale = weights[part] * (own_mass - mass[part]).exp().clamp(max=1.0)[:, None]  # [C, J]
            flat = hidden[part].reshape(-1, width).to(dtype)
            logits = (flat @ rows.T).float()
            if law.offset is not None:
                logits += law.offset
            log_q = F.log_softmax(logits, dim=-1).view(-1, depths, rows.shape[0])  # [C, J, D]
            entropy = torch.linalg.vecdot(p, log_p)  # [C], negative
            divergence = entropy[:, None] - torch.linalg.vecdot(p[:, None], log_q)
            by_depth += (divergence * scale).sum(0)
            if not training:
                best[part] = log_q.argmax(-1)
                continue
            error = log_q.exp_().sub_(p[:, None]).mul_(scale[:, :, None]).to(dtype).flatten(0, 1)
            if grad_hidden is not None:
                grad_hidden[part] = (error @ rows).view(-1, depths, width)
            if grad_weight is not None:
                grad_weight += error.T @ flat
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(by_depth, best)
        return by_depth.sum(), by_depth, best

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """Scale the kept gradients."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad.to(grad_hidden.dtype),
            None if grad_weight is None else grad_weight * grad,
            None,
            None,
            None,
            None,
            None,
        )


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, final: Tensor, mass: Tensor, weights: Tensor, law: TargetLaw
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted divergence of the head's law from the target's, summed over positions and depths.

    A position counts by the share of the target's law that the head's vocabulary covers: the law is renormalised over
    the D kept tokens, and a position whose mass lies elsewhere teaches little.

    Args:
        hidden: [T, J, H] what the head's LM head reads, at each depth that predicts a position.
        weight: [D, H] the head's LM head; its gradient is skipped when it does not require one.
        final: [T, H] the target's state whose law predicts the same token.
        mass: [T] log normaliser of the target's law over all V tokens.
        weights: [T, J] weight of each position and depth (0 = not supervised).
        law: the target's LM head over the head's vocabulary.

    Returns:
        The loss [], its parts by depth [J], and the head's best draft ids [T, J] (filled without gradients only).
    """
    # Inside apply() gradients are always off, so whether any are wanted is asked here.
    return SoftCrossEntropy.apply(hidden, weight, final, mass, weights, law, torch.is_grad_enabled())
