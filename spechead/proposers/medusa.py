"""Medusa: heads on the target's last state each guess one further token; their guesses form a static tree.

Head i, from 0, read at position c-1 (the last cached one), proposes the token at c+1+i. Children are point masses, so
the exact rule holds at any temperature. Cai et al. 2024.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..context import Context
from ..proposal import Proposal
from ..tree import choices_to_parents
from .base import BaseProposer
from .choices import MEDUSA_63, Choices
from .growth import tree_proposal


class MedusaProposer(BaseProposer):
    """Draft with Medusa heads.

    Args:
        heads: MedusaHeads bound to the target.
        num_draft_tokens: depth; at most the number of heads, which is the default.
        tree: "chain", "static" (Medusa's published 63 nodes), or paths of ranks.
        tree_size: keep only this many nodes of the tree, the root excluded; None keeps all.

    Raises:
        ValueError: if a size is below 1 or the tree is deeper than there are heads.
    """

    name = "medusa"

    def __init__(
        self,
        heads: Any,
        num_draft_tokens: int | None = None,
        tree: str | Choices = "static",
        tree_size: int | None = None,
    ) -> None:
        depth = heads.config.num_heads if num_draft_tokens is None else num_draft_tokens
        if not 1 <= depth <= heads.config.num_heads:
            raise ValueError(f"num_draft_tokens={depth} must lie in 1..{heads.config.num_heads}, the number of heads.")
        if tree == "dynamic":
            raise ValueError("tree='dynamic' is EAGLE's; Medusa heads take 'chain', 'static' or paths of ranks.")
        choices: Choices = [(0,) * d for d in range(1, depth + 1)] if tree == "chain" else MEDUSA_63
        if not isinstance(tree, str):
            choices = [tuple(path) for path in tree]
            if max(map(len, choices), default=0) > heads.config.num_heads:
                raise ValueError(f"tree={tree!r} is deeper than there are heads ({heads.config.num_heads}).")
        self.heads, self.num_draft_tokens = heads, depth
        self.choices = [path for path in choices if len(path) <= depth][: tree_size or None]
        self.taps = heads.taps
        self.trained_positions: int = heads.config.trained_positions or 1 << 30

    def start(self, context: Context) -> None:
        """Remember each row's last state."""
        self._last_state(context)

    def propose(self, context: Context) -> Proposal:
        """Return the static tree filled with each head's likeliest tokens, for every row."""
        hidden = self._last_state(context)  # [B, H]
        depth = torch.minimum(context.room(), (self.trained_positions - context.cached).clamp(min=0))
        if int(depth.max()) < 1:
            return Proposal.root_only(context.root)
        device = context.root.device
        parents, depths, ranks = choices_to_parents(self._within(self.num_draft_tokens))
        best = self.heads(hidden).topk(max(ranks) + 1, dim=-1).indices.to(device)  # [K, B, R]
        head = torch.tensor(depths, device=device).sub(1).clamp(min=0)
        tokens = best[head, :, torch.tensor(ranks, device=device)].T.contiguous()  # [B, N]
        above = torch.tensor([parents], device=device).expand(len(tokens), -1)
        return tree_proposal(context.root, tokens, above, max(depths))

    def nodes(self, depth: int) -> int:
        """Return how many nodes a row drafts to a depth."""
        return len(self._within(depth))

    def _within(self, depth: int) -> Choices:
        return [path for path in self.choices if len(path) <= depth]

    def select_rows(self, context: Context, index: Tensor) -> None:
        """Keep the states of rows `index [B']`."""
        state = context.state[id(self)]
        context.state[id(self)] = state[index.to(state.device)]

    def add_rows(self, context: Context, other: Context) -> None:
        """Append the states of the other rows."""
        context.state[id(self)] = torch.cat([context.state[id(self)], other.state[id(self)]])

    def _last_state(self, context: Context) -> Tensor:
        """Take the fresh features; rows that kept nothing (done rows) keep their old state."""
        fresh = context.fresh[id(self)]
        if fresh.empty:
            return context.state[id(self)]
        features, count = fresh.take()
        states = features[self.taps[0]]
        last = (count - 1).clamp(min=0).to(states.device)
        now = states[torch.arange(len(states), device=states.device), last]
        old = context.state.get(id(self), now)
        context.state[id(self)] = torch.where((count > 0).to(states.device)[:, None], now, old)
        return context.state[id(self)]
