"""Static trees as data, and the builder that derives the best tree of N nodes from measured accuracies.

A tree is a list of paths of ranks: `(0, 2)` is the third-ranked token of depth 2 under the best token of depth 1.
Published trees: Medusa's mc_sim_7b_63 (FasterDecoding/Medusa 11af0aa, medusa/model/medusa_choices.py) and EAGLE-1's of
the same name, which is another, 25-node tree (SafeAILab/EAGLE 08dc06c, eagle/model/choices.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Choices = list[tuple[int, ...]]


def _paths(text: str) -> Choices:
    return [tuple(int(digit) for digit in path) for path in text.split()]


MEDUSA_63: Choices = _paths(
    "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90 "
    "000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200 0000 0001"
)
EAGLE_25: Choices = _paths(
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)


def best_choices(accuracies: Sequence[Sequence[float]], size: int) -> Choices:
    """Return the tree of `size` nodes with the most expected kept tokens, ranks of one depth taken as independent.

    A node's chance is the product of its path's accuracies, so the best tree holds the `size` likeliest paths; a path
    is never likelier than its parent (Cai et al. 2024, section 2.3.3).

    Args:
        accuracies: for each depth, the measured chance that the token of each rank is the target's, best rank first.
        size: nodes, the root excluded.

    Returns:
        Paths of ranks, shorter first.

    Raises:
        ValueError: if nothing can be built.
    """
    if size < 1 or not accuracies or not accuracies[0]:
        raise ValueError(f"best_choices needs size >= 1 and accuracies of at least one depth; got size={size}.")
    chosen: Choices = []
    queue = [(-accuracies[0][0], (0,))]
    while queue and len(chosen) < size:
        negative, path = heapq.heappop(queue)
        chosen.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(accuracies[depth - 1]):
            own = accuracies[depth - 1][rank]
            above = -negative / own if own > 0 else 0.0
            heapq.heappush(queue, (-above * accuracies[depth - 1][rank + 1], (*path[:-1], rank + 1)))
        if depth < len(accuracies):
            heapq.heappush(queue, (negative * accuracies[depth][0], (*path, 0)))
    return sorted(chosen, key=lambda path: (len(path), path))
