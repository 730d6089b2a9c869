"""The rejection sampler: walk a draft tree by the target's own law and keep a path of it.

The only place where a token of the output is chosen. Called once a step by decoding.step, and once for the prompt.
A drawn child x of law q is kept with probability min(1, p(x)/q(x)); otherwise p <- relu(p - q), renormalised, and the
next sibling is tried (Leviathan et al. 2023; Chen et al. 2023; without replacement over siblings: Miao et al. 2024).
Children that are point masses need no coin: the token is sampled from what is left of p, and the walk follows the
child that equals it, which is the same law. Greedy decoding is the case of a one-hot p.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .proposal import Acceptance, Proposal

ProbsAt = Callable[[Tensor], Tensor]
OnToken = Callable[[Tensor, Tensor], Tensor]


class Draws(Protocol):
    """The randomness of a walk; tests enumerate it, sampling.Draws draws it."""

    def accept(self, probability: Tensor, live: Tensor) -> Tensor:
        """Toss one coin a live row: `probability [B]` (may exceed 1), `live [B]` -> `[B]` bool."""
        ...

    def sample(self, p: Tensor, live: Tensor) -> Tensor:
        """Draw one token a live row from `p [B, V]` -> `[B]`; rows that are not live may hold anything."""
        ...


@dataclass(frozen=True)
class TypicalAcceptance:
    """Medusa's typical acceptance, which is lossy: keep x where p(x) > min(epsilon, delta * exp(-entropy(p))).

    Source: Cai et al. 2024, section 2.3.1; epsilon and delta default to the values published there.
    """

    epsilon: float = 0.09
    delta: float = 0.3


def verify(
    proposal: Proposal,
    probs_at: ProbsAt,
    draws: Draws,
    on_token: OnToken,
    typical: TypicalAcceptance | None = None,
) -> Acceptance:
    """Keep, in every row, the path of the draft tree that the target's law would have produced.

    Args:
        proposal: the draft trees, `tokens [B, N]`.
        probs_at: given the node each row stands on `[B]` (-1: row not asked) returns the target's law there, `[B, V]`,
            rows summing to 1. Asked once a depth, in the order of plain decoding.
        draws: the randomness.
        on_token: called once a depth with the emitted tokens `[B]` and the rows they count for `[B]`; returns the rows
            `[B]` that stop on their token, whose walk ends there.
        typical: use this lossy rule instead of rejection sampling.

    Returns:
        The kept path, its length, the next token and the number of kept drafted tokens.
    """
    nodes = typical_path(proposal, probs_at, typical) if typical is not None else None
    live = proposal.real[:, 0].clone()
    at = torch.zeros_like(proposal.tokens[:, 0])
    path = torch.full_like(proposal.tokens[:, : proposal.max_depth + 1], -1)
    path[:, 0] = torch.where(live, 0, -1)
    next_token = torch.zeros_like(at)
    kept = torch.zeros_like(at)
    for depth in range(1, proposal.max_depth + 2):
        p = probs_at(torch.where(live, at, -1))
        if nodes is None:
            token, child = choose(proposal, p, at, live, draws)
        else:
            child = nodes[:, depth] if depth <= proposal.max_depth else torch.full_like(at, -1)
            drafted = proposal.tokens.gather(1, child.clamp(min=0)[:, None]).squeeze(1)
            token = torch.where(child >= 0, drafted, draws.sample(p, live & (child < 0)))
        stop = on_token(token, live)
        next_token = torch.where(live, token, next_token)
        if depth > proposal.max_depth:
            break
        live = live & (child >= 0)
        kept = kept + live
        live = live & ~stop
        if not bool(live.any()):
            break
        at = torch.where(live, child, at)
        path[:, depth] = torch.where(live, child, -1)
    return Acceptance(path, (path >= 0).sum(1), next_token, kept)


def choose(proposal: Proposal, p: Tensor, at: Tensor, live: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Choose the next token of every live row, standing on node `at [B]` with law `p [B, V]`.

    Returns:
        Tokens `[B]` and the child nodes they are `[B]`, -1 where the token was not drafted.
    """
    child = torch.full_like(at, -1)
    if proposal.max_depth == 0:  # nothing was drafted
        return draws.sample(p, live), child
    children = proposal.real & (proposal.parents == at[:, None]) & live[:, None]  # [B, N]
    token = child
    undecided = live
    if proposal.draft_probs is not None:
        p, token, child, undecided = try_drawn(proposal, p, children & ~proposal.point_mass, live, draws)
    if bool(undecided.any()):
        drawn = draws.sample(p, undecided)
        same = children & proposal.point_mass & (proposal.tokens == drawn[:, None]) & undecided[:, None]
        token = torch.where(undecided, drawn, token)
        child = torch.where(same.any(1), same.int().argmax(1), child)
    return token, child


def try_drawn(
    proposal: Proposal, p: Tensor, drawn: Tensor, live: Tensor, draws: Draws
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Try the drawn children `drawn [B, N]` in draw order.

    Returns:
        What is left of p `[B, V]`, the tokens and children decided so far `[B]`, and the rows still undecided `[B]`.
    """
    draft_probs = proposal.draft_probs
    if draft_probs is None:
        raise ValueError("try_drawn needs draft_probs; a proposal without them holds point masses only.")
    rows = torch.arange(len(live), device=live.device)
    token, child = torch.full_like(rows, -1), torch.full_like(rows, -1)
    undecided, drawn = live.clone(), drawn.clone()
    while True:
        trying = undecided & drawn.any(1)
        if not bool(trying.any()):
            return p, token, child, undecided
        node = drawn.int().argmax(1)
        drawn[rows, node] = False
        x = proposal.tokens[rows, node]
        q = draft_probs[rows, node].to(p.dtype)  # [B, V]
        ratio = p[rows, x] / q[rows, x]
        accepted = trying & draws.accept(ratio, trying)
        residual = torch.relu(p - q)
        mass = residual.sum(1)
        rejected = trying & ~accepted
        # p = q up to rounding: rejection had probability zero, so this stage's own p is the law that is left.
        empty = rejected & (mass <= 0)
        if bool(empty.any()):
            token = torch.where(empty, draws.sample(p, empty), token)
        token = torch.where(accepted, x, token)
        child = torch.where(accepted, node, child)
        undecided = undecided & ~accepted & ~empty
        p = torch.where((rejected & ~empty)[:, None], residual / mass.clamp(min=torch.finfo(p.dtype).tiny)[:, None], p)


def typical_path(proposal: Proposal, probs_at: ProbsAt, typical: TypicalAcceptance) -> Tensor:
    """Find each row's longest root path whose every node passes typical acceptance, ties by draw order.

    Asks for every node's law, so processors that read the prefix cannot be honoured here (support.py refuses them).

    Returns:
        Nodes of that path by depth `[B, D+1]`, the root first, padded with -1.
    """
    batch, nodes = proposal.tokens.shape
    passed = proposal.real.clone()  # [B, N]
    rows = torch.arange(batch, device=proposal.tokens.device)
    for parent in range(nodes):
        below = proposal.real & (proposal.parents == parent)
        if not bool(below.any()):
            continue
        p = probs_at(torch.where(below.any(1), parent, -1))
        entropy = torch.special.entr(p).sum(1)
        threshold = torch.clamp(typical.delta * torch.exp(-entropy), max=typical.epsilon)
        passed &= ~below | (p.gather(1, proposal.tokens) > threshold[:, None])
    mask = proposal.tree_mask
    whole = ~(mask & ~passed[:, None, :]).any(2) & proposal.real  # every ancestor passed
    best = torch.where(whole, proposal.depths, -1).max(1).values
    last = (whole & (proposal.depths == best[:, None])).int().argmax(1)
    on_path = mask[rows, last] & whole[rows, last][:, None]  # [B, N]
    path = torch.full_like(proposal.tokens[:, : proposal.max_depth + 1], -1)
    for node in range(nodes):
        take = on_path[:, node]
        path[rows[take], proposal.depths[take, node]] = node
    return path
