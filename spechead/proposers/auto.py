"""auto: draft whatever is expected to pay on this load now, and decode plainly when nothing does.

Every step it compares plans by expected tokens per second: a plain step, the copy that prompt lookup found, the head's
or draft model's draft at several depths, and both in one tree. Costs are measured by node count, acceptance is tracked
by depth and, for lookup, by the length of the matching n-gram. Exact like every proposer: the choice looks at earlier
steps only, never at tokens just drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..context import Context
from ..proposal import Proposal
from .base import BaseProposer
from .costs import Clock, Survival
from .merge import merge
from .prompt_lookup import PromptLookupProposer

PROBE_FIRST, PROBE_EVERY = 8, 40  # steps until a losing plan is tried again: doubling from the first to the last
REFRESH_PLAIN = 48  # a winning plan makes room for a plain step this often, so that its cost stays known
MARGIN = 1.03  # a plan must promise this much over a plain step


@dataclass(frozen=True)
class Plan:
    """One way to draft a step: copy up to `copied` tokens, draft `depth` levels, or both; neither is a plain step."""

    copied: int = 0
    depth: int = 0

    @property
    def name(self) -> str:
        """What stats call it."""
        return "plain" if self == Plan() else "+".join(["lookup"] * (self.copied > 0) + ["draft"] * (self.depth > 0))


class Ledger:
    """What a call has learnt; pass one to several calls (`AutoProposer(ledger=...)`) to keep it.

    Args:
        step_seconds: the target's cost by total node count, given instead of measured (for tests and replays).
        draft_seconds: the drafting cost by depth, likewise.
    """

    def __init__(
        self,
        step_seconds: Callable[[int], float] | None = None,
        draft_seconds: Callable[[int], float] | None = None,
    ) -> None:
        self.given_step, self.given_draft = step_seconds, draft_seconds
        self.step_clock, self.draft_clock = Clock(), Clock(slope=0.5)
        self.copies = [Survival(prior) for prior in (0.0, 0.35, 0.55, 0.75)]  # by n-gram length, 3 and more together
        self.drafts = Survival(0.6)

    def step_cost(self, nodes: int) -> float:
        """Cost of a target forward over `nodes` nodes in all rows."""
        return self.given_step(nodes) if self.given_step else self.step_clock.seconds(nodes)

    def draft_cost(self, depth: int) -> float:
        """Cost of drafting `depth` levels."""
        if depth == 0:
            return 0.0
        return self.given_draft(depth) if self.given_draft else self.draft_clock.seconds(depth)

    def copy_of(self, size: int) -> Survival:
        """Survival of copies whose n-gram was so long."""
        return self.copies[min(size, len(self.copies) - 1)]


@dataclass
class _Pending:
    """The step in flight: what was planned, when it left, and what each row tried."""

    plan: Plan
    nodes: int
    left: float
    cached: Tensor
    match: list[int]
    copied: list[int]
    drafted: list[int]
    live: list[bool]


class AutoProposer(BaseProposer):
    """Choose among prompt lookup, a head or draft model, both, and plain steps.

    Args:
        lookup: prompt lookup.
        drafter: the trained proposer or draft model; None leaves lookup alone.
        ledger: figures to start from; a fresh one by default, so that nothing outlives the call.
    """

    name = "auto"

    def __init__(self, lookup: PromptLookupProposer, drafter: Any = None, ledger: Ledger | None = None) -> None:
        self.lookup, self.drafter = lookup, drafter
        self.ledger = ledger or Ledger()
        self.parts = [part for part in (lookup, drafter) if part is not None]
        self.taps = drafter.taps if drafter is not None else ()
        self.notes = drafter.notes if drafter is not None else ()
        self.deepest: int = drafter.num_draft_tokens if drafter is not None else 0
        self.copy_lengths = sorted({max(lookup.num_draft_tokens // 2, 1), lookup.num_draft_tokens})
        self._pending: _Pending | None = None
        self._steps, self._idle, self._wait, self._since_plain = 0, 0, PROBE_FIRST, 0

    def start(self, context: Context) -> None:
        """Prepare both ways of drafting."""
        for part in self.parts:
            part.start(context)

    def propose(self, context: Context) -> Proposal:
        """Learn from the last step, choose a plan, draft it."""
        entered = perf_counter()
        self._learn(context, entered)
        self._steps += 1
        found = self.lookup.find(context, max(self.copy_lengths))
        plan = self._choose(context, [size if draft else 0 for draft, size in found])
        began = perf_counter()
        proposal, copied, drafted = self._draft(context, plan, found)
        context.stats.plans[plan.name] = context.stats.plans.get(plan.name, 0) + 1
        left = perf_counter()
        if plan.depth and self.ledger.drafts.trials:  # a call's first draft also feeds the head its whole prompt
            self.ledger.draft_clock.add(plan.depth, left - began)
        live = [not row.stopped for row in context.rows]
        sizes = [size for _, size in found]
        nodes, cached = proposal.tokens.numel(), context.cached.clone()
        self._pending = _Pending(plan, nodes, left, cached, sizes, copied, drafted, live)
        return proposal

    def select_rows(self, context: Context, index: Tensor) -> None:
        """Keep rows `index [B']` of both."""
        for part in self.parts:
            part.select_rows(context, index)
        self._pending = None

    def add_rows(self, context: Context, other: Context) -> None:
        """Append the other rows to both."""
        for part in self.parts:
            part.add_rows(context, other)
        self._pending = None

    def carry(self, context: Context) -> Any:
        """Return what the drafter carries."""
        return self.drafter.carry(context) if self.drafter is not None else None

    def resume(self, context: Context, carried: Any) -> None:
        """Hand the drafter what it carried."""
        if self.drafter is not None:
            self.drafter.resume(context, carried)

    def _learn(self, context: Context, now: float) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self.ledger.step_clock.add(pending.nodes, now - pending.left)
        gained = (context.cached - pending.cached).tolist()
        for row, live in enumerate(pending.live):
            if not live or gained[row] < 1:
                continue
            kept = gained[row] - 1
            if pending.copied[row]:
                self.ledger.copy_of(pending.match[row]).add(pending.copied[row], min(kept, pending.copied[row]))
            if pending.drafted[row]:
                self.ledger.drafts.add(pending.drafted[row], min(kept, pending.drafted[row]))

    def _choose(self, context: Context, sizes: list[int]) -> Plan:
        """Pick the plan of the highest expected tokens per second; sizes are each row's n-gram match, 0 for none."""
        live = [not row.stopped for row in context.rows]
        rooms = context.room().tolist()
        plain = self.ledger.step_cost(len(live))
        if plain == 0.0:
            return Plan()
        plans = {plan: self._rate(plan, sizes, rooms, live) for plan in self._plans(sizes, max(rooms))}
        if not plans:
            return Plan()
        best = max(plans, key=lambda plan: plans[plan])
        rate = sum(live) / plain
        if plans[best] >= MARGIN * rate:
            self._idle, self._wait = 0, PROBE_FIRST
            self._since_plain += 1
            if self._since_plain >= REFRESH_PLAIN:
                self._since_plain = 0
                return Plan()
            return best
        self._idle += 1
        self._since_plain = 0
        if self._idle >= self._wait:
            self._idle, self._wait = 0, min(self._wait * 2, PROBE_EVERY)
            return best
        return Plan()

    def _plans(self, sizes: list[int], room: int) -> list[Plan]:
        copies = [0, *(length for length in self.copy_lengths if any(sizes))]
        depths = [0] if self.drafter is None else [0, *range(1, min(self.deepest, max(room, 1)) + 1)]
        plans = [Plan(copied, depth) for copied in copies for depth in depths if copied or depth]
        return plans if room > 0 else []

    def _rate(self, plan: Plan, sizes: list[int], rooms: list[int], live: list[bool]) -> float:
        """Expected emitted tokens of all live rows per second under a plan."""
        tokens, widest = 0.0, 1
        draft = self.ledger.drafts.curve(plan.depth)
        for size, room, alive in zip(sizes, rooms, live, strict=True):
            if not alive:
                continue
            copy = self.ledger.copy_of(size).curve(plan.copied) if size and plan.copied else []
            copy, mine = copy[:room], draft[:room]
            depth = max(len(copy), len(mine))
            both = [(_at(copy, d), _at(mine, d)) for d in range(depth)]
            tokens += 1 + sum(max(a, b) + 0.5 * min(a, b) * (1 - max(a, b)) for a, b in both)
            widest = max(widest, 1 + len(copy) + self._nodes(plan.depth) * (len(mine) > 0))
        cost = self.ledger.step_cost(widest * len(live)) + self.ledger.draft_cost(plan.depth)
        return tokens / cost if cost > 0 else 0.0

    def _nodes(self, depth: int) -> int:
        """Nodes that the drafter feeds the target at a depth."""
        if self.drafter is None or depth == 0:
            return 0
        return int(self.drafter.nodes(depth))

    def _draft(
        self, context: Context, plan: Plan, found: list[tuple[list[int], int]]
    ) -> tuple[Proposal, list[int], list[int]]:
        """Draft a plan; returns the proposal and how deep each row's copy and draft go."""
        copied = [min(len(draft), plan.copied) for draft, _ in found]
        copy = self.lookup.chains(context, [draft[:count] for (draft, _), count in zip(found, copied, strict=True)])
        nothing = [0] * context.batch
        if plan.depth == 0:
            return copy, copied, nothing
        self.drafter.num_draft_tokens = plan.depth
        draft = context.clip(self.drafter.propose(context))
        reach = (draft.depths * draft.real).max(1).values.tolist()
        if not any(copied):
            return draft, nothing, reach
        return merge(draft, copy), copied, reach


def _at(curve: list[float], depth: int) -> float:
    return curve[depth] if depth < len(curve) else 0.0
