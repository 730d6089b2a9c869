"""Losses of head training, over LM heads that are never applied to more than a chunk of positions at once.

Each is a cross entropy between the target's law over the head's vocabulary and the head's own, computed with its
gradient in the forward pass (loss -sum p log q, gradient q - p), so the [T, D] logits of one chunk are all that ever
exists. The target's law of a position serves every depth that predicts this position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .ends import LogitRule

CHUNK_BYTES = 64 * 2**20  # float32 logits of head and target held at once


@dataclass(frozen=True)
class LogitRows:
    """Rows of an LM head, the target's or a head's, and all that makes logits of their product.

    Attributes:
        weight: [D, H].
        rule: what follows the product.
        bias: [D] added to the product, or None.
        offset: [D] added to the logits, or None: rows that stand for many others.
    """

    weight: Tensor
    rule: LogitRule
    bias: Tensor | None = None
    offset: Tensor | None = None

    @classmethod
    def frozen(cls, lm_head: nn.Module, rule: LogitRule) -> LogitRows:
        """Return all rows of an LM head [V, H] that gets no gradient."""
        bias = getattr(lm_head, "bias", None)
        return cls(lm_head.get_parameter("weight").detach(), rule, None if bias is None else bias.detach())

    def take(self, ids: Tensor, offset: Tensor | None = None) -> LogitRows:
        """Return the rows `ids` [R] alone, with an offset [R]."""
        ids = ids.to(self.weight.device)
        return LogitRows(self.weight[ids], self.rule, None if self.bias is None else self.bias[ids], offset)

    def logits(self, states: Tensor) -> Tensor:
        """Return float32 logits [C, D] of states [C, H], multiplied in the dtype of the rows."""
        weight = self.weight
        with torch.autocast(weight.device.type, enabled=False):  # the law is the target's in the target's own dtype
            product = F.linear(states.to(weight.dtype), weight, None if self.bias is None else self.bias.to(weight))
        logits = self.rule(product.float())
        return logits if self.offset is None else logits + self.offset


class SoftCrossEntropy(torch.autograd.Function):
    """Weighted sum of KL(target law || head's law) over positions and depths; see `soft_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        final: Tensor,
        mass: Tensor,
        weights: Tensor,
        lm_heads: Sequence[LogitRows],
        law: LogitRows,
        training: bool,
        *rows: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss [], loss by depth [J] and the head's best draft ids [T, J]; keep the gradients for backward."""
        positions, depths, width = hidden.shape
        device, size = hidden.device.type, len(law.weight)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        lm_heads = [replace(lm_head, weight=lm_head.weight.to(dtype)) for lm_head in lm_heads]
        together = depths if len(lm_heads) == 1 else 1  # one LM head serves all depths, or each has its own
        grad_hidden = torch.empty_like(hidden) if training and ctx.needs_input_grad[0] else None
        grad_rows = [
            torch.zeros_like(weight, dtype=torch.float32) if training and needed else None
            for weight, needed in zip(rows, ctx.needs_input_grad[-len(rows) :], strict=True)
        ]
        by_depth = hidden.new_zeros(depths, dtype=torch.float32)
        best = torch.zeros(positions, depths, dtype=torch.long, device=hidden.device)
        chunk = max(1, CHUNK_BYTES // (4 * size * (together + 1)))
        for start in range(0, positions, chunk):
            part = slice(start, start + chunk)
            logits = law.logits(final[part])
            log_p = F.log_softmax(logits, dim=-1)  # [C, D]
            own_mass = logits[:, 0] - log_p[:, 0]  # [C]
            p = log_p.exp()
            entropy = torch.linalg.vecdot(p, log_p)  # [C], negative
            scale = weights[part] * (own_mass - mass[part]).exp().clamp(max=1.0)[:, None]  # [C, J]
            for place, (lm_head, kept) in enumerate(zip(lm_heads, grad_rows, strict=True)):
                served = slice(place, place + together)  # G of the depths
                state = hidden[part, served].reshape(-1, width).to(dtype)
                log_q = F.log_softmax(lm_head.logits(state), dim=-1).view(len(p), -1, size)  # [C, G, D]
                divergence = entropy[:, None] - torch.linalg.vecdot(p[:, None], log_q)
                by_depth[served] += (divergence * scale[:, served]).sum(0)
                if not training:
                    best[part, served] = log_q.argmax(-1)
                    continue
                factor = scale[:, served, None] * lm_head.rule.scale  # heads have no soft cap
                error = log_q.exp_().sub_(p[:, None]).mul_(factor).to(dtype).flatten(0, 1)
                if grad_hidden is not None:
                    grad_hidden[part, served] = (error @ lm_head.weight).view(len(p), -1, width).to(hidden.dtype)
                if kept is not None:
                    kept += error.T @ state
        ctx.save_for_backward(grad_hidden, *grad_rows)
        ctx.mark_non_differentiable(by_depth, best)
        return by_depth.sum(), by_depth, best

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """Scale the kept gradients."""
        grad_hidden, *grad_rows = (None if kept is None else kept * grad.to(kept.dtype) for kept in ctx.saved_tensors)
        return (grad_hidden, None, None, None, None, None, None, *grad_rows)


def soft_cross_entropy(
    hidden: Tensor, lm_heads: Sequence[LogitRows], final: Tensor, mass: Tensor, weights: Tensor, law: LogitRows
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted divergence of the head's law from the target's, summed over positions and depths.

    A position counts by the share of the target's law that the head's vocabulary covers: the law is renormalised over
    the D kept tokens, and a position whose mass lies elsewhere teaches little.

    Args:
        hidden: [T, J, H] what the head's LM head reads, at each depth that predicts a position.
        lm_heads: the head's LM head [D, H] for all depths, or J of them; gradients are skipped for weights that do
            not require one. Their rules have no soft cap.
        final: [T, H] the target's state whose law predicts the same token.
        mass: [T] log normaliser of the target's law over all V tokens.
        weights: [T, J] weight of each position and depth (0 = not supervised).
        law: the target's LM head over the head's vocabulary.

    Returns:
        The loss [], its parts by depth [J], and the head's best draft ids [T, J] (filled without gradients only).
    """
    # Inside apply() gradients are always off, so whether any are wanted is asked here.
    training = torch.is_grad_enabled()
    rows = [lm_head.weight for lm_head in lm_heads]
    return SoftCrossEntropy.apply(hidden, final, mass, weights, lm_heads, law, training, *rows)
