"""Merging two draft trees under one root, so that two ways of drafting share one target forward.

The first tree is kept whole; drawn tokens must be in it, since a drawn token is always proposed. A node of the second,
all point masses, that equals a sibling already there is dropped, and its children hang under the equal node.
"""

from __future__ import annotations

import torch

from ..proposal import Proposal


def merge(first: Proposal, second: Proposal) -> Proposal:
    """Merge the trees of every row.

    Args:
        first: point masses or drawn tokens, `[B, N]`.
        second: point masses only, `[B, M]`, under the same roots.

    Returns:
        The merged trees; drawn siblings come before point masses.

    Raises:
        ValueError: if the second tree holds drawn tokens.
    """
    if second.draft_probs is not None:
        raise ValueError("only point masses can be merged into another tree; pass the drawn tree first.")
    rows = [_merge_row(*row) for row in zip(*(_columns(first) + _columns(second)), strict=True)]
    width = max(len(tokens) for tokens, _, _ in rows)
    device = first.tokens.device
    tokens = torch.tensor([t + [0] * (width - len(t)) for t, _, _ in rows], device=device)
    # Padding hangs under the node before it, so that parents stay smaller than their children.
    parents = torch.tensor([p + list(range(len(p) - 1, width - 1)) for _, p, _ in rows], device=device)
    real = torch.tensor([r + [False] * (width - len(r)) for _, _, r in rows], device=device)
    probs = None
    if first.draft_probs is not None:
        known, vocabulary = first.draft_probs.shape[1:]
        probs = torch.zeros(len(rows), width, vocabulary, dtype=first.draft_probs.dtype, device=device)
        probs.scatter_(2, tokens[..., None], 1.0)
        shared = torch.arange(min(known, width), device=device)
        kept = first.real[:, : len(shared), None]
        probs[:, : len(shared)] = torch.where(kept, first.draft_probs[:, : len(shared)], probs[:, : len(shared)])
    return Proposal(tokens, parents, real, probs)


def _columns(proposal: Proposal) -> list[list[list[int]]]:
    return [proposal.tokens.tolist(), proposal.parents.tolist(), proposal.real.tolist()]


def _merge_row(
    tokens: list[int], parents: list[int], real: list[bool], more: list[int], above: list[int], counts: list[bool]
) -> tuple[list[int], list[int], list[bool]]:
    """Merge one row's trees; returns its tokens, parents, and which of them are real."""
    last = max((node for node, is_real in enumerate(real) if is_real), default=0)
    out_tokens, out_parents, out_real = tokens[: last + 1], parents[: last + 1], real[: last + 1]
    known = enumerate(zip(out_parents, out_tokens, strict=True))
    child = {key: node for node, key in known if node and real[node]}
    place = {0: 0}
    for node in range(1, len(more)):
        if not counts[node]:
            continue
        parent = place[above[node]]
        key = (parent, more[node])
        if key not in child:
            child[key] = len(out_tokens)
            out_tokens.append(more[node])
            out_parents.append(parent)
            out_real.append(True)
        place[node] = child[key]
    return out_tokens, out_parents, out_real
