"""auto: draft whatever is expected to pay on this load now, and decode plainly when nothing does.

Every step it compares plans by expected tokens per second: a plain step, the copy that prompt lookup found, the head's
or draft model's draft at several depths, and both in one tree. Costs are measured by node count, acceptance is tracked
by depth and, for lookup, by the length of the matching n-gram; a copy that was found and not drafted is compared with
what was emitted. A call whose drafts keep costing more than they give rests, and tries again at a low rate. Exact like
every proposer: the choice looks at earlier steps only, never at tokens just drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from ..context import Context
from ..proposal import Proposal
from .base import BaseProposer
from .costs import Clock, Survival
from .merge import merge
from .prompt_lookup import PromptLookupProposer

PROBE_FIRST, PROBE_EVERY = 10, 40  # steps until a losing plan is tried again: doubling from the first to the last
LOSSES = 3  # drafted steps in a row that cost more than they gave, after which a call rests
LIKELY = 0.5  # chance of a copy from which a rest ends
LEAST_CREDIT, MOST_CREDIT = -1.0, 2.0  # plain steps gained or lost by drafting; the past counts no more than this
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
        self.node_clock = Clock(slope=0.5)  # nodes a row drafted, by depth: a draft may stop short of its plan
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
    copies: list[list[int]]
    copied: list[int]
    drafted: list[int]
    live: list[bool]


class AutoProposer(BaseProposer):
    """Choose among prompt lookup, a head or draft model, both, and plain steps.

    Args:
        lookup: prompt lookup.
        draft: the trained proposer or draft model; None leaves lookup alone.
        ledger: figures to start from; a fresh one by default, so that nothing outlives the call.
    """

    name = "auto"

    def __init__(self, lookup: PromptLookupProposer, draft: Any = None, ledger: Ledger | None = None) -> None:
        self.lookup, self.draft = lookup, draft
        self.ledger = ledger or Ledger()
        self.parts = [part for part in (lookup, draft) if part is not None]
        self.taps = draft.taps if draft is not None else ()
        self.notes = draft.notes if draft is not None else ()
        self.deepest: int = draft.num_draft_tokens if draft is not None else 0
        self.copy_lengths = sorted({max(lookup.num_draft_tokens // 2, 1), lookup.num_draft_tokens})
        self._pending: _Pending | None = None
        self._idle, self._wait, self._since_plain = 0, PROBE_FIRST, 0
        self._losses, self._credit, self._resting = 0, 0.0, False

    def start(self, context: Context) -> None:
        """Prepare both ways of drafting."""
        self._pending = None  # of an earlier call, or of rows that these are about to join
        for part in self.parts:
            part.start(context)

    def propose(self, context: Context) -> Proposal:
        """Learn from the last step, choose a plan, draft it."""
        entered = perf_counter()
        self._learn(context, entered)
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
        copies = [copy for copy, _ in found]
        self._pending = _Pending(plan, nodes, left, cached, sizes, copies, copied, drafted, live)
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
        """Return what the draft carries."""
        return self.draft.carry(context) if self.draft is not None else None

    def resume(self, context: Context, carried: Any) -> None:
        """Hand the draft what it carried."""
        if self.draft is not None:
            self.draft.resume(context, carried)

    def _learn(self, context: Context, now: float) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self.ledger.step_clock.add(pending.nodes, now - pending.left)
        self._settle(context, pending)
        gained = (context.cached - pending.cached).tolist()
        for row, live in enumerate(pending.live):
            if not live or gained[row] < 1:
                continue
            kept = gained[row] - 1
            if pending.copied[row]:
                self.ledger.copy_of(pending.match[row]).add(pending.copied[row], min(kept, pending.copied[row]))
            elif pending.copies[row]:
                self._look_back(context, pending, row, gained[row])
            if pending.drafted[row]:
                self.ledger.drafts.add(pending.drafted[row], min(kept, pending.drafted[row]))

    def _look_back(self, context: Context, pending: _Pending, row: int, emitted: int) -> None:
        """Learn from a copy that was found and not drafted: what was emitted says for nothing whether it was right."""
        start = int(pending.cached[row] + context.pads[row]) + 1
        copy = pending.copies[row][:emitted]
        tokens = context.ids[row, start : start + len(copy)].tolist()
        right = next((place for place, token in enumerate(tokens) if token != copy[place]), len(copy))
        survival = self.ledger.copy_of(pending.match[row])
        survival.add(len(copy), right)
        if right and self._resting and survival.curve(1)[0] >= LIKELY:
            self._resting, self._losses = False, LOSSES - 1

    def _settle(self, context: Context, pending: _Pending) -> None:
        """Count whether a drafted step gave more than it cost; a call that keeps losing rests.

        Estimates start from a prior and change by one trial a step. Where drafting costs little they would go on for
        long; what counts here is what was really gained, in plain steps.
        """
        rows = sum(pending.live)
        plain = self.ledger.step_cost(rows)
        if pending.plan == Plan() or plain == 0.0:
            return
        emitted = int((context.cached - pending.cached).sum())
        spent = self.ledger.step_cost(pending.nodes) + self.ledger.draft_cost(pending.plan.depth)
        gain = emitted / rows - spent / plain
        self._credit = min(max(self._credit + gain, LEAST_CREDIT), MOST_CREDIT)
        if gain > 0:
            self._losses, self._resting, self._wait = 0, False, PROBE_FIRST
            return
        self._losses += 1
        self._resting = self._losses >= LOSSES and self._credit < 0

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
        if plans[best] >= MARGIN * rate and not self._resting:
            self._idle = 0
            self._since_plain += 1
            if self._since_plain >= REFRESH_PLAIN:
                self._since_plain = 0
                return Plan()
            return best
        self._idle += 1
        self._since_plain = 0
        # What a copy would have been is known from every step for nothing; a draft has to be tried.
        trial = max((plan for plan in plans if plan.depth), key=lambda plan: plans[plan], default=None)
        if trial is not None and self._idle >= self._wait:
            self._idle, self._wait = 0, min(self._wait * 2, PROBE_EVERY)
            return trial
        return Plan()

    def _plans(self, sizes: list[int], room: int) -> list[Plan]:
        copies = [0, *(length for length in self.copy_lengths if any(sizes))]
        depths = [0] if self.draft is None else [0, *range(1, min(self.deepest, max(room, 1)) + 1)]
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
        """Nodes that the draft feeds the target at a depth."""
        if self.draft is None or depth == 0:
            return 0
        most, seen = int(self.draft.nodes(depth)), self.ledger.node_clock.seconds(depth)
        return min(most, round(seen)) if seen else most

    def _draft(
        self, context: Context, plan: Plan, found: list[tuple[list[int], int]]
    ) -> tuple[Proposal, list[int], list[int]]:
        """Draft a plan; returns the proposal and how deep each row's copy and draft were to go.

        A draft that stopped short for want of confidence counts as wrong from there on, or its few sure steps would
        speak for all.
        """
        copied = [min(len(draft), plan.copied) for draft, _ in found]
        copy = self.lookup.chains(context, [draft[:count] for (draft, _), count in zip(found, copied, strict=True)])
        nothing = [0] * context.batch
        if plan.depth == 0:
            return copy, copied, nothing
        self.draft.num_draft_tokens = plan.depth
        try:
            draft = context.clip(self.draft.propose(context))
        finally:
            self.draft.num_draft_tokens = self.deepest
        drafts = draft.real[:, 1:].any(1).tolist()
        self.ledger.node_clock.add(plan.depth, draft.tokens.shape[1] - 1)
        reach = [min(plan.depth, room) * drew for room, drew in zip(context.room().tolist(), drafts, strict=True)]
        if not any(copied):
            return draft, nothing, reach
        return merge(draft, copy), copied, reach


def _at(curve: list[float], depth: int) -> float:
    return curve[depth] if depth < len(curve) else 0.0
