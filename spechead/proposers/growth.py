"""Growing draft trees: chain, static tree, or EAGLE-2's dynamic tree, for every row of a batch.

An EAGLE head is fed level by level through a `Sprout`, which keeps the tree's entries behind each row's prefix in the
head's own cache; Medusa's guesses are all there from the start. Children of trees are point masses; chains of sampled
rows are drawn from their own law.
Sources: Li et al. 2024 (EAGLE, EAGLE-2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..context import Context
from ..proposal import Proposal
from ..sampling import draft_tokens, warp
from ..tree import choices_to_parents
from .choices import Choices
from .sprout import Sprout

TREE_SIZE, BRANCHING = 24, 6  # of a dynamic tree, where nothing else is asked for


def dynamic_nodes(depth: int, branching: int, size: int) -> int:
    """Return how many nodes a dynamic tree of `depth` levels keeps, the root excluded."""
    return min(size, branching * (1 + (depth - 1) * branching))


def grow_chain(
    sprout: Sprout,
    context: Context,
    depth: int,
    temperature: float | None,
    reach: Tensor | None = None,
    threshold: float = 0.0,
) -> Proposal:
    """Draft a chain: drawn from the head's law for rows that draw, the best token for the others.

    Args:
        sprout: the step's tree.
        context: gives roots, samplers and draws.
        depth: tokens to draft.
        temperature: of the head's own law; None takes the call's.
        reach: `[B]` depth to which each row may draft; beyond it a row draws nothing, as its single run would not.
        threshold: a row drafts no further once all it drafted has less probability; 0 never stops.
    """
    root = context.root.to(sprout.hidden.device)
    live = root >= 0
    reach = torch.full_like(root, depth) if reach is None else reach.to(root.device)
    samplers = [row.sampler for row in context.rows]
    draws = torch.tensor([[sampler.draws_drafts] for sampler in samplers], device=root.device)
    hidden, tokens, laws, real = sprout.hidden, [], [], []
    growing, chance = live, torch.ones_like(root, dtype=torch.float32)
    for level in range(1, depth + 1):
        logits = sprout.logits(hidden[:, None])[:, 0]  # [B, D]
        law = torch.softmax(warp(samplers, logits, temperature), dim=-1)
        drawn = draft_tokens(samplers, context.draws, law, growing & (reach >= level))
        tokens.append(sprout.target_ids(drawn))
        laws.append(torch.where(draws, law, torch.zeros_like(law).scatter_(1, drawn[:, None], 1.0)))
        real.append(growing)
        if threshold:
            chance = chance * law.gather(1, drawn[:, None])[:, 0]
            growing = growing & (chance >= threshold)
            if not bool(growing.any()):
                break
        if level < depth:
            parent = torch.full_like(drawn, level - 2)[:, None]
            hidden = sprout.feed(tokens[-1][:, None], hidden[:, None], parent, level)[:, 0]
    drafted = torch.stack(tokens, dim=1)
    probs = sprout.target_laws(torch.stack(laws, dim=1), context.target.vocab_size) if context.draws_drafts else None
    return Proposal.chain(root, drafted, torch.stack(real, dim=1), probs)


def grow_static(sprout: Sprout, root: Tensor, choices: Choices) -> Proposal:
    """Draft a static tree of point masses: rank r of a path is the r-th likeliest token under its parent.

    Args:
        sprout: the step's tree.
        root: `[B]`, -1 for done rows.
        choices: paths of ranks.
    """
    parents, depths, ranks = choices_to_parents(choices)
    inner = set(parents)
    batch, device = len(root), root.device
    tokens = torch.zeros(batch, len(parents), dtype=torch.long, device=device)
    outputs = {0: sprout.hidden}
    fed: dict[int, int] = {}
    for depth in range(1, max(depths) + 1):
        level = [node for node, at in enumerate(depths) if at == depth]
        above = sorted({parents[node] for node in level})
        widest = max(ranks[node] for node in level) + 1
        logits = sprout.logits(torch.stack([outputs[node] for node in above], dim=1))
        best = logits.topk(min(widest, logits.shape[-1]), dim=-1).indices  # [B, k, R]
        for node in level:
            rank = min(ranks[node], best.shape[2] - 1)
            tokens[:, node] = sprout.target_ids(best[:, above.index(parents[node]), rank])
        grown = [node for node in level if node in inner]
        if grown:
            states = torch.stack([outputs[parents[node]] for node in grown], dim=1)
            places = torch.tensor([[fed.get(parents[node], -1) for node in grown]], device=device).expand(batch, -1)
            out = sprout.feed(tokens[:, grown], states, places, depth)
            for place, node in enumerate(grown):
                outputs[node] = out[:, place]
                fed[node] = len(fed)
    return tree_proposal(root, tokens, torch.tensor([parents], device=device).expand(batch, -1), max(depths))


def grow_dynamic(
    sprout: Sprout, root: Tensor, depth: int, branching: int, size: int, threshold: float = 0.0
) -> Proposal:
    """Draft EAGLE-2's dynamic tree: expand the likeliest nodes by depth, re-rank all, keep the best `size`.

    Args:
        sprout: the step's tree.
        root: `[B]`, -1 for done rows.
        depth: levels.
        branching: children a node, and nodes expanded a level.
        size: nodes kept, the root excluded.
        threshold: a row grows no further level once its likeliest path has less probability, and keeps only its
            likeliest node and those of at least a `branching`th of it, as a level costs about what so many nodes do; 0
            never stops.
    """
    batch = len(root)
    k = branching
    growing = root >= 0
    scores, tokens, parents = [], [], []  # per level: cumulative log-probability, target id, candidate index of parent
    hidden, beam_score = sprout.hidden[:, None], torch.zeros(batch, 1, device=root.device)
    beam = torch.full((batch, 1), -1, device=root.device)  # candidate index of the nodes being expanded
    offset, fed_before = 0, 0
    for level in range(1, depth + 1):
        log_probs = torch.log_softmax(sprout.logits(hidden), dim=-1)  # [B, beam, D]
        best = log_probs.topk(min(k, log_probs.shape[-1]), dim=-1)
        score = (beam_score[..., None] + best.values).flatten(1)  # [B, beam * k]
        if threshold:
            score = score.masked_fill(~growing[:, None], -torch.inf)
            growing = growing & (score.max(dim=1).values >= math.log(threshold))
        token = sprout.target_ids(best.indices).flatten(1)
        scores.append(score)
        tokens.append(token)
        parents.append(beam.repeat_interleave(best.indices.shape[-1], dim=1))
        if level == depth or (threshold and not bool(growing.any())):
            break
        picked = score.topk(min(k, score.shape[1]), dim=1).indices  # [B, k]
        place = picked // best.indices.shape[-1]  # which of the expanded nodes is the parent
        state = hidden.gather(1, place[..., None].expand(-1, -1, hidden.shape[-1]))
        fed_parent = place + fed_before if level > 1 else torch.full_like(place, -1)
        fed_before = sprout.fed.shape[1]
        hidden = sprout.feed(token.gather(1, picked), state, fed_parent, level)
        beam, beam_score = picked + offset, score.gather(1, picked)
        offset += score.shape[1]
    score = torch.cat(scores, 1)
    if threshold:
        least = score.max(dim=1, keepdim=True).values.clamp(max=math.log(threshold / k))
        score = score.masked_fill(score < least, -torch.inf)
    return _rerank(root, score, torch.cat(tokens, 1), torch.cat(parents, 1), size, len(scores))


def grow_product(root: Tensor, logits: Tensor, branching: int, size: int) -> Proposal:
    """Draft a tree from guesses that do not know each other: a path's chance is the product of its tokens' own.

    Expands the likeliest nodes by depth and keeps the best `size` of all, as EAGLE-2 does, so that a step spends its
    nodes where its heads are sure.

    Args:
        root: `[B]`, -1 for done rows.
        logits: `[K, B, V]`, of depth 1 to K.
        branching: children a node, and nodes expanded a level.
        size: nodes kept, the root excluded.
    """
    best = torch.log_softmax(logits.float(), dim=-1).topk(min(branching, logits.shape[-1]), dim=-1)
    chances, ids = best.values.to(root.device), best.indices.to(root.device)  # [K, B, R]
    scores, tokens, parents = [], [], []
    beam_score = torch.zeros(len(root), 1, device=root.device)
    beam = torch.full((len(root), 1), -1, device=root.device)  # candidate index of the nodes being expanded
    offset = 0
    for chance, token in zip(chances, ids, strict=True):
        score = (beam_score[..., None] + chance[:, None]).flatten(1)  # [B, beam * R]
        scores.append(score)
        tokens.append(token.repeat(1, beam.shape[1]))
        parents.append(beam.repeat_interleave(token.shape[1], dim=1))
        picked = score.topk(min(branching, score.shape[1]), dim=1).indices
        beam, beam_score = picked + offset, score.gather(1, picked)
        offset += score.shape[1]
    return _rerank(root, torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(parents, 1), size, len(scores))


def _rerank(root: Tensor, scores: Tensor, tokens: Tensor, parents: Tensor, size: int, depth: int) -> Proposal:
    """Keep the `size` best of all candidates `[B, C]`; a parent is never worse than its child and comes before it.

    Those of -inf were not grown or are not worth a node. They come last in their row, so that columns of nothing else
    can be cut off.
    """
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :size]
    grown = scores.gather(1, best) > -torch.inf
    order = torch.where(grown, best, best + scores.shape[1]).argsort(dim=1)  # by depth
    kept, grown = best.gather(1, order), grown.gather(1, order)  # [B, size]
    place = torch.arange(1, kept.shape[1] + 1, device=kept.device).expand_as(kept)
    index = torch.full_like(tokens, -1).scatter_(1, kept, place)  # [B, C] node of each kept candidate
    above = parents.gather(1, kept)
    # A node that was not grown may lack its parent or come before it; it is no real one, and any parent will do.
    node_parents = torch.where(grown & (above >= 0), index.gather(1, above.clamp(min=0)).clamp(min=0), 0)
    first = torch.full_like(root, -1)[:, None]
    return tree_proposal(
        root,
        torch.cat([root.clamp(min=0)[:, None], tokens.gather(1, kept)], dim=1),
        torch.cat([first, node_parents], dim=1),
        depth,
        torch.nn.functional.pad(grown, (1, 0), value=True),
    )


def tree_proposal(root: Tensor, tokens: Tensor, parents: Tensor, depth: int, grown: Tensor | None = None) -> Proposal:
    """Make a proposal of point masses whose column 0 becomes the roots; done rows have no real node.

    Args:
        root: `[B]`, -1 for done rows.
        tokens: `[B, N]`.
        parents: `[B, N]`.
        depth: of the deepest node.
        grown: `[B, N]` nodes that were drafted; None = all.
    """
    tokens[:, 0] = root.clamp(min=0)
    real = (root >= 0)[:, None].expand_as(tokens)
    if grown is not None:
        real = real & grown
    return Proposal(tokens, parents, real, None, depth)


def within(proposal: Proposal, depth: Tensor) -> Proposal:
    """Return the proposal on the device of `depth [B]`, without the nodes that lie deeper than a row may draft."""
    real = proposal.real & (proposal.depths <= depth.to(proposal.real.device)[:, None])
    probs = None if proposal.draft_probs is None else proposal.draft_probs.to(depth.device)
    tokens, parents, real = (tensor.to(depth.device) for tensor in (proposal.tokens, proposal.parents, real))
    return Proposal(tokens, parents, real, probs, proposal.max_depth)
