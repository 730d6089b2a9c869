"""auto: draft whatever is expected to pay on this load now, and decode plainly when nothing does.

Every step it compares plans by expected tokens per second: a plain step, the copy that prompt lookup found, the head's
or draft model's draft at several depths, and both in one tree. Costs are measured by node count, acceptance is tracked
by depth and, for lookup, by the length of the matching n-gram; a copy that was found and not drafted is compared with
what was emitted. A call whose drafts keep costing more than they give rests, and tries again at a low rate. Exact like
every proposer: the choice looks at earlier steps only, never at tokens just drawn.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from ..context import Context
from ..proposal import Proposal
from .base import BaseProposer
from .costs import Ledger, Paces, expected_tokens, margin_of, worth
from .merge import merge
from .prompt_lookup import PromptLookupProposer

PROBE_FIRST, PROBE_EVERY = 20, 40  # steps until a losing plan is tried again: doubling from the first to the last
PROBE_SHARE, PROBE_LATEST = 0.01, 500  # of the steps since may be lost by a probe, which waits no longer than this
LOSSES = 3  # drafted steps in a row that cost more than they gave, after which a call rests
LIKELY = 0.5  # chance of a copy from which a rest ends
LEAST_CREDIT, MOST_CREDIT = -1.0, 2.0  # plain steps gained or lost by drafting; the past counts no more than this
REFRESH_PLAIN = 48  # a winning plan makes room for a plain step this often, so that its cost stays known


@dataclass(frozen=True)
class Plan:
    """One way to draft a step: copy up to `copied` tokens, draft `depth` levels, or both; neither is a plain step."""

    copied: int = 0
    depth: int = 0

    @property
    def name(self) -> str:
        """What stats call it."""
        return "plain" if self == Plan() else "+".join(["lookup"] * (self.copied > 0) + ["draft"] * (self.depth > 0))


@dataclass
class _Pending:
    """The step in flight: whose it is, what was planned, when it left (None: what came since was not it alone), and
    what each row tried."""

    context: weakref.ref[Context]
    plan: Plan
    nodes: int
    left: float | None
    cached: Tensor
    match: list[int]
    copies: list[list[int]]
    copied: list[int]
    drafted: list[int]
    weights: list[float]


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
        self._paces = Paces()
        self._open = False  # whether rows join: then others take the places of those that end

    def start(self, context: Context) -> None:
        """Prepare both ways of drafting."""
        if self._pending is not None:
            self._pending.left = None  # other prompts were fed since
        self._paces = Paces()  # of the rows of this call
        if self.draft is not None and not self.ledger.draft_share:
            self.ledger.draft_share = self.draft.weights / context.target.model.num_parameters()
        for part in self.parts:
            part.start(context)

    def propose(self, context: Context) -> Proposal:
        """Learn from the last step, choose a plan, draft it."""
        entered = perf_counter()
        self._learn(context, entered)
        found = self.lookup.find(context, max(self.copy_lengths))
        weights = self._weights(context)
        plan = self._choose(context, [size if draft else 0 for draft, size in found], weights)
        began = perf_counter()
        proposal, copied, drafted = self._draft(context, plan, found)
        context.stats.plans[plan.name] = context.stats.plans.get(plan.name, 0) + 1
        left = perf_counter()
        if plan.depth and self.ledger.drafts.trials:  # a call's first draft also feeds the head its whole prompt
            self.ledger.draft_clocks.add(context.batch, plan.depth, left - began)
        sizes = [size for _, size in found]
        nodes, cached = proposal.tokens.numel(), context.cached.clone()
        copies = [copy for copy, _ in found]
        self._pending = _Pending(
            weakref.ref(context), plan, nodes, left, cached, sizes, copies, copied, drafted, weights
        )
        return proposal

    def select_rows(self, context: Context, index: Tensor) -> None:
        """Learn from the last step while its rows are all here, then keep rows `index [B']` of both."""
        self._learn(context, perf_counter())
        self._paces.select_rows(index.tolist())
        for part in self.parts:
            part.select_rows(context, index)

    def add_rows(self, context: Context, other: Context) -> None:
        """Learn from the last step, then append the other rows to both."""
        self._learn(context, perf_counter())
        self._open = True
        for part in self.parts:
            part.add_rows(context, other)

    def carry(self, context: Context) -> Any:
        """Return what the draft carries."""
        return self.draft.carry(context) if self.draft is not None else None

    def resume(self, context: Context, carried: Any) -> None:
        """Hand the draft what it carried."""
        if self.draft is not None:
            self.draft.resume(context, carried)

    def _learn(self, context: Context, now: float) -> None:
        pending, self._pending = self._pending, None
        if pending is None or pending.context() is not context:
            return
        if pending.left is not None:
            self.ledger.step_clocks.add(len(pending.weights), pending.nodes, now - pending.left)
        gained = (context.cached - pending.cached).tolist()
        self._settle(pending, gained)
        for row, weight in enumerate(pending.weights):
            if not weight or gained[row] < 1:
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

    def _settle(self, pending: _Pending, emitted: list[int]) -> None:
        """Count whether a drafted step gave more than it cost; a call that keeps losing rests.

        Estimates start from a prior and change by one trial a step. Where drafting costs little they would go on for
        long; what counts here is what was really gained, in plain steps.
        """
        rows = len(pending.weights)
        plain = self.ledger.plain_cost(rows)
        if pending.plan == Plan() or plain == 0.0:
            return
        self._paces.add(emitted)
        spent = self.ledger.step_cost(rows, pending.nodes) + self.ledger.draft_cost(rows, pending.plan.depth)
        gain = sum(weight * count for weight, count in zip(pending.weights, emitted, strict=True)) - spent / plain
        self._credit = min(max(self._credit + gain, LEAST_CREDIT), MOST_CREDIT)
        if gain > 0:
            self._losses, self._resting, self._wait = 0, False, PROBE_FIRST
            return
        self._losses += 1
        self._resting = self._losses >= LOSSES and self._credit < 0

    def _weights(self, context: Context) -> list[float]:
        left = enumerate(zip(context.rows, context.room().tolist(), strict=True))
        steps = [0.0 if row.stopped else (room + 1) / self._paces.of(place) for place, (row, room) in left]
        return worth(steps, self._open)

    def _choose(self, context: Context, sizes: list[int], weights: list[float]) -> Plan:
        """Pick the plan of the highest expected tokens per second; sizes are each row's n-gram match, 0 for none."""
        rows, rooms = len(weights), context.room().tolist()
        plain = self.ledger.plain_cost(rows)
        if plain == 0.0 or max(rooms) < 1:
            return Plan()
        self._idle += 1
        if self._resting and self._idle < self._wait:
            return Plan()
        kinds: dict[tuple[int, int], float] = {}  # rows of the same match and room, by their weight together
        for size, room, weight in zip(sizes, rooms, weights, strict=True):
            kind = size, min(room, max(self.deepest, *self.copy_lengths))
            kinds[kind] = kinds.get(kind, 0.0) + weight
        behind = self._catching_up(context, rows, max(rooms))
        plans = {plan: self._outlook(plan, kinds, rows, behind) for plan in self._plans(sizes, max(rooms))}
        best = max(plans, key=lambda plan: plans[plan][0] / plans[plan][1], default=Plan())
        margin = margin_of(rows, self._open)
        if best in plans and plans[best][0] / plans[best][1] >= margin / plain and not self._resting:
            self._idle = 0
            self._since_plain += 1
            if self._since_plain >= REFRESH_PLAIN:
                self._since_plain = 0
                return Plan()
            return best
        self._since_plain = 0
        return self._probe({plan: cost / plain - tokens for plan, (tokens, cost) in plans.items() if plan.depth})

    def _probe(self, losses: dict[Plan, float]) -> Plan:
        """Try the draft that loses least, given what each is expected to lose in plain steps, when its time has come.

        What a copy would have been is known from every step for nothing; a draft has to be tried. The dearer it is,
        the longer it waits.
        """
        trial = min(losses, key=lambda plan: losses[plan], default=Plan())
        if trial == Plan() or self._idle < max(self._wait, min(losses[trial] / PROBE_SHARE, PROBE_LATEST)):
            return Plan()
        self._idle, self._wait = 0, min(self._wait * 2, PROBE_EVERY)
        return trial

    def _plans(self, sizes: list[int], room: int) -> list[Plan]:
        copies = [0, *(length for length in self.copy_lengths if any(sizes))]
        depths = [0] if self.draft is None else [0, *range(1, min(self.deepest, room) + 1)]
        return [Plan(copied, depth) for copied in copies for depth in depths if copied or depth]

    def _catching_up(self, context: Context, rows: int, room: int) -> float:
        """Seconds a step that feeding the draft what it has not seen costs, spread over half of what is left."""
        if self.draft is None:
            return 0.0
        return self.ledger.catch_up_cost(rows, self.draft.backlog(context)) / max(room / 2, 1)

    def _outlook(
        self, plan: Plan, kinds: dict[tuple[int, int], float], rows: int, behind: float = 0.0
    ) -> tuple[float, float]:
        """Return the expected emitted tokens of a row under a plan, the mean by weights, and the plan's cost."""
        tokens, widest = 0.0, 1
        draft = self.ledger.drafts.curve(plan.depth)
        for (size, room), weight in kinds.items():
            if not weight:
                continue
            copy = self.ledger.copy_of(size).curve(plan.copied) if size and plan.copied else []
            copy, mine = copy[:room], draft[:room]
            tokens += weight * expected_tokens(copy, mine)
            widest = max(widest, 1 + len(copy) + self._nodes(plan.depth) * (len(mine) > 0))
        drafting = self.ledger.draft_cost(rows, plan.depth) + (behind if plan.depth else 0.0)
        return tokens, self.ledger.step_cost(rows, widest * rows) + drafting

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
