"""Limits: what the server admits at most, and the key-value memory that this bounds.

Checked before a request is queued, so that a running batch never meets a row it has no room for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..attach import Speculation
from ..cache import BLOCK
from ..target import Target

DEFAULT_LENGTH = 4096


@dataclass(frozen=True)
class Limits:
    """What the server admits.

    Attributes:
        max_rows: rows that run at once (a request with n choices takes n).
        max_length: prompt and answer of a row, in tokens; None takes the target's context, 4096 at most.
        max_tokens: new tokens of a row; None leaves it to max_length.
        max_queue: rows that wait; beyond it requests are answered with 429.
        timeout: seconds from a request's arrival to its last token.
        max_body: bytes of a request's body.
        prefill_tokens: prompt tokens fed between two steps of the running rows, one prompt at least.
    """

    max_rows: int = 16
    max_length: int | None = None
    max_tokens: int | None = None
    max_queue: int = 64
    timeout: float = 600.0
    max_body: int = 1 << 20
    prefill_tokens: int = 512

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} admits nothing; give a number above 0.")

    @property
    def length(self) -> int:
        """The resolved max_length."""
        return self.max_length or DEFAULT_LENGTH

    @property
    def new_tokens(self) -> int:
        """The most new tokens that a row may ask for."""
        return min(self.max_tokens or self.length, self.length - 1)

    def resolved(self, target: Target) -> Limits:
        """Fill in what the target decides.

        Raises:
            ValueError: if max_length is beyond the target's positions, or max_rows beyond what it can verify at once.
        """
        known = getattr(target.config, "max_position_embeddings", None)
        length = self.max_length or min(known or DEFAULT_LENGTH, DEFAULT_LENGTH)
        if known is not None and length > known:
            raise ValueError(f"max_length={length} is beyond the target's {known} positions; give at most {known}.")
        if target.verdict.tier == "chain" and self.max_rows > 1:
            raise ValueError(
                f"max_rows={self.max_rows}: this target takes no tree mask ({target.verdict.reason}), so one row runs "
                "at a time; set max_rows=1, or load it with attn_implementation='sdpa'."
            )
        return replace(self, max_length=length)


@torch.no_grad()
def bytes_a_slot(target: Target) -> int:
    """Return the bytes that one token of one row takes in a model's key-value cache, measured on a short prompt."""
    cache = target.new_cache(1, 1)
    target.prefill(torch.zeros(1, 1, dtype=torch.long, device=target.device), None, cache)
    return cache.nbytes() // cache.capacity


def kv_bytes(speculation: Speculation, proposer: Any, limits: Limits) -> int:
    """Return the most bytes that the key-value caches of target, draft and head can take under the limits.

    A row's buffers hold its length and the nodes of a step, and grow by whole blocks.

    Args:
        speculation: the target, and what is attached to it.
        proposer: the server's way of drafting.
        limits: resolved.
    """
    parts = getattr(proposer, "parts", [proposer])
    nodes = 1 + sum(part.nodes(part.num_draft_tokens) for part in parts if hasattr(part, "num_draft_tokens"))
    slots = (-(-(limits.length + nodes) // BLOCK) + 1) * BLOCK
    a_slot = bytes_a_slot(speculation.target)
    for part in parts:
        if hasattr(part, "draft"):
            a_slot += bytes_a_slot(part.draft)
        if hasattr(part, "head"):
            config = part.head.config
            width = config.num_key_value_heads * config.head_dim
            a_slot += 2 * config.num_hidden_layers * width * part.head.dtype.itemsize
    return limits.max_rows * slots * a_slot
