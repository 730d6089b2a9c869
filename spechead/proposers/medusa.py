"""Medusa: heads on the target's last state each guess one further token; their guesses form a static or dynamic tree.

Head i, from 0, read at position c-1 (the last cached one), proposes the token at c+1+i. Children are point masses, so
the exact rule holds at any temperature. Cai et al. 2024; dynamic trees after Li et al. 2024 (EAGLE-2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..context import Context
from ..proposal import Proposal
from ..tree import choices_to_parents
from .base import BaseProposer
from .choices import MEDUSA_63, Choices, likeliest, static_choices
from .growth import BRANCHING, TREE_SIZE, dynamic_nodes, grow_product, tree_proposal, within


class MedusaProposer(BaseProposer):
    """Draft with Medusa heads.

    Args:
        heads: MedusaHeads bound to the target.
        num_draft_tokens: depth; at most the number of heads, which is the default.
        tree: "chain", "static" (Medusa's published 63 nodes), "dynamic" (every step the likeliest nodes by the product
            of the heads' own probabilities), or paths of ranks.
        tree_size: nodes kept of the tree, the root excluded; None keeps 24 of a dynamic one, and all of any other,
            which it cuts to those of the best ranks.
        branching: children a node, and nodes expanded a level, of a dynamic tree.

    Raises:
        ValueError: if a size is below 1, the tree is none, or it is deeper than there are heads.
    """

    name = "medusa"

    def __init__(
        self,
        heads: Any,
        num_draft_tokens: int | None = None,
        tree: str | Choices = "static",
        tree_size: int | None = None,
        branching: int = BRANCHING,
    ) -> None:
        depth = heads.config.num_heads if num_draft_tokens is None else num_draft_tokens
        if not 1 <= depth <= heads.config.num_heads:
            raise ValueError(f"num_draft_tokens={depth} must lie in 1..{heads.config.num_heads}, the number of heads.")
        chain: Choices = [(0,) * d for d in range(1, heads.config.num_heads + 1)]
        choices = static_choices(tree, {"chain": chain, "static": MEDUSA_63, "dynamic": []})
        if branching < 1:
            raise ValueError(f"branching={branching} drafts nothing; give at least 1.")
        if not isinstance(tree, str) and len(choices[-1]) > heads.config.num_heads:
            raise ValueError(f"tree={tree!r} is deeper than there are heads ({heads.config.num_heads}).")
        self.heads, self.num_draft_tokens = heads, depth
        self.choices = likeliest([path for path in choices if len(path) <= depth], tree_size)
        self.dynamic, self.tree_size, self.branching = tree == "dynamic", tree_size or TREE_SIZE, branching
        self.taps = heads.taps
        self.trained_positions: int = heads.config.trained_positions or 1 << 30

    def start(self, context: Context) -> None:
        """Remember each row's last state."""
        self._last_state(context)

    def propose(self, context: Context) -> Proposal:
        """Return the tree filled with each head's likeliest tokens, for every row."""
        hidden = self._last_state(context)  # [B, H]
        depth = torch.minimum(context.room(), (self.trained_positions - context.cached).clamp(min=0))
        deepest = min(int(depth.max()), self.num_draft_tokens)
        if deepest < 1:
            return Proposal.root_only(context.root)
        logits = self.heads(hidden)  # [K, B, V]
        if self.dynamic:
            proposal = grow_product(context.root, logits[:deepest], self.branching, self.tree_size)
        else:
            proposal = self._filled(context.root, logits, deepest)
        return within(proposal, depth)

    def _filled(self, root: Tensor, logits: Tensor, deepest: int) -> Proposal:
        """Fill the static tree, to a depth, from the heads' logits `[K, B, V]`."""
        device = root.device
        parents, depths, ranks = choices_to_parents(self._within(deepest))
        best = logits.topk(min(max(ranks) + 1, logits.shape[-1]), dim=-1).indices.to(device)  # [K, B, R]
        head = torch.tensor(depths, device=device).sub(1).clamp(min=0)
        rank = torch.tensor(ranks, device=device).clamp(max=best.shape[-1] - 1)
        tokens = best[head, :, rank].T.contiguous()  # [B, N]
        above = torch.tensor([parents], device=device).expand(len(tokens), -1)
        return tree_proposal(root, tokens, above, deepest)

    @property
    def weights(self) -> int:
        """Parameters of the heads."""
        return int(self.heads.num_parameters())

    def nodes(self, depth: int) -> int:
        """Return how many nodes a row drafts to a depth."""
        if self.dynamic:
            return dynamic_nodes(depth, self.branching, self.tree_size)
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
