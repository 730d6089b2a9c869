"""Context: the state of a running batch, from the prompt to the last token. Nothing of a call lives anywhere else.

Rows may differ in length, settings and progress; they join (`add_rows`) and leave (`select_rows`) between steps.
decoding.step drives it; proposers read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from . import hf
from .cache import RaggedCache
from .fresh import Fresh
from .proposal import Acceptance, Proposal
from .row import Row
from .sampling import Draws, is_near_tie, probabilities, process
from .stats import DecodeStats
from .target import Target
from .verify import TypicalAcceptance


class Proposer(Protocol):
    """A way of drafting. A caller's own object needs `taps` and `propose` only; proposers.base fills in the rest."""

    taps: tuple[int, ...]

    def start(self, context: Context) -> None:
        """Prepare state for the rows of a batch whose prompts have just been fed."""

    def propose(self, context: Context) -> Proposal:
        """Draft for every live row."""

    def select_rows(self, context: Context, index: Tensor) -> None:
        """Keep the state of rows `index [B']`; the context still holds all rows."""

    def add_rows(self, context: Context, other: Context) -> None:
        """Append the state of the rows of `other`; both contexts still hold their own rows."""

    def carry(self, context: Context) -> Any:
        """Return what the next turn of the same conversation needs, or None."""

    def resume(self, context: Context, carried: Any) -> None:
        """Take up what `carry` returned for the very tokens that are cached now."""


class Context:
    """A running batch.

    Args:
        target: the target.
        proposer: what drafts.
        ids: prompts `[B, P]`, left-padded.
        pads: `[B]` left pads.
        rows: one Row a prompt.
        cache: the target's cache.
        typical: the lossy rule, or None.
        keep_scores, keep_logits: record processed scores, raw logits of emitted tokens.
        on_column: called with each finished column of tokens `[B]` (a caller's streamer), in order.
        pad_token: what finished rows show in columns.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        ids: Tensor,
        pads: Tensor,
        rows: list[Row],
        cache: RaggedCache,
        *,
        typical: TypicalAcceptance | None = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
        on_column: Callable[[Tensor], None] | None = None,
        pad_token: int = 0,
    ) -> None:
        self.target, self.proposer, self.cache, self.rows = target, proposer, cache, rows
        self.pads, self.typical, self.on_column, self.pad_token = pads, typical, on_column, pad_token
        self.keep_scores, self.keep_logits = keep_scores, keep_logits
        longest = min(max(row.max_length for row in rows), ids.shape[1] + 4096)
        self.ids = torch.nn.functional.pad(ids, (0, max(longest - ids.shape[1], 1)), value=pad_token)
        self.root = ids[:, -1].clone()  # [B]; -1 where done
        self.stats = DecodeStats(emitted_per_step=[[] for _ in rows])
        self.state: dict[int, Any] = {}
        self.fresh: dict[int, Fresh] = {}
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}
        self._column = ids.shape[1]

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def done(self) -> Tensor:
        """`[B]` rows that stopped."""
        return self.root < 0

    @property
    def all_done(self) -> bool:
        return all(row.stopped for row in self.rows)

    @property
    def cached(self) -> Tensor:
        """`[B]` tokens in the target's cache: the row's length without its root."""
        return self.cache.lengths

    @property
    def draws(self) -> Draws:
        """The batch's randomness."""
        return Draws([row.sampler for row in self.rows], lambda row: self.rows[row].emitted)

    @property
    def draws_drafts(self) -> bool:
        """True when some row's drafts are drawn from a law; else they are all point masses."""
        return any(row.sampler.draws_drafts for row in self.rows)

    def row_ids(self, row: int) -> Tensor:
        """A row's ids so far `[1, end]`, left pads included."""
        return self.ids[row : row + 1, : self.rows[row].end]

    def tokens_at(self, positions: Tensor) -> Tensor:
        """Tokens at positions `[B, M]` of the rows, left pads not counted; positions beyond the end give anything."""
        columns = (positions + self.pads[:, None]).clamp(0, self.ids.shape[1] - 1)
        return self.ids.gather(1, columns)

    def room(self) -> Tensor:
        """Depth to which each row may draft `[B]`: what its length allows before the bonus token, 0 for done rows."""
        room = [0 if row.stopped else max(row.max_length - row.end - 1, 0) for row in self.rows]
        depth = torch.tensor(room, device=self.root.device)
        if self.target.max_positions is not None:
            depth = torch.minimum(depth, (self.target.max_positions - 1 - self.cached).clamp(min=0))
        return depth

    def clip(self, proposal: Proposal) -> Proposal:
        """Take out the nodes that are deeper than a row may draft, and the columns that no row uses.

        Raises:
            ValueError: if a row's root, batch size or a token id is wrong.
        """
        roots = torch.where(proposal.real[:, 0], proposal.tokens[:, 0], -1)
        if len(roots) != self.batch or bool((roots != self.root).any()):
            raise ValueError(
                f"a proposal's node 0 must be each row's root {self.root.tolist()} (real, except in done rows, whose "
                f"root is -1); got {roots.tolist()}."
            )
        if proposal.tokens.shape[1] == 1:
            return proposal
        room = self.room()
        real = proposal.real & (proposal.depths <= room[:, None]) & ~self.done[:, None]
        if bool((real & ((proposal.tokens < 0) | (proposal.tokens >= self.target.vocab_size))).any()):
            raise ValueError(f"a proposal holds ids outside 0..{self.target.vocab_size - 1}, the target's vocabulary.")
        used = max(int((real.any(0).int() * torch.arange(1, real.shape[1] + 1, device=real.device)).max()), 1)
        depth = min(proposal.max_depth, used - 1, int(room.max()))
        tokens = torch.where(real, proposal.tokens, 0)  # what pads a proposal need not be a token
        return proposal.cut(tokens, real, used, depth)

    def probs_at(self, proposal: Proposal, logits: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the law of the node each row stands on, given logits `[B, N, V]` of the proposal's nodes."""

        def law(nodes: Tensor) -> Tensor:
            at = nodes.tolist()
            asked = [row for row, node in enumerate(at) if node >= 0]
            raw = torch.stack([logits[row, at[row]] for row in asked]).to(self.root.device, torch.float32)  # [R, V]
            samplers = [self.rows[row].sampler for row in asked]
            scores = process(samplers, [self.row_ids(row) for row in asked], raw)
            for place, row in enumerate(asked):
                self._pending[row] = (raw[place], scores[place])
            p = probabilities(samplers, scores)
            if len(asked) == self.batch:
                return p
            return p.new_zeros(self.batch, p.shape[1]).index_copy_(0, torch.tensor(asked, device=p.device), p)

        return law

    def on_token(self, tokens: Tensor, live: Tensor) -> Tensor:
        """Emit one token a live row: ids, scores, criteria, stream; returns the rows `[B]` that stop on it."""
        stop = [False] * self.batch
        for index, (token, counts) in enumerate(zip(tokens.tolist(), live.tolist(), strict=True)):
            if not counts:
                continue
            row = self.rows[index]
            self._reserve(row.end + 1)
            self.ids[index, row.end] = token
            row.end += 1
            raw, scores = self._pending.pop(index)
            if self.keep_logits:
                row.logits.append(raw)
            if self.keep_scores or row.keep_scores:
                row.scores.append(scores)
            if not row.sampler.do_sample:
                self.stats.near_ties += is_near_tie(scores, token)
            row.stopped = stop[index] = row.stops(token, self.row_ids(index))
            if row.on_token is not None:
                row.on_token(token)
        self._stream()
        return torch.tensor(stop, device=tokens.device)

    def commit(self, proposal: Proposal, acceptance: Acceptance, forward: hf.Forward) -> None:
        """Take over what a step kept: hand fresh features to their consumers, and set the next roots."""
        for fresh in self.fresh.values():
            path, taken = acceptance.path.clamp(min=0), {}
            for tap in fresh.taps:
                states = forward.taps[tap]
                taken[tap] = states.gather(1, path.to(states.device)[..., None].expand(-1, -1, states.shape[-1]))
            fresh.append(taken, acceptance.length)
        self.advance(acceptance)

    def advance(self, acceptance: Acceptance) -> None:
        """Set the next roots from a verification."""
        stopped = torch.tensor([row.stopped for row in self.rows], device=self.root.device)
        self.root = torch.where(stopped, -1, torch.where(acceptance.length > 0, acceptance.next_token, self.root))

    def select_rows(self, index: Sequence[int]) -> None:
        """Keep only the given rows, in that order."""
        kept = torch.tensor(list(index), dtype=torch.long, device=self.root.device)
        self.proposer.select_rows(self, kept)
        for fresh in self.fresh.values():
            fresh.select_rows(kept)
        self.cache.select_rows(kept)
        self.ids, self.pads, self.root = self.ids[kept], self.pads[kept], self.root[kept]
        self.rows = [self.rows[row] for row in index]
        self.stats.emitted_per_step = [self.stats.emitted_per_step[row] for row in index]

    def add_rows(self, other: Context) -> None:
        """Append the rows of another context of the same target and proposer, whose prompts have been fed."""
        self.proposer.add_rows(self, other)
        for key, fresh in self.fresh.items():
            fresh.add_rows(other.fresh[key])
        self.cache.add_rows(other.cache)
        width = max(self.ids.shape[1], other.ids.shape[1])
        self._reserve(width)
        other._reserve(width)
        self.ids = torch.cat([self.ids[:, :width], other.ids[:, :width]])
        self.pads, self.root = torch.cat([self.pads, other.pads]), torch.cat([self.root, other.root])
        self.rows = self.rows + other.rows
        self.stats.emitted_per_step += other.stats.emitted_per_step

    def flush(self) -> None:
        """Stream what rows that outlived the others still hold."""
        self._stream()

    def _stream(self) -> None:
        if self.on_column is None:
            return
        longest = max(row.end for row in self.rows)
        while self._column < longest and all(row.stopped or row.end > self._column for row in self.rows):
            column = self.ids[:, self._column].clone()
            ended = torch.tensor([row.end <= self._column for row in self.rows], device=column.device)
            self._column += 1
            self.on_column(torch.where(ended, self.pad_token, column))

    def _reserve(self, width: int) -> None:
        if width > self.ids.shape[1]:
            grown = max(width, self.ids.shape[1] + 4096) if width > 4096 else width
            self.ids = torch.nn.functional.pad(self.ids, (0, grown - self.ids.shape[1]), value=self.pad_token)
