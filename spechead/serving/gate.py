"""Gate: what a request must pass before it is looked at: the API key, the size of its body; and the last resort after.

Pure ASGI, around the whole app: an unexpected error is answered without a word of its inside, and logged without
paths.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from transformers.utils import logging

from .errors import ApiError, whereabouts

logger = logging.get_logger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

KEPT_PREFIX = "/v1"  # what a key opens; health and metrics hold nothing of anybody's text
WITH_BODY = ("POST", "PUT", "PATCH")
BODY_SECONDS = 30.0  # for a whole body to arrive


class Gate:
    """Middleware.

    Args:
        app: the app inside.
        api_key: asked for as a bearer token under /v1; None asks for nothing.
        max_body: bytes of a body.
        hosts: names under which it may be asked for; None = any.
    """

    def __init__(self, app: App, api_key: str | None, max_body: int, hosts: Sequence[str] | None = None) -> None:
        self.app, self.api_key, self.max_body, self.hosts = app, api_key, max_body, hosts

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            self._check_host(scope)
            self._check_key(scope)
            self._check_kind(scope)
            body = await self._body(scope, receive)
            await self.app(scope, replay(body, receive), watched)
        except ApiError as error:
            await self._answer(error, scope, receive, send)
        except Exception as error:
            logger.error(f"{scope['method']} {scope['path'][:80]!r}: {whereabouts(error)}")
            if not started:
                failure = ApiError(500, f"the server failed ({type(error).__name__}).", code="server_error")
                await self._answer(failure, scope, receive, send)

    def _check_host(self, scope: MutableMapping[str, Any]) -> None:
        """Refuse another name: a browser lets in a web page whose own name was made to point at this machine."""
        if self.hosts is None:
            return
        given = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        name = given.partition("]")[0].lstrip("[") if given.startswith("[") else given.rpartition(":")[0] or given
        if name.lower() not in self.hosts:
            raise ApiError(400, f"this server answers to {', '.join(self.hosts)} only.", code="unknown_host")

    def _check_key(self, scope: MutableMapping[str, Any]) -> None:
        if self.api_key is None or not scope["path"].startswith(KEPT_PREFIX):
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, b"Bearer " + self.api_key.encode()):
            raise ApiError(401, "give the server's key as `Authorization: Bearer <key>`.", code="invalid_api_key")

    @staticmethod
    def _check_kind(scope: MutableMapping[str, Any]) -> None:
        """Refuse a body that does not say it is JSON: a web page may post any other kind without asking first."""
        if scope["method"] not in WITH_BODY or not scope["path"].startswith(KEPT_PREFIX):
            return
        given = dict(scope["headers"]).get(b"content-type", b"").split(b";")[0].strip().lower()
        if given != b"application/json":
            raise ApiError(400, "send the body with the header `Content-Type: application/json`.")

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes:
        """Read the body, as far as the limit goes."""
        if scope["method"] not in WITH_BODY:
            return b""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        body = bytearray()
        more = not (declared.isdigit() and int(declared) > self.max_body)
        if not more:
            raise self._too_large()
        clock = asyncio.get_running_loop()
        end = clock.time() + BODY_SECONDS
        while more:
            try:
                message = await asyncio.wait_for(receive(), end - clock.time())
            except asyncio.TimeoutError:
                reason = f"the body did not arrive within {BODY_SECONDS:g} seconds."
                raise ApiError(408, reason, code="timeout") from None
            body += message.get("body", b"")
            if len(body) > self.max_body:
                raise self._too_large()
            more = message.get("more_body", False)
        return bytes(body)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self.max_body} bytes; send a shorter prompt."
        return ApiError(413, message, code="body_too_large")

    @staticmethod
    async def _answer(error: ApiError, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body that was read already, then what comes after it (the disconnect)."""
    given = False

    async def once() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return once
