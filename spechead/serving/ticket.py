"""Ticket: one row that a request asks of the engine, from its prompt to its last token, and what it reports.

A request with n choices is n tickets. The event loop makes them and hears their events; the engine's thread turns each
into a `Row` and calls its criterion and its `on_token` there.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from time import monotonic

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..row import Row
from ..sampling import Sampler
from .errors import ApiError
from .text import Detokenizer, TextStream


@dataclass(frozen=True)
class Sampling:
    """A row's law: temperature 0 is greedy; 0 for top_k and min_p, 1 for top_p and repetition_penalty are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@lru_cache(maxsize=256)
def processors_of(sampling: Sampling) -> LogitsProcessorList:
    """Build transformers' own processors, in its order; rows of one law share them and are processed together."""
    found = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature == 0:
        return found
    if sampling.temperature != 1:
        found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of a request's choice: its own for the first, a hash of both for the others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<qq", seed, index), digest_size=8, person=b"choice").digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class Entry:
    """One token's log-probability under the target's processed law.

    Attributes:
        token: id.
        logprob: its log-probability.
        top: the likeliest ids and theirs, best first.
        begins: where its text begins, in characters of the answer.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    begins: int


@dataclass(frozen=True)
class Piece:
    """Text that a row has released, and the entries, if asked for, of the tokens that begin in it."""

    text: str
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Finish:
    """A row's end: "stop" (an end token or a stop string) or "length"."""

    reason: str


Event = Piece | Finish | ApiError


@dataclass(eq=False)
class Ticket:
    """One row asked of the engine.

    Attributes:
        ids: the prompt.
        max_tokens: new tokens at most.
        deliver: hears every event, from the engine's thread.
        sampling: the row's law.
        seed: makes its sample independent of the batch; None draws from the engine's generator.
        stop: stop strings.
        top_logprobs: log-probabilities are reported, with so many alternatives; None reports none.
        cancelled: nobody listens any more; the engine drops the row.
        submitted: when it was handed to the engine.
        admitted: when it left the queue.
        emitted: tokens so far, the end token included.
        reason: how it ended; empty while it runs.
    """

    ids: list[int]
    max_tokens: int
    deliver: Callable[[Event], None]
    sampling: Sampling = Sampling()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    cancelled: bool = False
    submitted: float = 0.0
    admitted: float = 0.0
    deadline: float = float("inf")
    emitted: int = 0
    reason: str = ""
    _entries: list[Entry] = field(default_factory=list)

    @property
    def late(self) -> bool:
        """Past its deadline."""
        return monotonic() > self.deadline

    def row(self, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], generator: torch.Generator) -> Row:
        """Make the row that the decode loop runs."""
        self._text = TextStream(Detokenizer(tokenizer, self.ids), self.stop, ends)
        criteria = StoppingCriteriaList([self._text])
        if ends:
            criteria.insert(0, EosTokenCriteria(sorted(ends)))
        sampler = Sampler(processors_of(self.sampling), 0, self.sampling.temperature > 0, generator, self.seed)
        width = len(self.ids)
        keep = self.top_logprobs is not None
        self._row = Row(
            sampler, criteria, width, width, width + self.max_tokens, on_token=self._on_token, keep_scores=keep
        )
        return self._row

    def report(self, event: Event) -> None:
        """Deliver an event; a listener that is gone cancels the ticket."""
        try:
            self.deliver(event)
        except RuntimeError:  # its event loop has been closed
            self.cancelled = True

    def _on_token(self, token: int) -> None:
        self.emitted += 1
        text, row = self._text, self._row
        if row.keep_scores:
            scores = row.scores.pop()
            if token not in text.ends:
                self._entries.append(self._entry(token, scores))
        piece = text.close() if row.stopped else text.take()
        # An entry leaves with the text it begins; those behind a stop string never leave.
        due = [e for e in self._entries if e.begins < text.released or (row.stopped and not text.stopped)]
        self._entries = self._entries[len(due) :]
        if piece or due:
            self.report(Piece(piece, tuple(due)))
        if row.stopped:
            self.reason = "stop" if text.stopped or token in text.ends else "length"
            self.report(Finish(self.reason))

    def _entry(self, token: int, scores: Tensor) -> Entry:
        law = torch.log_softmax(scores, dim=-1)
        best = law.topk(min(self.top_logprobs or 0, len(law)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Entry(token, float(law[token]), top, self._text.begins)
