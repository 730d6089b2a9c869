"""Errors of the Hub in one sentence each: what it said, and what to do. Used by publish.py."""

import sys

from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)


class PublishError(RuntimeError):
    """A head could not be published; the message says what is, and is not, on the Hub."""


def network_errors() -> tuple[type[Exception], ...]:
    """Return the base error of the HTTP client that this huggingface_hub uses: its major versions changed client."""
    clients = [sys.modules[name] for name in ("httpx2", "httpx") if name in sys.modules]
    return tuple(client.HTTPError for client in clients)


FAILURES: tuple[type[Exception], ...] = (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    LocalTokenNotFoundError,
    OSError,
    RuntimeError,
    ValueError,
    *network_errors(),
)

BY_STATUS = {
    400: "The Hub refuses the request (400)",
    401: "The Hub does not accept the token (401); log in with `hf auth login`, or give --token",
    403: "The token may not write there (403); it needs write access to the repo's owner",
    404: "The Hub knows no such repo or revision, or the token may not see it (404)",
    409: "The Hub says that the repo was changed meanwhile (409); run the same command again",
    412: "The repo was changed since it was compared (412); run the same command again",
    429: "The Hub asks to slow down (429); try again later",
}


def explain(error: BaseException) -> str:
    """Return an error of the Hub or of the way to it as one sentence."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it to reach the Hub."
    if isinstance(error, HfHubHTTPError):
        status = getattr(error.response, "status_code", None)
        said = (error.server_message or "").strip()
        if status is not None and status >= 500:
            sentence = f"The Hub failed ({status}); try again later"
        else:
            sentence = BY_STATUS.get(status or 0, f"The Hub answered {status}")
        return f"{sentence}{f': {said}' if said else ''}."
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, FAILURES):
        return explain(error.__cause__)  # the client wraps what broke the upload of a large file
    if isinstance(error, network_errors()):
        return f"The connection to the Hub broke ({type(error).__name__}: {error})."
    return f"{type(error).__name__}: {error}."
