"""Training of EAGLE heads: the pairs that decoding feeds, and for EAGLE-3 the training-time test over several depths.

    depth 0 at entry i:  out = head(token_{i+1}, feature_i)            loss: target's law of token i+2
    depth j at entry i:  out = head(token_{i+1}, out of depth j-1 at entry i-1)

A depth-j query sees what decoding would have in the draft's cache: true entries up to i-j, then its own chain, one
entry of each depth 1..j. Keys of all depths lie in one DynamicCache, in the order depth 0 (all entries), depth 1, ...
(supervised entries only). EAGLE-1 trains depth 0 alone, with SmoothL1 to the target's next feature and noise on the
features it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from ..heads.eagle import EagleHead
from ..heads.eagle3 import Eagle3Head
from .batch import chains
from .ends import TargetEnds
from .features import final_tap
from .losses import LogitRows, soft_cross_entropy
from .objective import Objective
from .sampled import SampledRows

FEATURE_WEIGHT, LAW_WEIGHT = 1.0, 0.1  # EAGLE-1's two losses


class Gathered(NamedTuple):
    """Supervised entries of each row, moved to the front."""

    entries: Tensor  # [B, A] entry numbers
    real: Tensor  # [B, A]
    depths: Tensor  # [B, A, J]

    def take(self, values: Tensor) -> Tensor:
        """Gather `values [B, N, ...]` to `[B, A, ...]`."""
        index = self.entries.view(*self.entries.shape, *[1] * (values.dim() - 2))
        return values.gather(1, index.expand(-1, -1, *values.shape[2:]))


def gather_entries(masks: Tensor) -> Gathered:
    """Move each row's supervised entries to the front, in order.

    Args:
        masks: [B, N, J] bool, from `chains`.

    Returns:
        The gathered entries; A is the largest count of any row, at least 1.
    """
    real = masks[:, :, 0]
    order = real.int().argsort(dim=1, descending=True, stable=True)
    width = max(1, int(real.sum(1).max()))
    index = order[:, :width]
    return Gathered(index, real.gather(1, index), masks.gather(1, index[:, :, None].expand(-1, -1, masks.shape[-1])))


def depth_mask(index: Tensor, entries: int, depth: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [B, 1, A, N + depth * A] of depth >= 1: true entries up to i - depth, then the own
    chain."""
    width = index.shape[1]
    true_part = torch.arange(entries, device=index.device) <= (index - depth)[:, :, None]  # [B, A, N]
    place = torch.arange(width, device=index.device)
    parts = [true_part]
    for step in range(1, depth + 1):
        own = place[None, :] == (place - depth + step)[:, None]  # [A, A]
        parts.append(own.expand(index.shape[0], -1, -1))
    allowed = torch.cat(parts, dim=-1)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=index.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def unroll(head: Eagle3Head | EagleHead, tokens: Tensor, features: Tensor, gathered: Gathered) -> Tensor:
    """Run the training-time test.

    Args:
        head: the head.
        tokens: [B, N] token i+1 of each entry i.
        features: [B, N, W] what the head's `fuse` takes, of token i.
        gathered: the supervised entries.

    Returns:
        The head's outputs at the supervised entries, [B, A, J, H]; meaningless where `gathered.depths` is False.
    """
    rows, entries = tokens.shape
    positions = torch.arange(entries, device=tokens.device).expand(rows, -1)
    cache = DynamicCache()
    hidden = gathered.take(head(tokens, head.fuse(features), positions, cache=cache))
    outputs = [hidden]
    own_tokens, own_positions = gathered.take(tokens), gathered.take(positions)
    for depth in range(1, gathered.depths.shape[-1]):
        before = torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)
        mask = depth_mask(gathered.entries, entries, depth, hidden.dtype)
        hidden = head(own_tokens, before, own_positions, attention_mask=mask, cache=cache)
        outputs.append(hidden)
    return torch.stack(outputs, dim=2)


class Eagle3Objective(Objective):
    """EAGLE-3's loss: soft targets over the draft vocabulary at every depth, weighted by `decay ** depth`.

    Args:
        head: the head to train, bound to `ends`.
        ends: the target's embedding and LM head.
        depths: J, steps of the training-time test.
        decay: weight of a depth against the one before.
        kept: draft ids that are always in the softmax, which is then a sampled one (see `sampled.py`); None = all of
            it.
    """

    head: Eagle3Head

    def __init__(
        self,
        head: Eagle3Head,
        ends: TargetEnds,
        depths: int = 5,
        decay: float = 0.8,
        kept: Sequence[int] | Tensor | None = None,
    ):
        super().__init__(head, depths, decay)
        self.final = final_tap(ends.config)
        # A plain attribute: the target's rows are no part of the module, its state or its gradients.
        self.law = LogitRows.frozen(ends.lm_head, ends.rule).take(head.draft_to_target)
        self.sampled = SampledRows(len(head.draft_to_target), kept) if kept is not None else None

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states that a batch must bring: the head's taps, then the final one."""
        return (*self.head.taps, self.final)

    def forward(
        self, input_ids: Tensor, supervised: Tensor, states: Tensor, best: Tensor, mass: Tensor
    ) -> dict[str, Tensor]:
        """Return the loss of a batch, summed over entries.

        Args:
            input_ids: [B, L] token ids.
            supervised: [B, L] bool, answer tokens.
            states: [B, L, K, H] the head's taps, then the final state.
            best: [B, L] int32, the target's argmax.
            mass: [B, L] log normaliser of the target's law.

        Returns:
            `loss` [] (sum), `entries` [], `loss_by_depth`, `correct`, `tried` [J]; `correct` means nothing while
            gradients are on (the argmax over the vocabulary is saved then).
        """
        depths = self.active_depths
        gathered, decay = gather_entries(chains(supervised, depths)), self.decay[:depths]
        features = states[:, :-2, :-1].flatten(2)
        outputs = unroll(self.head, input_ids[:, 1:-1], features, gathered)
        normed = outputs if self.head.config.norm_output else self.head.norm(outputs)
        real = gathered.real
        reached = gathered.depths[real]  # [T, J]
        lm_heads, law = self.lm_heads(), self.law
        wanted = self.head.target_to_draft[gathered.take(best[:, 1:-1])[real].long()]  # -1 where it cannot be drafted
        if self.sampled is not None and torch.is_grad_enabled():
            drawn = self.sampled.draw(wanted)
            lm_heads, law = [lm_head.take(*drawn) for lm_head in lm_heads], law.take(*drawn)
        loss, by_depth, guess = soft_cross_entropy(
            normed[real],
            lm_heads,
            gathered.take(states[:, 1:-1, -1])[real],
            gathered.take(mass[:, 1:-1])[real],
            reached * decay,
            law,
        )
        correct = (guess == wanted[:, None]) & reached
        return {
            "loss": loss,
            "entries": real.sum(),
            "loss_by_depth": by_depth / decay,
            "correct": correct.sum(0),
            "tried": reached.sum(0),
        }


class EagleObjective(Objective):
    """EAGLE-1's loss: SmoothL1 to the target's next feature plus 0.1 of the soft cross entropy, at depth 0.

    Args:
        head: the head to train, bound to `ends`.
        ends: the target's embedding and LM head.
        noise: half-width of the uniform noise on the features, scaled by 512 / L as in the paper's code.
    """

    def __init__(self, head: EagleHead, ends: TargetEnds, noise: float = 0.1):
        super().__init__(head, depths=1, decay=1.0)
        self.noise = noise
        self.law = LogitRows.frozen(ends.lm_head, ends.rule)

    def forward(
        self, input_ids: Tensor, supervised: Tensor, states: Tensor, best: Tensor, mass: Tensor
    ) -> dict[str, Tensor]:
        """Return the loss of a batch, summed over entries; arguments and result as in `Eagle3Objective`."""
        gathered = gather_entries(chains(supervised, 1))
        final = states[:, :, -1]
        features = final[:, :-2]
        if self.training and self.noise:
            draw = torch.rand_like(features, dtype=torch.float32) - 0.5
            features = features + (2 * self.noise * 512 / features.shape[1] * draw).to(features.dtype)
        real = gathered.real
        output = unroll(self.head, input_ids[:, 1:-1], features, gathered)[:, :, 0][real]  # [T, H]
        wanted = gathered.take(final[:, 1:-1])[real]
        weights = output.new_ones(len(output), 1, dtype=torch.float32)
        law, by_depth, guess = soft_cross_entropy(
            output[:, None], self.lm_heads(), wanted, gathered.take(mass[:, 1:-1])[real], weights, self.law
        )
        feature = F.smooth_l1_loss(output.float(), wanted.float(), reduction="none").mean(-1).sum()
        correct = (guess[:, 0] == gathered.take(best[:, 1:-1])[real]).sum()[None]
        return {
            "loss": FEATURE_WEIGHT * feature + LAW_WEIGHT * law,
            "entries": real.sum(),
            "loss_by_depth": by_depth,
            "correct": correct,
            "tried": real.sum()[None],
        }
