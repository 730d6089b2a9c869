"""What steps cost and what drafts yield, learnt while decoding: the figures `auto` decides by.

All of it belongs to one call, or to the object that a caller passes to several calls; nothing is kept on a model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

RECENT = 7  # samples a median is taken over
DECAY = 0.97  # weight of a depth's history when a new trial comes
PRIOR = 1.0  # trials that the prior acceptance weighs
LEAD = 0.25  # share of the steps left by which a row may lead until its own count for a third of the last row's
PACE_PRIOR, PACE_DECAY = 2.0, 0.9  # steps of one token that a row's pace begins with; weight of its history
MARGIN, MARGIN_OF_ROWS = 1.03, 1.15  # what a plan must promise over a plain step, for one row and for several
MARGIN_OF_DOUBLING = 0.1  # and in a batch that nobody joins, with each doubling of its rows


class Clock:
    """Medians of recent seconds (or other costs) by number of nodes (or levels), with a straight line between and
    beyond what was seen.

    Args:
        slope: guessed cost of one more node, relative to the cost of one, until two sizes were seen.
    """

    def __init__(self, slope: float = 0.01) -> None:
        self.slope = slope
        self._seen: dict[int, deque[float]] = {}

    def add(self, nodes: int, seconds: float) -> None:
        """Record that a forward over so many nodes took so long."""
        self._seen.setdefault(nodes, deque(maxlen=RECENT)).append(seconds)

    @property
    def sizes(self) -> list[int]:
        """Sizes seen, in ascending order."""
        return sorted(self._seen)

    @property
    def samples(self) -> int:
        """How many figures it holds."""
        return sum(map(len, self._seen.values()))

    def seconds(self, nodes: int) -> float:
        """Estimate the cost of a forward over `nodes` nodes; 0.0 before anything was seen."""
        if not self._seen:
            return 0.0
        if nodes in self._seen:
            return median(self._seen[nodes])
        sizes = self.sizes
        if len(sizes) == 1:
            return median(self._seen[sizes[0]]) * (1 + self.slope * (nodes - 1)) / (1 + self.slope * (sizes[0] - 1))
        low = max((size for size in sizes if size < nodes), default=sizes[0])
        high = min((size for size in sizes if size > nodes), default=sizes[-1])
        if low == high or low == sizes[-1]:
            low, high = sizes[0], sizes[-1]
        at_low, at_high = median(self._seen[low]), median(self._seen[high])
        per_node = max((at_high - at_low) / (high - low), 0.0)
        least = at_low * nodes / low if nodes < low else min(at_low, at_high)
        return max(at_low + per_node * (nodes - low), least)


class Clocks:
    """A clock for each doubling of the rows in a batch, since a node of another row reads another prefix.

    Args:
        slope: of each clock.
    """

    def __init__(self, slope: float = 0.01) -> None:
        self.slope = slope
        self._by_rows: dict[int, Clock] = {}

    def add(self, rows: int, nodes: int, seconds: float) -> None:
        """Record that a forward over so many nodes (or levels), all rows together, took so long."""
        self._by_rows.setdefault(rows.bit_length(), Clock(self.slope)).add(nodes, seconds)

    def seconds(self, rows: int, nodes: int) -> float:
        """Estimate such a forward's cost, in batches not seen yet by the nearest; 0.0 before anything was seen."""
        near = sorted(self._by_rows, key=lambda doublings: abs(doublings - rows.bit_length()))
        if not near:
            return 0.0
        own, *others = (self._by_rows[doublings] for doublings in near)
        known = next((other for other in others if len(other.sizes) > 1), None)
        if len(own.sizes) > 1 or known is None:
            return own.seconds(nodes)
        only = own.sizes[0]  # how cost grows from there, another batch has shown
        return own.seconds(only) * known.seconds(nodes) / known.seconds(only)

    def plain_known(self, rows: int) -> bool:
        """Whether a forward of one node a row was timed in a batch of about this size."""
        doublings = rows.bit_length()
        return doublings in self._by_rows and self._by_rows[doublings].sizes[0] < 1 << doublings

    @property
    def samples(self) -> int:
        """How many figures all of them hold."""
        return sum(clock.samples for clock in self._by_rows.values())


class Survival:
    """How often a way of drafting is right to each depth: decayed kept / tried, from a prior.

    Args:
        prior: acceptance of a depth, given the one above, before anything was tried.
    """

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.trials = 0
        self._tried: list[float] = []
        self._kept: list[float] = []

    def add(self, tried: int, kept: int) -> None:
        """Record that a draft of depth `tried` was kept to depth `kept`."""
        self.trials += 1
        while len(self._tried) < tried:
            self._tried.append(PRIOR)
            self._kept.append(PRIOR * self.prior)
        # A depth is tried when the one above was kept; deeper ones say nothing.
        for depth in range(min(kept + 1, tried)):
            self._tried[depth] = self._tried[depth] * DECAY + 1
            self._kept[depth] = self._kept[depth] * DECAY + (depth < kept)

    def curve(self, depth: int) -> list[float]:
        """Return the estimated chance that a draft is kept to depth 1, 2, ..., `depth`."""
        chance, out = 1.0, []
        for level in range(depth):
            last = self._kept[-1] / self._tried[-1] if self._tried else self.prior
            chance *= self._kept[level] / self._tried[level] if level < len(self._tried) else min(last, self.prior)
            out.append(chance)
        return out


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
        self.draft_share = 0.0  # of the target's weights that the draft has: what a level costs, until one was timed
        self.step_clocks, self.draft_clocks = Clocks(), Clocks(slope=0.5)
        self.node_clock = Clock(slope=0.5)  # nodes a row drafted, by depth: a draft may stop short of its plan
        self.copies = [Survival(prior) for prior in (0.0, 0.35, 0.55, 0.75)]  # by n-gram length, 3 and more together
        self.drafts = Survival(0.6)

    def step_cost(self, rows: int, nodes: int) -> float:
        """Cost of a target forward over `nodes` nodes in all `rows` rows."""
        return self.given_step(nodes) if self.given_step else self.step_clocks.seconds(rows, nodes)

    def plain_cost(self, rows: int) -> float:
        """Cost of a plain step of `rows` rows; 0.0 until one was timed, without which nothing can be compared."""
        if self.given_step is None and not self.step_clocks.plain_known(rows):
            return 0.0
        return self.step_cost(rows, rows)

    def draft_cost(self, rows: int, depth: int) -> float:
        """Cost of drafting `depth` levels for `rows` rows."""
        if depth == 0:
            return 0.0
        if self.given_draft is not None:
            return self.given_draft(depth)
        return self.draft_clocks.seconds(rows, depth) or depth * self.draft_share * self.plain_cost(rows)

    def catch_up_cost(self, rows: int, tokens: int) -> float:
        """Cost of feeding the draft `tokens` of all rows that it has not seen, a guess from its size."""
        if self.given_draft is not None:
            return 0.0
        wide = 8 * rows
        return tokens * self.draft_share * (self.step_cost(rows, rows + wide) - self.plain_cost(rows)) / wide

    def copy_of(self, size: int) -> Survival:
        """Survival of copies whose n-gram was so long."""
        return self.copies[min(size, len(self.copies) - 1)]


class Paces:
    """How many tokens each row emits in a step that drafts: decayed means, one token before anything was drafted."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[float, float]] = {}  # steps and tokens of each row

    def add(self, emitted: list[int]) -> None:
        """Record what the rows of a drafted step emitted; rows that had stopped emitted nothing."""
        for row, count in enumerate(emitted):
            steps, tokens = self._of(row)
            self._rows[row] = (steps * PACE_DECAY + 1, tokens * PACE_DECAY + count) if count else (steps, tokens)

    def select_rows(self, index: list[int]) -> None:
        """Keep these rows, in this order."""
        self._rows = dict(enumerate(map(self._of, index)))

    def of(self, row: int) -> float:
        """Return a row's tokens a drafted step."""
        steps, tokens = self._of(row)
        return tokens / steps

    def _of(self, row: int) -> tuple[float, float]:
        return self._rows.get(row, (PACE_PRIOR, PACE_PRIOR))


def worth(steps: list[float], joined: bool) -> list[float]:
    """Return what a token of each row is worth, 1 in all.

    A batch that nobody joins takes as long as its last row, and a row that ended is fed to the end: what leading rows
    win is lost again, the more the nearer the end. Where rows join, all are worth the same.

    Args:
        steps: that each row is expected to take yet, 0 for rows that stopped.
        joined: whether rows join, and take the places of those that end.
    """
    longest = max(steps)
    lead = math.inf if joined else LEAD * longest
    shares = [math.exp((left - longest) / lead) if left else 0.0 for left in steps]
    return [share / sum(shares) for share in shares]


def margin_of(rows: int, joined: bool) -> float:
    """Return how much a plan must promise over a plain step.

    Rows gain unequally. Where all begin together the slowest counts, which gains the less than the mean the more rows
    there are; where rows join, an ended row's place stays empty for a step.
    """
    if rows == 1:
        return MARGIN
    return MARGIN_OF_ROWS if joined else max(MARGIN_OF_ROWS, 1 + MARGIN_OF_DOUBLING * math.log2(rows))


def expected_tokens(copy: list[float], draft: list[float]) -> float:
    """Expected tokens of a step whose copy and draft are kept to each depth with these chances, in one tree if both.

    What both get right counts once; of their overlap half is taken to be chance.
    """
    both = [(_at(copy, depth), _at(draft, depth)) for depth in range(max(len(copy), len(draft)))]
    return 1 + sum(max(a, b) + 0.5 * min(a, b) * (1 - max(a, b)) for a, b in both)


def _at(curve: list[float], depth: int) -> float:
    return curve[depth] if depth < len(curve) else 0.0
