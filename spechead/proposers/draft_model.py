"""Draft model: a smaller causal LM with the target's vocabulary drafts a chain, on its own ragged cache.

Leviathan et al. 2023; Chen et al. 2023. q is exactly the law each token was drawn from: a point mass for greedy and
seeded rows, else the call's temperature, top-k and top-p over the draft's logits, masked to the shared ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache import RaggedCache
from ..config import DraftingConfig
from ..context import Context
from ..proposal import Proposal
from ..sampling import draft_tokens, warp
from ..target import Target
from ..tree import chain_parents
from .base import BaseProposer


@dataclass
class DraftState:
    """A batch's draft: its cache, and the drafted tokens that lie in it behind each row's last root.

    Attributes:
        cache: the draft's own; its lengths count tokens that were the row's when they were fed.
        root_at: `[B]` position of the root that the fed tokens follow.
        fed: `[B, M]` drafted tokens in the cache, from position root_at + 1.
        fed_length: `[B]` how many of them.
    """

    cache: RaggedCache
    root_at: Tensor
    fed: Tensor
    fed_length: Tensor


class DraftModelProposer(BaseProposer):
    """Draft with a causal LM of the same vocabulary.

    Args:
        draft: the draft model, wrapped (and probed) as a Target.
        num_draft_tokens: tokens drafted a step.
        shared: leading ids that both models share; others are never drafted.
        drafting: the draft's own temperature and confidence stop.
    """

    name = "draft_model"

    def __init__(
        self,
        draft: Target,
        num_draft_tokens: int = 5,
        shared: int | None = None,
        drafting: DraftingConfig | None = None,
    ) -> None:
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens={num_draft_tokens} proposes nothing; give at least 1.")
        self.draft, self.num_draft_tokens = draft, num_draft_tokens
        self.shared = shared if shared is not None else draft.vocab_size
        self.drafting = drafting or DraftingConfig()
        self.max_positions: int = getattr(draft.config, "max_position_embeddings", None) or 1 << 30

    @property
    def weights(self) -> int:
        """Parameters of the draft model."""
        return int(self.draft.model.num_parameters())

    def start(self, context: Context) -> None:
        """Feed the prompts to the draft, unless they are wider than its positions: then rows are fed as they draft."""
        width = context.rows[0].prompt_width
        ids = self._known(context.ids[:, :width])
        pads = context.pads.to(self.draft.device)
        cache = self.draft.new_cache(context.batch, width + self.num_draft_tokens + 1)
        if width <= self.max_positions:
            mask = (torch.arange(width, device=pads.device)[None, :] >= pads[:, None]).long()
            self.draft.prefill(ids, None if bool((pads == 0).all()) else mask, cache)
            cache.strip(pads)
        nothing = ids.new_zeros(context.batch, 0)
        context.state[id(self)] = DraftState(cache, context.cached.to(pads.device), nothing, ids.new_zeros(len(ids)))

    def propose(self, context: Context) -> Proposal:
        """Return one sampled (or, for greedy rows, chosen) chain a row."""
        state: DraftState = context.state[id(self)]
        device = self.draft.device
        cached = context.cached.to(device)
        reach = (self.max_positions - cached).clamp(min=0)
        limit = torch.minimum(context.room().to(device), reach).clamp(max=self.num_draft_tokens)  # [B]
        live = (limit > 0) & ~context.done.to(device)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        real: list[Tensor] = []
        if bool(live.any()):
            logits = self._catch_up(context, state, live)
        while bool(live.any()):
            law, token = self._draw(context, logits, live)
            tokens.append(token)
            real.append(live)
            laws.append(law)
            sure = self._confident(law, token)
            live = live & sure & (limit > len(tokens))
            if bool(live.any()):
                logits = self._feed(state, token, live)
        return self._chain(context, tokens, real, laws)

    def select_rows(self, context: Context, index: Tensor) -> None:
        """Keep the draft's state of rows `index [B']`."""
        state: DraftState = context.state[id(self)]
        index = index.to(self.draft.device)
        state.cache.select_rows(index)
        state.root_at, state.fed, state.fed_length = state.root_at[index], state.fed[index], state.fed_length[index]

    def add_rows(self, context: Context, other: Context) -> None:
        """Append the draft's state of the other rows."""
        mine: DraftState = context.state[id(self)]
        theirs: DraftState = other.state[id(self)]
        width = max(mine.fed.shape[1], theirs.fed.shape[1])
        fed = [torch.nn.functional.pad(s.fed, (0, width - s.fed.shape[1])) for s in (mine, theirs)]
        mine.cache.add_rows(theirs.cache)
        mine.root_at = torch.cat([mine.root_at, theirs.root_at])
        mine.fed, mine.fed_length = torch.cat(fed), torch.cat([mine.fed_length, theirs.fed_length])

    def _catch_up(self, context: Context, state: DraftState, live: Tensor) -> Tensor:
        """Drop what was rejected, feed what the draft has not seen, up to the root; returns logits `[B, V]` there."""
        device = self.draft.device
        cached = context.cached.to(device)
        order = torch.arange(state.fed.shape[1], device=device)[None, :]
        after = context.tokens_at((state.root_at[:, None] + 1 + order).to(context.ids.device)).to(device)
        same = (after == state.fed) & (order < state.fed_length[:, None])
        matched = same.int().cumprod(1).sum(1)
        known = torch.where(state.fed_length > 0, state.root_at + 1 + matched, state.cache.lengths)
        state.cache.truncate(torch.minimum(known, cached))
        missing = torch.where(live, cached + 1 - state.cache.lengths, 0)  # [B], the root included
        steps = torch.arange(int(missing.max()), device=device)[None, :]
        positions = state.cache.lengths[:, None] + steps
        nodes = self._known(context.tokens_at(positions.to(context.ids.device)))
        logits = self._forward(state.cache, nodes, steps < missing[:, None])
        state.root_at, state.fed = cached, nodes[:, :0]
        state.fed_length = torch.zeros_like(cached)
        last = (missing - 1).clamp(min=0)
        return logits[torch.arange(len(logits), device=device), last]

    def _known(self, ids: Tensor) -> Tensor:
        """Return ids for the draft: one it has no row for is fed as its last row, which costs acceptance only."""
        return ids.to(self.draft.device).clamp(max=self.draft.vocab_size - 1)

    def _feed(self, state: DraftState, token: Tensor, live: Tensor) -> Tensor:
        """Feed each live row's drafted token; returns logits `[B, V]` after it."""
        state.fed = torch.cat([state.fed, token[:, None]], dim=1)
        state.fed_length = state.fed_length + live
        return self._forward(state.cache, token[:, None], live[:, None])[:, 0]

    def _forward(self, cache: RaggedCache, nodes: Tensor, real: Tensor) -> Tensor:
        parents = chain_parents(len(nodes), nodes.shape[1], nodes.device)
        proposal = Proposal(nodes, parents, real, None, nodes.shape[1] - 1)
        logits = self.draft.forward(proposal, cache).logits
        cache.advance(real.sum(1))
        return logits

    def _draw(self, context: Context, logits: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """Draw each live row's next token; returns the law `[B, V]` over the target's vocabulary, and tokens `[B]`."""
        scores = logits[:, : self.shared].float().to(context.root.device)
        scores = torch.nn.functional.pad(scores, (0, context.target.vocab_size - self.shared), value=-torch.inf)
        samplers = [row.sampler for row in context.rows]
        law = torch.softmax(warp(samplers, scores, self.drafting.temperature), dim=-1)
        return law, draft_tokens(samplers, context.draws, law, live.to(law.device)).to(logits.device)

    def _confident(self, law: Tensor, token: Tensor) -> Tensor:
        if self.drafting.confidence_threshold is None:
            return torch.ones_like(token, dtype=torch.bool)
        drawn = law.gather(1, token.to(law.device)[:, None]).squeeze(1)
        return (drawn >= self.drafting.confidence_threshold).to(token.device)

    def _chain(self, context: Context, tokens: list[Tensor], real: list[Tensor], laws: list[Tensor]) -> Proposal:
        if not tokens:
            return Proposal.root_only(context.root)
        device = context.root.device
        drafted, used = torch.stack(tokens, 1).to(device), torch.stack(real, 1).to(device)
        if not context.draws_drafts:
            return Proposal.chain(context.root, drafted, used)
        probs = torch.stack(laws, dim=1)  # [B, K, V]
        chosen = torch.tensor([not row.sampler.draws_drafts for row in context.rows], device=device)
        one_hot = torch.zeros_like(probs).scatter_(2, drafted[..., None], 1.0)
        return Proposal.chain(context.root, drafted, used, torch.where(chosen[:, None, None], one_hot, probs))
