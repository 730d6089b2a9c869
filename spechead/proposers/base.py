"""What every proposer shares, and the border at which a caller's own proposer is wrapped."""

from __future__ import annotations

from typing import Any

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
        self.taps = tuple(inner.taps)
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
        """
        proposal = self.inner.propose(context)
        if not isinstance(proposal, Proposal):
            raise TypeError(f"{self.name}.propose must return a spechead.Proposal; got {type(proposal).__name__}.")
        return proposal

    def select_rows(self, context: Context, index: Tensor) -> None:
        """Pass on, where the caller's object cares."""
        self._forward("select_rows", context, index)

    def add_rows(self, context: Context, other: Context) -> None:
        """Pass on, where the caller's object cares."""
        self._forward("add_rows", context, other)

    def _forward(self, method: str, *arguments: Any) -> None:
        if hasattr(self.inner, method):
            getattr(self.inner, method)(*arguments)
