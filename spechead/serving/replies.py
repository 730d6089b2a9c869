"""Replies: what the two endpoints answer, whole and as chunks of a stream, in OpenAI's shape."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from time import time
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from .text import token_text
from .ticket import Entry

LOWEST = -9999.0  # stands for the logarithm of 0, which JSON cannot write


class Reply(Protocol):
    """One request's answers: how its choices, chunks and log-probabilities are written."""

    def whole(self, index: int, text: str, entries: Sequence[Entry] | None, reason: str) -> dict[str, Any]:
        """Return a finished choice."""

    def chunk(self, index: int, text: str, entries: Sequence[Entry] | None, reason: str | None) -> dict[str, Any]:
        """Return a choice's part in one event of a stream."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the part that opens a choice's stream, or None."""

    def envelope(self, choices: list[dict[str, Any]], streamed: bool) -> dict[str, Any]:
        """Return the object around choices."""


class _Base:
    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
        self.tokenizer, self.model = tokenizer, model
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time())

    def envelope(self, choices: list[dict[str, Any]], streamed: bool) -> dict[str, Any]:
        """Return the object around choices."""
        kind = self.chunk_object if streamed else self.whole_object
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class ChatReply(_Base):
    """Answers of `/v1/chat/completions`.

    Args:
        tokenizer: the target's, for the texts of single tokens.
        model: the served name.
    """

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, index: int, text: str, entries: Sequence[Entry] | None, reason: str) -> dict[str, Any]:
        """Return a finished choice."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(entries), "finish_reason": reason}

    def chunk(self, index: int, text: str, entries: Sequence[Entry] | None, reason: str | None) -> dict[str, Any]:
        """Return a choice's part in one event of a stream."""
        delta = {"content": text} if text or reason is None else {}
        logprobs = self._logprobs(entries) if entries else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the part that names the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, entries: Sequence[Entry] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        content = [
            self._token(entry.token, entry.logprob) | {"top_logprobs": [self._token(*pair) for pair in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, own = token_text(self.tokenizer, token)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(own)}


class CompletionReply(_Base):
    """Answers of `/v1/completions`.

    Args:
        tokenizer: the target's, for the texts of single tokens.
        model: the served name.
    """

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def whole(self, index: int, text: str, entries: Sequence[Entry] | None, reason: str) -> dict[str, Any]:
        """Return a finished choice."""
        return {"index": index, "text": text, "logprobs": self._logprobs(entries), "finish_reason": reason}

    def chunk(self, index: int, text: str, entries: Sequence[Entry] | None, reason: str | None) -> dict[str, Any]:
        """Return a choice's part in one event of a stream."""
        logprobs = self._logprobs(entries) if entries else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return None: a text has no opening."""
        return None

    def _logprobs(self, entries: Sequence[Entry] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        texts = {token: token_text(self.tokenizer, token)[0] for entry in entries for token, _ in entry.top}
        return {
            "tokens": [token_text(self.tokenizer, entry.token)[0] for entry in entries],
            "token_logprobs": [max(entry.logprob, LOWEST) for entry in entries],
            # Parts of characters share one text; the likeliest of them, which comes first, is kept.
            "top_logprobs": [
                {texts[token]: max(logprob, LOWEST) for token, logprob in reversed(entry.top)} for entry in entries
            ],
            "text_offset": [entry.begins for entry in entries],
        }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return OpenAI's `usage`."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def event(data: dict[str, Any] | str) -> bytes:
    """Return one server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
