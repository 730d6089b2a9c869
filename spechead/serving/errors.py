"""Errors in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, and how other errors become one.

Raised by every part of the server that refuses something; app.py and gate.py answer with them. A message names what
was given, what is allowed and what to do; it never holds a path, a secret or a traceback.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any


class ApiError(Exception):
    """A refusal or a failure, as the client sees it.

    Args:
        status: HTTP status.
        message: what was given, what is allowed, what to do.
        param: the request's field it is about.
        code: a word that programs can test.
        retry_after: seconds after which to try again, sent as `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def body(self) -> dict[str, Any]:
        """The response's body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the body's own."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def from_validation(errors: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> ApiError:
    """Turn the first of pydantic's errors about a body into an ApiError.

    Args:
        errors: as pydantic lists them, `loc` beginning with "body".
        fields: names that the body may have.
    """
    first = errors[0]
    place = first["loc"][1:]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    param = param.encode("ascii", "backslashreplace").decode()  # a client's own name may hold what UTF-8 cannot
    if first["type"] == "json_invalid":
        where = first["loc"][-1]
        return ApiError(400, f"the body is not valid JSON ({first['ctx']['error']}, character {where}).", code="json")
    if first["type"] == "extra_forbidden":
        allowed = ", ".join(fields) if len(place) == 1 else f"those of OpenAI's {place[0]}"
        message = f"{param}={_shown(first['input'])} is not a supported field; supported are {allowed}."
        return ApiError(400, message, param, "unsupported_field")
    if first["type"] == "missing":
        message = f"{param} is missing." if param else "the body is missing; send a JSON object as application/json."
        return ApiError(400, message, param or None, "missing_field")
    if "error" in first.get("ctx", {}):
        reason = str(first["ctx"]["error"])
        named = param or None if not isinstance(first["ctx"]["error"], FieldError) else first["ctx"]["error"].param
        return ApiError(400, reason, named, "invalid_value")
    if not param:
        return ApiError(400, "the body must be a JSON object, sent as application/json.", code="json")
    message = f"{param}={_shown(first['input'])} is not valid: {first['msg'][:1].lower()}{first['msg'][1:]}."
    return ApiError(400, message, param, "invalid_value")


class FieldError(ValueError):
    """A validator's complaint about one field of a body, found where pydantic cannot tell which.

    Args:
        param: the field.
        message: the whole message.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def whereabouts(error: BaseException) -> str:
    """Describe an unexpected error for the log: its type and the function it came from, no message and no path."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    last = frames[-1]
    return f"{type(error).__name__} in {last.name} ({PurePath(last.filename).name}:{last.lineno})"
