"""The HTTP app: OpenAI's endpoints over one engine, and the pages that tools look at.

`create_app(model, tokenizer, ...)` is the factory; `spechead serve` runs it under uvicorn. Nothing here decodes: a
request becomes tickets for the engine, and its events become the response.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers import PreTrainedTokenizerBase

from .answers import Answers
from .engine import Engine
from .errors import ApiError, from_validation
from .gate import Gate
from .limits import Limits
from .metrics import Metrics
from .prompts import Prompts
from .protocol import ChatRequest, CompletionRequest
from .replies import ChatReply, CompletionReply, Reply
from .ticket import Event, Ticket, choice_seed

CLOSED = 499  # the client went away; nobody reads this status


class Server:
    """What the endpoints share.

    Args:
        engine: runs the rows.
        name: the served model's name.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self.limits = engine, name, engine.limits
        self.prompts = Prompts(engine.tokenizer, engine.target.vocab_size, self.limits.length - 1)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        self._check(body)
        messages = [message.model_dump() for message in body.messages]
        ids = await self.prompts.of_chat(messages, body.chat_template_kwargs)
        return await self._answer(body, [ids], ChatReply(self.engine.tokenizer, self.name), request)

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        self._check(body)
        self._check_choices(body.n * len(body.prompt))
        ids = [await self.prompts.of_prompt(prompt) for prompt in body.prompt]
        return await self._answer(body, ids, CompletionReply(self.engine.tokenizer, self.name), request)

    def check_model(self, name: str) -> None:
        """Refuse another model's name.

        Raises:
            ApiError: 404.
        """
        if name != self.name:
            message = f"model={name!r:.80} is not served here; the model is {self.name!r}."
            raise ApiError(404, message, "model", "model_not_found")

    def _check(self, body: ChatRequest | CompletionRequest) -> None:
        self.check_model(body.model)
        self._check_choices(body.n)
        if body.new_tokens is not None and body.new_tokens > self.limits.new_tokens:
            message = (
                f"max_tokens={body.new_tokens} is more than this server's {self.limits.new_tokens}; ask for fewer."
            )
            raise ApiError(400, message, "max_tokens", "invalid_value")

    def _check_choices(self, choices: int) -> None:
        most = self.limits.max_rows + self.limits.max_queue
        if choices > most:
            raise ApiError(400, f"the request has {choices} choices; this server takes {most}.", "n", "invalid_value")

    def _ticket_maker(
        self, body: ChatRequest | CompletionRequest
    ) -> Callable[[list[int], int, Callable[[Event], None]], Ticket]:
        sampling, stop, alternatives = body.sampling, tuple(body.stop), body.alternatives

        def make(ids: list[int], index: int, deliver: Callable[[Event], None]) -> Ticket:
            room = self.limits.length - len(ids)
            wanted = body.new_tokens or min(room, self.limits.new_tokens)
            if wanted > room:
                message = (
                    f"a prompt of {len(ids)} tokens and max_tokens={wanted} are {len(ids) + wanted} together; this "
                    f"server takes {self.limits.length}. Shorten the prompt, or ask for at most {room} new tokens."
                )
                raise ApiError(400, message, "max_tokens", "context_length_exceeded")
            seed = None if body.seed is None else choice_seed(body.seed, index)
            return Ticket(ids, wanted, deliver, sampling, seed, stop, alternatives)

        return make

    async def _answer(
        self, body: ChatRequest | CompletionRequest, prompts: list[list[int]], reply: Reply, request: Request
    ) -> Response:
        answers = Answers(self.engine, reply, prompts, self._ticket_maker(body), body.n)
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            return _Stream(answers, include_usage)
        work = asyncio.ensure_future(answers.whole())
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(work.result()) if work.done() else Response(status_code=CLOSED)
        finally:
            gone.cancel()
            work.cancel()
            answers.cancel()


class _Stream(StreamingResponse):
    """A stream whose rows are cancelled once it ends, however it ends: also when its client went before its start."""

    def __init__(self, answers: Answers, include_usage: bool) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(answers.stream(include_usage), headers=headers, media_type="text/event-stream")
        self.answers = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answers.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "spechead",
    speculative: Any = "auto",
    limits: Limits | None = None,
    api_key: str | None = None,
    hosts: Sequence[str] | None = None,
) -> FastAPI:
    """Make the app.

    Args:
        model: the target; heads and draft come from `enable_speculation`.
        tokenizer: the target's.
        name: what requests call the model.
        speculative: "off", a method, or a SpeculativeConfig.
        limits: what is admitted.
        api_key: asked for under /v1; None asks for none.
        hosts: names under which it may be asked for; None = any.

    Returns:
        The app; `app.state.engine` is its Engine, which runs from the app's start-up to its shutdown.

    Raises:
        ValueError: if the method cannot be used with this model, or the limits do not fit it.
    """
    metrics = Metrics(name)
    engine = Engine(model, tokenizer, speculative, limits, metrics)
    metrics.watch(engine)
    server = Server(engine, name)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await run_in_threadpool(engine.close)
        server.prompts.close()

    app = FastAPI(title="spechead", docs_url=None, redoc_url=None, lifespan=running)
    app.state.engine = engine
    app.add_middleware(Gate, api_key=api_key, max_body=engine.limits.max_body, hosts=hosts)
    app.post("/v1/chat/completions", response_model=None)(server.chat)
    app.post("/v1/completions", response_model=None)(server.completion)
    _add_pages(app, server, metrics)
    _add_error_handlers(app)
    return app


def _add_pages(app: FastAPI, server: Server, metrics: Metrics) -> None:
    length = server.limits.length
    card = {"id": server.name, "object": "model", "created": 0, "owned_by": "spechead", "max_model_len": length}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return card

    @app.get("/health", response_model=None)
    @app.head("/health", include_in_schema=False, response_model=None)
    async def health() -> Response:
        alive = server.engine.alive
        return JSONResponse({"status": "ok" if alive else "down"}, 200 if alive else 503)

    @app.get("/metrics", response_model=None)
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_error_handlers(app: FastAPI) -> None:
    async def refused(_: Request, error: Any) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    async def invalid(request: Request, error: Any) -> Response:
        chat = request.url.path.endswith("/chat/completions")
        fields = sorted((ChatRequest if chat else CompletionRequest).model_fields)
        return await refused(request, from_validation(error.errors(), fields))

    async def unreadable(request: Request, _: Any) -> Response:
        return await refused(request, ApiError(400, "the body could not be read as JSON.", code="json"))

    async def unknown(request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path[:80]} is not served; see /v1/models, /health and docs/serve.md."
        return await refused(request, ApiError(error.status_code, message, code="unknown_url"))

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(400, unreadable)
    app.add_exception_handler(404, unknown)
    app.add_exception_handler(405, unknown)
