"""Answers: one request's rows on their way through the engine, heard by the event loop, whole or as a stream.

However a request ends (answered, failed, its client gone, the server going down), its rows are cancelled where they
still run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from .engine import Engine
from .errors import ApiError
from .replies import Reply, event, usage
from .ticket import Entry, Event, Finish, Piece, Ticket


class Answers:
    """The rows of one request.

    Args:
        engine: runs them.
        reply: writes them.
        prompts: one list of ids a prompt.
        make: makes the ticket of a prompt, given its ids, the choice's index, and who hears its events.
        n: choices a prompt.

    Raises:
        ApiError: if the engine takes no more.
    """

    def __init__(
        self,
        engine: Engine,
        reply: Reply,
        prompts: Sequence[list[int]],
        make: Callable[[list[int], int, Callable[[Event], None]], Ticket],
        n: int,
    ) -> None:
        self.engine, self.reply = engine, reply
        self.prompt_tokens = sum(len(ids) for ids in prompts)
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        rows = [ids for ids in prompts for _ in range(n)]
        self.tickets = [make(ids, index, self._listener(index)) for index, ids in enumerate(rows)]
        engine.submit(self.tickets)

    def _listener(self, index: int) -> Callable[[Event], None]:
        def deliver(heard: Event) -> None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, heard))

        return deliver

    async def events(self) -> AsyncIterator[tuple[int, Piece | Finish]]:
        """Yield every choice's pieces and ends as they come.

        Raises:
            ApiError: when a row failed; the others are cancelled.
        """
        open_rows = len(self.tickets)
        try:
            while open_rows:
                index, heard = await self._queue.get()
                if isinstance(heard, ApiError):
                    raise heard
                open_rows -= isinstance(heard, Finish)
                yield index, heard
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the rows that still run or wait."""
        self.engine.cancel([ticket for ticket in self.tickets if not ticket.reason])

    async def whole(self) -> dict[str, Any]:
        """Wait for all choices; returns the response."""
        texts = ["" for _ in self.tickets]
        entries: list[list[Entry]] = [[] for _ in self.tickets]
        async for index, heard in self.events():
            if isinstance(heard, Piece):
                texts[index] += heard.text
                entries[index] += heard.entries
        choices = [
            self.reply.whole(
                index, texts[index], None if ticket.top_logprobs is None else entries[index], ticket.reason
            )
            for index, ticket in enumerate(self.tickets)
        ]
        return self.reply.envelope(choices, streamed=False) | {"usage": self._usage()}

    async def stream(self, include_usage: bool) -> AsyncIterator[bytes]:
        """Yield server-sent events: one for every token that releases text, then each choice's end, then `[DONE]`."""
        tail: dict[str, Any] = {"usage": None} if include_usage else {}

        def written(choice: dict[str, Any]) -> bytes:
            return event(self.reply.envelope([choice], streamed=True) | tail)

        heard_from: set[int] = set()
        try:
            async for index, heard in self.events():
                if index not in heard_from and (opening := self.reply.opening(index)):
                    yield written(opening)
                heard_from.add(index)
                if isinstance(heard, Piece):
                    yield written(self.reply.chunk(index, heard.text, heard.entries, None))
                else:
                    yield written(self.reply.chunk(index, "", None, heard.reason))
        except ApiError as error:
            yield event(error.body)
            return
        if include_usage:
            yield event(self.reply.envelope([], streamed=True) | {"usage": self._usage()})
        yield event("[DONE]")

    def _usage(self) -> dict[str, int]:
        return usage(self.prompt_tokens, sum(ticket.emitted for ticket in self.tickets))
