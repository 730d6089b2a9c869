"""The head's side of one step: a tree fed level by level, its entries behind each row's prefix in the head's cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import hf
from ..cache import RaggedCache


class Sprout:
    """The head's side of one step: a tree under each row's root, fed level by level.

    Args:
        head: an EAGLE head.
        cache: the head's ragged cache, holding each row's prefix; levels are appended behind it.
        position: `[B]` RoPE position of the last prefix entry (c - 1).
        hidden: `[B, H]` the head's output there, from which depth 1 is predicted.
    """

    def __init__(self, head: Any, cache: RaggedCache, position: Tensor, hidden: Tensor) -> None:
        self.head, self.cache, self.position, self.hidden = head, cache, position, hidden
        self.prefix = cache.lengths
        self.fed = hidden.new_zeros(len(hidden), 0, 0, dtype=torch.bool)  # [B, M, M] ancestors-or-self of fed nodes

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the head's vocabulary, `[B, k, D]` in at least float32, from its output `[B, k, H]`."""
        logits: Tensor = self.head.logits(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def target_ids(self, ids: Tensor) -> Tensor:
        """Map ids of the head's vocabulary to the target's."""
        table = getattr(self.head, "draft_to_target", None)
        return ids if table is None else table[ids]

    def target_laws(self, laws: Tensor, size: int) -> Tensor:
        """Spread laws over the head's vocabulary, `[B, K, D]`, to the target's of `size` ids."""
        ids = self.target_ids(torch.arange(laws.shape[2], device=laws.device))
        return laws.new_zeros(*laws.shape[:2], size).index_copy_(2, ids, laws)

    def feed(self, tokens: Tensor, hidden: Tensor, parents: Tensor, depth: int) -> Tensor:
        """Feed one level of nodes.

        Args:
            tokens: `[B, k]` target ids of the nodes.
            hidden: `[B, k, H]` the head's output at their parents.
            parents: `[B, k]` which fed node is the parent, -1 for the root.
            depth: of the nodes, from 1.

        Returns:
            The head's output `[B, k, H]`.
        """
        batch, k = tokens.shape
        known = self.fed.shape[1]
        above = torch.zeros(batch, k, known, dtype=torch.bool, device=tokens.device)
        if known:
            taken = self.fed.gather(1, parents.clamp(min=0)[..., None].expand(-1, -1, known))
            above = taken & (parents >= 0)[..., None]
        itself = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(batch, k, k)
        rows = torch.cat([above, itself], dim=2)  # [B, k, M + k]
        positions = (self.position[:, None] + depth).expand(batch, k)
        width = self.cache.open(k)
        # One row's chain sees all that is cached; a lone node of a tree must not see its cousins.
        alone = batch == 1 and rows.shape[1:] == (1, depth)
        mask = None if alone else self._mask(rows, width, hidden.dtype)
        lent = hf.lend(self.cache, self.head.config.num_hidden_layers)
        out: Tensor = self.head(tokens, hidden, positions, attention_mask=mask, cache=lent)
        self.cache.advance(k)
        self.fed = torch.cat([torch.nn.functional.pad(self.fed, (0, k)), rows], dim=1)
        return out

    def _mask(self, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        node = torch.arange(width, device=rows.device)[None, :] - self.prefix[:, None]  # [B, W]
        inside = (node >= 0) & (node < rows.shape[2])
        index = node.clamp(0, rows.shape[2] - 1)[:, None, :].expand(-1, rows.shape[1], -1)
        allowed = (rows.gather(2, index) & inside[:, None, :]) | (node < 0)[:, None, :]
        zero = torch.zeros((), dtype=dtype, device=rows.device)
        return torch.where(allowed[:, None], zero, torch.finfo(dtype).min)
