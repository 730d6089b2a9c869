"""Prompt lookup: propose what followed the last n-gram the last time it occurred in the row itself.

Needs no weights, no taps, no training. Saxena 2023. The index of a row grows by its new tokens only, so that a step
costs the same at any length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..context import Context
from ..proposal import Proposal
from .base import BaseProposer


class NgramIndex:
    """Where each n-gram of a row was last followed by something.

    Args:
        max_ngram: longest n-gram kept.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]

    def extend(self, tokens: list[int]) -> None:
        """Append tokens; an n-gram enters the index once the token after it is known."""
        for token in tokens:
            end = len(self.tokens)
            for size in range(1, min(self.max_ngram, end) + 1):
                self._after[size - 1][tuple(self.tokens[end - size :])] = end
            self.tokens.append(token)

    def continuation(self, count: int) -> tuple[list[int], int]:
        """Return up to `count` tokens after the last occurrence of the longest matching tail, and that tail's length.

        A copy that reaches the end of the row goes on into itself, which continues a repetition. Without a match the
        answer is no token and length 0.
        """
        end = len(self.tokens)
        for size in range(min(self.max_ngram, end), 0, -1):
            start = self._after[size - 1].get(tuple(self.tokens[end - size :]))
            if start is not None:
                period = end - start
                return [self.tokens[start + i % period] for i in range(count)], size
        return [], 0


class PromptLookupProposer(BaseProposer):
    """Draft by copying from the prompt and the generated text.

    Args:
        num_draft_tokens: tokens copied a step.
        max_ngram: longest n-gram looked up; shorter ones are tried when it has no match.

    Raises:
        ValueError: if either is below 1.
    """

    name = "prompt_lookup"

    def __init__(self, num_draft_tokens: int = 8, max_ngram: int = 3) -> None:
        for field, value in (("num_draft_tokens", num_draft_tokens), ("max_ngram", max_ngram)):
            if value < 1:
                raise ValueError(f"{field}={value} proposes nothing; give at least 1.")
        self.num_draft_tokens, self.max_ngram = num_draft_tokens, max_ngram

    def start(self, context: Context) -> None:
        """Index every row's tokens, pads left out."""
        context.state[id(self)] = [NgramIndex(self.max_ngram) for _ in context.rows]
        self._catch_up(context)

    def propose(self, context: Context) -> Proposal:
        """Return one chain per row; a row without a match gets its root alone."""
        return self.chains(context, [draft for draft, _ in self.find(context, self.num_draft_tokens)])

    def find(self, context: Context, count: int) -> list[tuple[list[int], int]]:
        """Look every row up; returns its copy of up to `count` tokens, as its room allows, and the match's length."""
        indexes = self._catch_up(context)
        rooms = context.room().tolist()
        return [index.continuation(min(count, room)) for index, room in zip(indexes, rooms, strict=True)]

    def chains(self, context: Context, drafts: list[list[int]]) -> Proposal:
        """Make one chain a row from its copied tokens; rows may have none."""
        longest = max(len(draft) for draft in drafts)
        padded = [draft + [-1] * (longest - len(draft)) for draft in drafts]
        tokens = torch.tensor(padded, device=context.root.device, dtype=torch.long).view(len(drafts), longest)
        return Proposal.chain(context.root, tokens.clamp(min=0), tokens >= 0)

    def select_rows(self, context: Context, index: Tensor) -> None:
        """Keep the indexes of rows `index [B']`."""
        indexes = context.state[id(self)]
        context.state[id(self)] = [indexes[row] for row in index.tolist()]

    def add_rows(self, context: Context, other: Context) -> None:
        """Append the other rows' indexes."""
        context.state[id(self)] = context.state[id(self)] + other.state[id(self)]

    def _catch_up(self, context: Context) -> list[NgramIndex]:
        indexes: list[NgramIndex] = context.state[id(self)]
        for row, (index, pads) in enumerate(zip(indexes, context.pads.tolist(), strict=True)):
            known = pads + len(index.tokens)
            index.extend(context.ids[row, known : context.rows[row].end].tolist())
        return indexes
