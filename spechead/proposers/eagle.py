"""EAGLE: a draft layer over the target's own features, for EAGLE-1/2 and EAGLE-3 heads alike.

Entries of the head are pairs (f_i, token_{i+1}) at RoPE position i; entry c-1 predicts token c+1. After each step the
draft's entries are cut, and those of all newly cached tokens are computed from true features in one ragged forward.
Li et al. 2024, 2025.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import hf
from ..cache import RaggedCache
from ..config import DraftingConfig
from ..context import Context
from ..fresh import Fresh
from ..proposal import Proposal
from .base import BaseProposer
from .choices import EAGLE_25, Choices, likeliest, static_choices
from .growth import (
    BRANCHING,
    TREE_SIZE,
    dynamic_nodes,
    grow_chain,
    grow_dynamic,
    grow_static,
    within,
)
from .sprout import Sprout

DEPTH = 5  # where nothing else is asked for
CATCH_UP = 1024  # entries a forward: bounds the mask of a long prompt


@dataclass
class EagleState:
    """The head's cache and how many true entries each row has in it `[B]`."""

    cache: RaggedCache
    entries: Tensor


@dataclass
class CarriedEagle:
    """What travels with a cache to the next turn: whose it is, the entries, and the features not yet taken."""

    head: weakref.ref[Any]
    state: EagleState
    fresh: Fresh

    def __deepcopy__(self, memo: dict[int, Any]) -> CarriedEagle:
        """Copy for another continuation of the same cache by the same head."""
        return CarriedEagle(self.head, copy.deepcopy(self.state, memo), copy.deepcopy(self.fresh, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as nothing: another process has another head, and a reference to this one cannot be stored."""
        return type(None), ()


class EagleProposer(BaseProposer):
    """Draft with an EAGLE head.

    Args:
        head: an EagleHead or Eagle3Head bound to the target.
        num_draft_tokens: depth of the chain or tree; None takes that of a given tree, else 5.
        tree: "chain", "static" (EAGLE-1's published 25 nodes), "dynamic", or paths of ranks.
        tree_size: nodes kept of the tree, the root excluded; None keeps 24 of a dynamic and all of a static one.
        branching: children a node, and nodes expanded a level, of a dynamic tree.
        drafting: the head's own temperature, for sampled chains, and the confidence below which a chain or dynamic
            tree grows no deeper.

    Raises:
        ValueError: if a size is below 1, the tree is none, or a static tree is to stop early.
    """

    name = "eagle"

    def __init__(
        self,
        head: Any,
        num_draft_tokens: int | None = None,
        tree: str | Choices = "dynamic",
        tree_size: int | None = None,
        branching: int = BRANCHING,
        drafting: DraftingConfig | None = None,
    ) -> None:
        self.choices = static_choices(tree, {"chain": [], "static": EAGLE_25, "dynamic": []})
        if num_draft_tokens is None:
            num_draft_tokens = DEPTH if isinstance(tree, str) else max(map(len, self.choices))
        for field, value in (("num_draft_tokens", num_draft_tokens), ("branching", branching)):
            if value < 1:
                raise ValueError(f"{field}={value} drafts nothing; give at least 1.")
        self.choices = likeliest(self.choices, tree_size)
        self.head, self.num_draft_tokens, self.tree = head, num_draft_tokens, tree
        self.tree_size, self.branching = tree_size or TREE_SIZE, branching
        self.drafting = drafting or DraftingConfig()
        if self.drafting.temperature is not None and tree != "chain":
            raise ValueError(
                f"drafting.temperature={self.drafting.temperature} is for tree='chain', which is drawn; the nodes of "
                "other trees are the likeliest ones at any temperature."
            )
        self.threshold: float = self.drafting.confidence_threshold or 0.0
        if self.threshold and self.choices:
            raise ValueError(
                f"drafting.confidence_threshold={self.threshold} stops chains and dynamic trees; a static tree is "
                "drafted whole. Leave it out, or give another tree."
            )
        self.taps = head.taps
        self.trained_positions: int = head.config.trained_positions or 1 << 30

    def start(self, context: Context) -> None:
        """Allocate the head's cache, unless a continued cache brought one."""
        if id(self) not in context.state:
            cache = RaggedCache(context.batch, context.cache.capacity, self.head.device)
            context.state[id(self)] = EagleState(cache, torch.zeros_like(cache.lengths))

    def propose(self, context: Context) -> Proposal:
        """Catch up on the tokens kept since the last time, then grow a chain or tree a row."""
        depth = torch.minimum(context.room(), (self.trained_positions - context.cached).clamp(min=0))
        deepest = min(int(depth.max()), self.num_draft_tokens)
        if deepest < 1:
            return Proposal.root_only(context.root)
        sprout, root = self._catch_up(context), context.root.to(self.head.device)
        if self.tree == "chain":
            proposal = grow_chain(sprout, context, deepest, self.drafting.temperature, depth, self.threshold)
        elif self.tree == "dynamic":
            proposal = grow_dynamic(sprout, root, deepest, self.branching, self.tree_size, self.threshold)
        else:
            proposal = grow_static(sprout, root, [path for path in self.choices if len(path) <= deepest])
        return within(proposal, depth)

    @property
    def weights(self) -> int:
        """Parameters of the head."""
        return int(self.head.num_parameters())

    def backlog(self, context: Context) -> int:
        """Return how many features wait to be taken."""
        return context.fresh[id(self)].waiting

    def nodes(self, depth: int) -> int:
        """Return how many nodes a row drafts to a depth."""
        if self.tree == "chain":
            return depth
        if self.tree == "dynamic":
            return dynamic_nodes(depth, self.branching, self.tree_size)
        return sum(len(path) <= depth for path in self.choices)

    def select_rows(self, context: Context, index: Tensor) -> None:
        """Keep the head's entries of rows `index [B']`."""
        state: EagleState = context.state[id(self)]
        index = index.to(state.entries.device)
        state.cache.select_rows(index)
        state.entries = state.entries[index]

    def add_rows(self, context: Context, other: Context) -> None:
        """Append the head's entries of the other rows; their prompts are fed before, while only they are that long."""
        self._feed_but_last(other)
        mine, theirs = context.state[id(self)], other.state[id(self)]
        mine.cache.add_rows(theirs.cache)
        mine.entries = torch.cat([mine.entries, theirs.entries])

    def carry(self, context: Context) -> Any:
        """Return the head's entries and the features not yet taken, to travel with the cache this call returns."""
        return CarriedEagle(weakref.ref(self.head), context.state[id(self)], context.fresh[id(self)])

    def resume(self, context: Context, carried: Any) -> None:
        """Take up what an earlier call of the same head carried for the very tokens that are cached now."""
        if isinstance(carried, CarriedEagle) and carried.head() is self.head:
            if carried.state.entries.is_inference() and not torch.is_inference_mode_enabled():
                carried = copy.deepcopy(carried)  # tensors of torch.inference_mode cannot be written to outside it
            carried.state.cache.recheck()
            context.state[id(self)], context.fresh[id(self)] = carried.state, carried.fresh

    def _catch_up(self, context: Context) -> Sprout:
        """Compute the entries of all newly cached tokens; returns the sprout at each row's last entry."""
        features, count = context.fresh[id(self)].take()
        first = context.cached - count  # position of each row's first new entry
        last = self._feed(context, features, count, first)
        position = (first + count - 1).to(self.head.device)
        return Sprout(self.head, context.state[id(self)].cache, position, last)

    def _feed_but_last(self, context: Context) -> None:
        """Compute the entries of all newly cached tokens but each row's last, from which the next draft starts."""
        fresh = context.fresh[id(self)]
        features, count = fresh.take()
        last = (count - 1).clamp(min=0)
        if int(last.max()) > 0:
            self._feed(context, features, last, context.cached - count)
            for tap, state in features.items():
                place = last.to(state.device)[:, None, None].expand(-1, 1, state.shape[2])
                features[tap] = state.gather(1, place)
            count = count.clamp(max=1)
        fresh.append(features, count)

    def _feed(self, context: Context, features: dict[int, Tensor], count: Tensor, first: Tensor) -> Tensor:
        """Compute entries from features `{tap: [B, A, H]}`, of which `count [B]` count, from positions `first [B]`.

        Returns:
            The head's output at each row's last new entry `[B, H]`, zeros in rows without one.
        """
        state: EagleState = context.state[id(self)]
        device = self.head.device
        states = torch.cat([features[tap].to(device) for tap in self.taps], dim=-1)  # [B, A, taps * H]
        count, first = count.to(device), first.to(device)
        state.cache.truncate(state.entries)
        hidden = self.head.fuse(states)
        order = torch.arange(hidden.shape[1], device=device)[None, :]
        tokens = context.tokens_at((first[:, None] + 1 + order).to(context.ids.device)).to(device)
        last = hidden.new_zeros(len(hidden), hidden.shape[-1])
        for begin in range(0, hidden.shape[1], CATCH_UP):
            span = slice(begin, begin + CATCH_UP)
            here = (count - begin).clamp(0, CATCH_UP)  # [B] entries of this span that count
            positions = first[:, None] + order[:, span]
            out = self._entries(state.cache, tokens[:, span], hidden[:, span], positions, here)
            ends = (here > 0) & (count <= begin + CATCH_UP)
            at = out[torch.arange(len(out), device=device), (here - 1).clamp(min=0)]
            last = torch.where(ends[:, None], at, last)
        state.entries = state.cache.lengths
        return last

    def _entries(self, cache: RaggedCache, tokens: Tensor, hidden: Tensor, positions: Tensor, count: Tensor) -> Tensor:
        batch, nodes = tokens.shape
        width = cache.open(nodes)
        mask = None
        if batch > 1:
            slots = torch.arange(width, device=tokens.device)
            reach = cache.lengths[:, None] + torch.arange(nodes, device=tokens.device)  # [B, A] last slot to see
            zero = torch.zeros((), dtype=hidden.dtype, device=tokens.device)
            allowed = (slots <= reach[..., None])[:, None]
            mask = torch.where(allowed, zero, torch.finfo(hidden.dtype).min)
        lent = hf.lend(cache, self.head.config.num_hidden_layers)
        out: Tensor = self.head(tokens, hidden, positions.clamp(min=0), attention_mask=mask, cache=lent)
        cache.advance(count)
        return out
