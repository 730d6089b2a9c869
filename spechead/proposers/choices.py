"""Static trees as data, and the builder that derives the best tree of N nodes from measured accuracies.

A tree is a list of paths of ranks: `(0, 2)` is the third-ranked token of depth 2 under the best token of depth 1.
Published trees: Medusa's mc_sim_7b_63 (FasterDecoding/Medusa 11af0aa, medusa/model/medusa_choices.py) and EAGLE-1's of
the same name, which is another, 25-node tree (SafeAILab/EAGLE 08dc06c, eagle/model/choices.py).
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence

from ..tree import choices_to_parents

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


def static_choices(tree: str | Sequence[Sequence[int]], named: dict[str, Choices]) -> Choices:
    """Return the paths of a tree that is given by name or as paths of ranks.

    Args:
        tree: one of the names, or the paths.
        named: the paths of every name there is.

    Raises:
        ValueError: if there is no such name, or the paths are not those of a tree.
    """
    if isinstance(tree, str):
        if tree not in named:
            raise ValueError(f"tree={tree!r} must be one of {', '.join(named)}, or a list of paths of ranks.")
        return named[tree]
    try:
        paths = [tuple(operator.index(rank) for rank in path) for path in tree]
    except TypeError:
        raise ValueError(f"tree={tree!r} must be a list of paths of ranks, such as [(0,), (1,), (0, 0)].") from None
    if not paths:
        raise ValueError("tree=[] drafts nothing; give at least the path (0,).")
    choices_to_parents(paths)  # refuses what is no tree
    return sorted(paths, key=lambda path: (len(path), path))


def likeliest(choices: Choices, size: int | None) -> Choices:
    """Return the `size` paths of the best ranks, shorter first; they are a tree again. None keeps all.

    Raises:
        ValueError: if the size is below 1.
    """
    if size is None:
        return choices
    if size < 1:
        raise ValueError(f"tree_size={size} drafts nothing; give at least 1.")
    # A parent's sum is below its child's, a better sibling's too.
    kept = sorted(choices, key=lambda path: (sum(path) + len(path), path))[:size]
    return sorted(kept, key=lambda path: (len(path), path))


def best_choices(accuracies: Sequence[Sequence[float]], size: int) -> Choices:
    """Return the tree of `size` nodes with the most expected kept tokens, ranks of one depth taken as independent.

    A node's chance is the product of its path's accuracies, so the best tree holds the `size` likeliest paths; a path
    is never likelier than its parent (Cai et al. 2024, section 2.3.3).

    Args:
        accuracies: for each depth, the measured chance that the token of each rank is the target's.
        size: nodes, the root excluded.

    Returns:
        Paths of ranks, shorter first.

    Raises:
        ValueError: if nothing can be built, or a chance is none.
    """
    if size < 1 or not accuracies or not accuracies[0]:
        raise ValueError(f"best_choices needs size >= 1 and accuracies of at least one depth; got size={size}.")
    if any(not 0 <= chance <= 1 for depth in accuracies for chance in depth):
        raise ValueError(f"accuracies must lie between 0 and 1; got {accuracies}.")
    chosen: Choices = []
    # All children of a chosen path are looked at: measured chances need not fall from rank to rank.
    queue: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while queue and len(chosen) <= size:
        negative, path = heapq.heappop(queue)
        chosen.append(path)
        below = accuracies[len(path)] if len(path) < len(accuracies) else ()
        for rank, chance in enumerate(below):
            heapq.heappush(queue, (negative * chance, (*path, rank)))
    return sorted(chosen[1:], key=lambda path: (len(path), path))
