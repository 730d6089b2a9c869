"""The two records of one step: what a proposer drafted, and what verification kept of it.

`Proposal` is made by a proposer, read by target.Target.forward and verify.verify; `Acceptance` is made by verify and
read by the cache, the statistics and the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .tree import ancestors, chain_parents


@dataclass(frozen=True)
class Proposal:
    """A draft tree for every row of a batch.

    Attributes:
        tokens: `[B, N]` token ids; node 0 is the root, the row's last kept token.
        parents: `[B, N]` index of each node's parent, smaller than its own; the root's is -1.
        real: `[B, N]` False for padding; a done row has no real node, a live row has at least its root.
        draft_probs: `[B, N, V]`, the law from which a node's token was drawn given its earlier siblings; None, or a
            one-hot row, says that the token is a point mass (chosen, not drawn).
        max_depth: depth of the deepest node, root 0; derived when not given (which costs a synchronisation on GPUs).
    """

    tokens: Tensor
    parents: Tensor
    real: Tensor
    draft_probs: Tensor | None = None
    max_depth: int = -1

    def __post_init__(self) -> None:
        given = (self.tokens, self.parents, self.real, *([] if self.draft_probs is None else [self.draft_probs]))
        if not all(torch.is_tensor(each) for each in given):
            raise TypeError(f"Proposal needs tensors; got {', '.join(type(each).__name__ for each in given)}.")
        alike = self.tokens.shape == self.parents.shape == self.real.shape
        if not alike or self.tokens.ndim != 2 or self.tokens.shape[1] == 0:
            raise ValueError(
                f"Proposal needs tokens, parents and real of one shape [B, N], N >= 1; got "
                f"{tuple(self.tokens.shape)}, {tuple(self.parents.shape)}, {tuple(self.real.shape)}."
            )
        probs = self.draft_probs
        if probs is not None and (probs.ndim != 3 or probs.shape[:2] != self.tokens.shape):
            raise ValueError(
                f"draft_probs must be [B, N, V] with [B, N] = {tuple(self.tokens.shape)}; got {tuple(probs.shape)}."
            )
        if self.max_depth < 0:
            if bool((self.parents >= self.tokens.shape[1]).any()):
                raise ValueError(
                    f"parents {self.parents.tolist()} name nodes beyond the {self.tokens.shape[1]} there are."
                )
            _, depths = ancestors(self.parents, self.tokens.shape[1] - 1)
            object.__setattr__(self, "max_depth", int(depths.max()) if depths.numel() else 0)

    @classmethod
    def chain(cls, root: Tensor, tokens: Tensor, real: Tensor, draft_probs: Tensor | None = None) -> Proposal:
        """Build a chain under each row's root; columns that no row uses are dropped.

        Args:
            root: `[B]` last kept token; -1 marks a done row.
            tokens: `[B, K]` drafted tokens, in order.
            real: `[B, K]` True for a prefix of each row's columns.
            draft_probs: `[B, K, V]` laws of the tokens, or None for point masses.
        """
        used = int(real.any(dim=0).sum()) if real.numel() else 0
        live = root >= 0
        tokens = torch.cat([root.clamp(min=0)[:, None], tokens[:, :used]], dim=1)
        real = torch.cat([live[:, None], real[:, :used] & live[:, None]], dim=1)
        probs = None
        if draft_probs is not None and used:
            probs = torch.nn.functional.pad(draft_probs[:, :used], (0, 0, 1, 0))
        chain = cls(tokens, chain_parents(len(root), used + 1, root.device), real, probs, used)
        nodes = torch.arange(used + 1, device=root.device)
        return chain._with_shape((nodes <= nodes[:, None]).expand(len(root), -1, -1), nodes.expand(len(root), -1))

    @classmethod
    def root_only(cls, root: Tensor) -> Proposal:
        """Build the proposal that drafts nothing: a plain decoding step. `root` is `[B]`, -1 for done rows."""
        live = (root >= 0)[:, None]
        alone = cls(root.clamp(min=0)[:, None], torch.full_like(root, -1)[:, None], live, None, 0)
        return alone._with_shape(torch.ones_like(live)[:, None], torch.zeros_like(alone.tokens))

    def cut(self, tokens: Tensor, real: Tensor, nodes: int, max_depth: int) -> Proposal:
        """Return this proposal's first `nodes` columns with other tokens and padding, its shape taken over."""
        probs = None if self.draft_probs is None or nodes == 1 else self.draft_probs[:, :nodes]
        kept = Proposal(tokens[:, :nodes], self.parents[:, :nodes], real[:, :nodes], probs, max_depth)
        return kept._with_shape(self.tree_mask[:, :nodes, :nodes], self.depths[:, :nodes])

    def _with_shape(self, tree_mask: Tensor, depths: Tensor) -> Proposal:
        self.__dict__["_shape"] = (tree_mask, depths)  # what the cached property would hold
        return self

    @cached_property
    def _shape(self) -> tuple[Tensor, Tensor]:
        return ancestors(self.parents, self.max_depth)

    @property
    def tree_mask(self) -> Tensor:
        """Ancestors-or-self, `[B, N, N]` bool."""
        return self._shape[0]

    @property
    def depths(self) -> Tensor:
        """Distance from the root, `[B, N]`."""
        return self._shape[1]

    @cached_property
    def is_chain(self) -> bool:
        """True when every real node's parent is the node before it, so that a causal mask is the tree's."""
        batch, nodes = self.parents.shape
        chain = chain_parents(batch, nodes, self.parents.device)
        return bool(((self.parents == chain) | ~self.real).all())

    @cached_property
    def point_mass(self) -> Tensor:
        """`[B, N]` True where the token was chosen rather than drawn from a law."""
        if self.draft_probs is None:
            return torch.ones_like(self.real)
        return self.draft_probs.gather(2, self.tokens[..., None]).squeeze(2) == 1


@dataclass(frozen=True)
class Acceptance:
    """What one verification kept.

    Attributes:
        path: `[B, D+1]` kept nodes, the root first, padded with -1; done rows are all -1.
        length: `[B]` emitted tokens = kept nodes; 0 for done rows.
        next_token: `[B]` the last emitted token: the bonus token, or the drafted token on which a row stopped. It is
            not in the cache yet and becomes the next root.
        kept: `[B]` emitted tokens that were drafted.
    """

    path: Tensor
    length: Tensor
    next_token: Tensor
    kept: Tensor
