"""Engine: one thread that owns the model and runs `decoding.step` on one ragged batch, which requests join and leave.

A request's row is fed as a small context of its own, then joins the running one between two steps; ended, cancelled
and late rows leave it the same way. The step is the one that `generate` repeats. The event loop talks to the engine
through `submit` and `cancel` alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .. import hf
from ..attach import Speculation
from ..context import Context
from ..decoding import prefill, step
from ..mixin import unwrap
from ..proposers.auto import AutoProposer
from ..proposers.base import BaseProposer
from ..proposers.costs import Ledger
from ..stats import DecodeStats
from .errors import ApiError, whereabouts
from .limits import Limits, kv_bytes
from .metrics import Metrics
from .ticket import Ticket

logger = logging.get_logger(__name__)

OFF = "off"
PREFILL_CHUNK = 512  # prompt tokens a forward: bounds the activations of a long prompt
SLOTS = 64  # of a new row's cache beyond its length, for the nodes of a step


class Engine:
    """Run rows of many requests as one batch.

    Args:
        model: the target, enabled.
        tokenizer: its tokenizer.
        speculative: "off", or what `generate(speculative=...)` takes; each new batch gets a fresh proposer, and "auto"
            keeps what it has learnt.
        limits: what is admitted.
        metrics: hears of first tokens and ends.

    Attributes:
        stats: cumulative over all batches.
        context: the running batch, None while there is none.

    Raises:
        ValueError: if the method cannot be used, or is lossy.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        speculative: Any = "auto",
        limits: Limits | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        model = unwrap(model)
        self.speculation = Speculation.of(model)
        self.target, self.tokenizer, self.speculative = self.speculation.target, tokenizer, speculative
        self.limits = (limits or Limits()).resolved(self.target)
        self.metrics = metrics or Metrics("spechead")
        self.ledger = Ledger()
        self.ends = end_tokens(model)
        proposer = self._proposer()
        self.kv_bytes = kv_bytes(self.speculation, proposer, self.limits)
        self.stats = DecodeStats(method=OFF if speculative == OFF else proposer.name, notes=list(proposer.notes))
        self.context: Context | None = None
        self._tickets: list[Ticket] = []  # in the order of the context's rows
        self._waiting: deque[Ticket] = deque()
        self._lock = threading.Condition()
        self._closing = False
        self._row_seconds = 1.0  # recent rows' time in the batch, for Retry-After
        self._generator = torch.Generator(self.target.device)
        self._generator.seed()  # torch's own default is the same in every process
        self._thread = threading.Thread(target=self._work, name="spechead-engine", daemon=True)

    @property
    def running(self) -> int:
        """Rows in the batch."""
        return len(self._tickets)

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Finish every row that was admitted or waits, then end the thread; new ones are refused from now on."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue the rows of one request, all or none.

        Raises:
            ApiError: 429 when the queue is full, 503 when the server is going down.
        """
        now = monotonic()
        with self._lock:
            if self._closing or not self.alive:
                raise ApiError(
                    503, "the server is shutting down; send the request to another one.", code="unavailable"
                )
            free = self.limits.max_queue + max(self.limits.max_rows - self.running, 0) - self.waiting
            if len(tickets) > free:
                seconds = self.waiting * self._row_seconds / self.limits.max_rows
                free = max(free, 0)
                message = (
                    f"{self.waiting} choices wait and {free} more can be taken, not {len(tickets)}; try again later."
                )
                raise ApiError(429, message, code="queue_full", retry_after=min(max(round(seconds), 1), 60))
            for ticket in tickets:
                ticket.submitted, ticket.deadline = now, now + self.limits.timeout
            self._waiting.extend(tickets)
            self._lock.notify_all()

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Drop rows that nobody listens to any more; those that have ended are left as they are."""
        with self._lock:
            for ticket in tickets:
                ticket.cancelled = True
            left = [ticket for ticket in self._waiting if ticket.cancelled]
            self._waiting = deque(ticket for ticket in self._waiting if not ticket.cancelled)
            self._lock.notify_all()
        for ticket in left:
            self._count("abort", ticket)

    def _proposer(self) -> Any:
        """Make the proposer of a new batch."""
        if self.speculative == OFF:
            return BaseProposer()
        proposer, settings = self.speculation.proposer(self.speculative)
        if settings is not None and settings.typical_acceptance() is not None:
            raise ValueError("acceptance='typical' is lossy, and the server promises the target's law; use 'exact'.")
        if isinstance(proposer, AutoProposer):
            proposer.ledger = self.ledger
        return proposer

    @torch.no_grad()
    def _work(self) -> None:
        while self._has_work():
            try:
                self._drop()
                self._admit()
                if self.context is not None:
                    self._step(self.context)
            except Exception as error:  # the batch is lost, the server is not
                lost, self._tickets, self.context = self._tickets, [], None
                self._fail(lost, error)

    def _has_work(self) -> bool:
        """Sleep until there is a row to run; False once there is none and never will be."""
        with self._lock:
            while not self._waiting and self.context is None:
                if self._closing:
                    return False
                self._lock.wait()
        return True

    def _admit(self) -> None:
        """Feed waiting prompts, first come first served, as far as free rows and the share of prefill go."""
        fed = 0
        while True:
            with self._lock:
                if not self._waiting or self.running >= self.limits.max_rows:
                    return
                if fed and fed + len(self._waiting[0].ids) > self.limits.prefill_tokens:
                    return
                ticket = self._waiting.popleft()
            fed += len(ticket.ids)
            try:
                context = self._prefilled(ticket)
            except Exception as error:  # a prompt that fails must not take the other rows with it
                self._fail([ticket], error)
                continue
            if ticket.reason:
                self._ended(ticket)
            else:
                self._join(ticket, context)

    def _prefilled(self, ticket: Ticket) -> Context:
        """Feed one prompt as a batch of its own, which emits its first token."""
        ticket.admitted = monotonic()
        self.metrics.left_queue(ticket.admitted - ticket.submitted)
        row = ticket.row(self.tokenizer, self.ends, self._generator)
        device = self.target.device
        context = Context(
            self.target,
            self._proposer() if self.context is None else self.context.proposer,
            torch.tensor([ticket.ids], device=device),
            torch.zeros(1, dtype=torch.long, device=device),
            [row],
            self.target.new_cache(1, row.max_length + SLOTS),
        )
        prefill(context, None, PREFILL_CHUNK)
        self.metrics.first_token(monotonic() - ticket.submitted)
        for name in ("prefill_forwards", "prompt_fed", "near_ties"):
            setattr(self.stats, name, getattr(self.stats, name) + getattr(context.stats, name))
        return context

    def _join(self, ticket: Ticket, context: Context) -> None:
        self._tickets = [*self._tickets, ticket]
        if self.context is None:
            self.stats.emitted_per_step = context.stats.emitted_per_step
            context.stats = self.stats
            self.context = context
        else:
            self.context.add_rows(context)

    def _step(self, context: Context) -> None:
        with hf.decode_mode(self.target.model):
            step(context)
        for ticket in self._tickets:
            if ticket.reason:
                self._ended(ticket)
        self._keep([place for place, ticket in enumerate(self._tickets) if not ticket.reason])

    def _drop(self) -> None:
        """Take out rows that were cancelled or are late, from the queue and from the batch."""
        with self._lock:
            late = [ticket for ticket in self._waiting if ticket.late]
            self._waiting = deque(ticket for ticket in self._waiting if not ticket.late)
        late += [ticket for ticket in self._tickets if ticket.late and not ticket.cancelled]
        for ticket in self._tickets:
            if ticket.cancelled:
                self._count("abort", ticket)
        for ticket in late:
            ticket.cancelled = True
            message = f"the request was not finished within {self.limits.timeout:g} seconds; ask for fewer tokens."
            ticket.report(ApiError(504, message, code="timeout"))
            self._count("timeout", ticket)
        self._keep([place for place, ticket in enumerate(self._tickets) if not ticket.cancelled])

    def _keep(self, places: list[int]) -> None:
        """Let all rows but the given ones leave; an empty batch is let go, with all its memory."""
        if self.context is None or len(places) == len(self._tickets):
            return
        self._tickets = [self._tickets[place] for place in places]
        if not places:
            self.context, self.stats.emitted_per_step = None, []
            return
        self.context.select_rows(places)

    def _ended(self, ticket: Ticket) -> None:
        self._row_seconds += 0.2 * (monotonic() - ticket.admitted - self._row_seconds)
        self._count(ticket.reason, ticket)

    def _fail(self, tickets: Sequence[Ticket], error: Exception) -> None:
        logger.error(f"the engine dropped {len(tickets)} row(s): {whereabouts(error)}")
        for ticket in tickets:
            if not ticket.reason:
                message = f"the engine failed on this request ({type(error).__name__})."
                ticket.report(ApiError(500, message, code="engine_error"))
            self._count(ticket.reason or "error", ticket)

    def _count(self, reason: str, ticket: Ticket) -> None:
        self.metrics.ended(reason, monotonic() - ticket.submitted, len(ticket.ids), ticket.emitted)


def end_tokens(model: Any) -> frozenset[int]:
    """Return the ids that end an answer, as `generate` takes them: those of the model's generation config."""
    ends = model.generation_config.eos_token_id
    return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
