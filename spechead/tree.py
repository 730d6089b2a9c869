"""Shapes of draft trees: choices to parents, parents to ancestors and depths.

Nodes of a tree are numbered parents first, siblings in draw order; node 0 is the root, whose parent is -1.
Called by proposal.Proposal and by the proposers that draft trees. Torch only; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chain_parents(batch: int, nodes: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the parents of a chain of `nodes` nodes for every row.

    Args:
        batch: number of rows B.
        nodes: number of nodes N, the root included.
        device: where the result lives.

    Returns:
        Parents `[B, N]`: -1, 0, 1, ..., N-2 in every row.
    """
    return torch.arange(-1, nodes - 1, device=device).expand(batch, nodes)


def choices_to_parents(choices: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
    """Turn a static tree, given as Medusa-style paths of ranks, into node order.

    A choice `(0, 2)` is the third-ranked token of depth 2 under the best token of depth 1 (Cai et al. 2024).

    Args:
        choices: paths of ranks; each proper prefix of a path must be a choice too.

    Returns:
        Three lists over the nodes, root first: parent index, depth, rank among its depth's tokens (root: -1, 0, 0).

    Raises:
        ValueError: if a path is empty, negative, given twice, or its parent is missing.
    """
    paths = [tuple(int(rank) for rank in choice) for choice in choices]
    ordered = sorted(paths, key=lambda path: (len(path), path))
    index: dict[tuple[int, ...], int] = {(): 0}
    parents, depths, ranks = [-1], [0], [0]
    for path in ordered:
        if not path or min(path) < 0:
            raise ValueError(f"tree choice {path} must be a non-empty path of ranks >= 0.")
        if path in index:
            raise ValueError(f"tree choice {path} is given twice; give each path once.")
        if path[:-1] not in index:
            raise ValueError(f"tree choice {path} has no parent {path[:-1]}; add that choice first.")
        index[path] = len(parents)
        parents.append(index[path[:-1]])
        depths.append(len(path))
        ranks.append(path[-1])
    return parents, depths, ranks


def ancestors(parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """Walk every node up to its root.

    Args:
        parents: `[B, N]`, the root's being -1.
        max_depth: depth of the deepest node; bounds the number of hops.

    Returns:
        The tree mask `[B, N, N]` (True where column is an ancestor of the row's node, or itself) and depths `[B, N]`.
    """
    batch, nodes = parents.shape
    mask = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    depths = torch.zeros_like(parents)
    above = parents.clone()
    for _ in range(max_depth):
        inside = above >= 0
        hop = above.clamp(min=0)
        mask.scatter_(2, hop[..., None], mask.gather(2, hop[..., None]) | inside[..., None])
        depths = depths + inside
        above = torch.where(inside, parents.gather(1, hop), above)
    return mask, depths
