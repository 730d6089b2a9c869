"""What steps cost and what drafts yield, learnt while decoding: the figures `auto` decides by.

All of it belongs to one call, or to the object that a caller passes to several calls; nothing is kept on a model.
"""

from __future__ import annotations

from collections import deque
from statistics import median

RECENT = 7  # samples a median is taken over
DECAY = 0.97  # weight of a depth's history when a new trial comes
PRIOR = 1.0  # trials that the prior acceptance weighs


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

    def __contains__(self, nodes: int) -> bool:
        return nodes in self._seen

    def seconds(self, nodes: int) -> float:
        """Estimate the cost of a forward over `nodes` nodes; 0.0 before anything was seen."""
        if not self._seen:
            return 0.0
        if nodes in self._seen:
            return median(self._seen[nodes])
        sizes = sorted(self._seen)
        if len(sizes) == 1:
            return median(self._seen[sizes[0]]) * (1 + self.slope * (nodes - 1)) / (1 + self.slope * (sizes[0] - 1))
        low = max((size for size in sizes if size < nodes), default=sizes[0])
        high = min((size for size in sizes if size > nodes), default=sizes[-1])
        if low == high or low == sizes[-1]:
            low, high = sizes[0], sizes[-1]
        at_low, at_high = median(self._seen[low]), median(self._seen[high])
        per_node = max((at_high - at_low) / (high - low), 0.0)
        return max(at_low + per_node * (nodes - low), min(at_low, at_high))


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
