"""What every proposer shares, and the border at which a caller's own proposer is wrapped."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from ..context import Context
from ..proposal import Proposal


class BaseProposer:
    """A proposer without state of its own: needs no taps, and nothing when rows join or leave."""

    taps: tuple[int, ...] = ()
    name = "custom"
    notes: tuple[str, ...] | list[str] = ()

    def start(self, context: Context) -> None:
        """Nothing to prepare."""

    def propose(self, context: Context) -> Proposal:
        """Draft nothing: a plain step."""
        return Proposal.root_only(context.root)

    @property
    def weights(self) -> int:
        """Parameters read to draft a level; 0 where nothing is."""
        return 0

    def backlog(self, context: Context) -> int:
        """Return how many cached tokens, of all rows, it has to feed itself before it can draft."""
        return 0

    def nodes(self, depth: int) -> int:
        """Return how many nodes a row drafts to a depth; a chain has one a level."""
        return depth

    def select_rows(self, context: Context, index: Tensor) -> None:
        """Nothing to select."""

    def add_rows(self, context: Context, other: Context) -> None:
        """Nothing to append."""

    def carry(self, context: Context) -> Any:
        """Return what the next turn of the same conversation needs, or None."""
        return None

    def resume(self, context: Context, carried: Any) -> None:
        """Take up what `carry` returned for the very tokens that are cached now."""


class WrappedProposer(BaseProposer):
    """A caller's object with `taps` and `propose(context)`; what else it has is used, what it lacks does nothing.

    Raises:
        TypeError: if `taps` or `propose` is missing.
    """

    def __init__(self, inner: Any) -> None:
        if not hasattr(inner, "taps") or not callable(getattr(inner, "propose", None)):
            raise TypeError(
                f"speculative={inner!r} is neither a method's name, a SpeculativeConfig, nor a proposer; "
                "a proposer has `taps` (a tuple of hidden-state indices) and `propose(context)`."
            )
        self.inner = inner
        try:
            self.taps = tuple(operator.index(tap) for tap in inner.taps)
        except TypeError:
            raise TypeError(
                f"{inner!r} has taps={inner.taps!r}; give a tuple of hidden-state indices, () for none."
            ) from None
        self.name = getattr(inner, "name", type(inner).__name__)

    def start(self, context: Context) -> None:
        """Let the caller's object prepare, handing it the features of its taps as `context.fresh[id(inner)]`."""
        if self.taps:
            context.fresh[id(self.inner)] = context.fresh.pop(id(self))
        self._forward("start", context)

    def propose(self, context: Context) -> Proposal:
        """Draft with the caller's object.

        Raises:
            TypeError: if it returns something else than a Proposal.
            ValueError: if a node does not come after its parent, or a token cannot have been drawn from its law.
        """
        proposal = self.inner.propose(context)
        if not isinstance(proposal, Proposal):
            raise TypeError(f"{self.name}.propose must return a spechead.Proposal; got {type(proposal).__name__}.")
        self._check_types(proposal)
        self._check_tree(proposal)
        if proposal.draft_probs is not None:
            self._check_laws(proposal, proposal.draft_probs, context.target.vocab_size)
        return proposal

    def _check_types(self, proposal: Proposal) -> None:
        integers = (torch.int32, torch.int64)
        kinds = tuple(tensor.dtype for tensor in (proposal.tokens, proposal.parents, proposal.real))
        if kinds[0] not in integers or kinds[1] not in integers or kinds[2] != torch.bool:
            raise ValueError(
                f"{self.name} proposed tokens, parents and real of {', '.join(map(str, kinds))}; tokens and parents "
                "are integers, real is bool."
            )

    def _check_tree(self, proposal: Proposal) -> None:
        nodes = torch.arange(proposal.parents.shape[1], device=proposal.parents.device)
        first = (nodes == 0) & (proposal.parents == -1)
        if not bool((first | (nodes > 0) & (proposal.parents >= 0) & (proposal.parents < nodes)).all()):
            raise ValueError(
                f"{self.name} proposed parents {proposal.parents.tolist()}; node 0 is the root, with parent -1, and "
                "every other node comes after its parent."
            )

    def _check_laws(self, proposal: Proposal, laws: Tensor, vocab_size: int) -> None:
        if laws.shape[2] != vocab_size:
            raise ValueError(
                f"{self.name} gave draft_probs over {laws.shape[2]} tokens; they are laws over the target's "
                f"{vocab_size}, 0 where the draft knows no token."
            )
        real = proposal.real[:, 1:]
        chance = laws[:, 1:].gather(2, proposal.tokens[:, 1:, None].clamp(0, vocab_size - 1)).squeeze(2)
        if not bool((chance[real] > 0).all()):
            raise ValueError(
                f"{self.name} proposed tokens that its own draft_probs give no chance (or nan); draft_probs[b, n] is "
                "the law that tokens[b, n] was drawn from, or one-hot at a token that was chosen."
            )
        low = torch.finfo(laws.dtype).eps if laws.is_floating_point() else 0.0
        mass = laws[:, 1:][real].double()  # [R, V]
        if bool((mass < 0).any()) or not bool(((mass.sum(-1) - 1).abs() <= max(1e-3, 8 * low)).all()):
            raise ValueError(
                f"{self.name} gave draft_probs that are no laws: each is 0 or more and sums to 1; these sum to "
                f"{[round(float(total), 4) for total in mass.sum(-1)][:8]}. Kept drafts would follow another law."
            )

    def select_rows(self, context: Context, index: Tensor) -> None:
        """Pass on, where the caller's object cares."""
        self._forward("select_rows", context, index)

    def add_rows(self, context: Context, other: Context) -> None:
        """Pass on, where the caller's object cares."""
        self._forward("add_rows", context, other)

    def _forward(self, method: str, *arguments: Any) -> None:
        if hasattr(self.inner, method):
            getattr(self.inner, method)(*arguments)
