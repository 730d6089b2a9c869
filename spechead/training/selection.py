"""What is taken from the rows: the draft vocabulary (by counts of answers), the rows held out, digests of prompts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers.utils import cached_file, logging

from ..heads.fingerprint import prompt_digest
from ..hub.provenance import PROMPTS_FILE, read_digests
from .batch import RowTable
from .rows import COUNTS_FILE, Rows

logger = logging.get_logger(__name__)

WANTED_COVERAGE = 0.95  # of every source's answer tokens, by the draft vocabulary


def draft_vocabulary(rows: Rows, size: int, vocab_size: int, among: Iterable[int] | None = None) -> list[int]:
    """Return the `size` most frequent answer tokens, sorted.

    Ties and unseen tokens go by id, so a size above the number of distinct tokens is filled with the lowest unused
    ids.

    Args:
        rows: the training rows.
        size: D.
        vocab_size: V of the target's LM head, which may have more rows than its tokenizer has tokens.
        among: choose from these ids alone; None = from all V.

    Raises:
        ValueError: if D is more than there is to choose from, or the answers hold ids that the target does not have.
    """
    counts = np.load(rows.directory / COUNTS_FILE)
    ids = np.arange(vocab_size) if among is None else np.fromiter(among, dtype=np.int64)
    if size > len(ids):
        whose = "the target's" if among is None else "the given"
        raise ValueError(f"draft_vocab_size={size} is more than {whose} {len(ids)}.")
    if counts[vocab_size:].any():
        raise ValueError(
            f"The answers hold token ids from {vocab_size} on, which the target does not have; were they made by "
            "another target?"
        )
    counts = np.pad(counts[:vocab_size], (0, max(0, vocab_size - len(counts))))
    kept = ids[np.lexsort((ids, -counts[ids]))[:size]]
    return sorted(kept.tolist())


def coverage(rows: RowTable, ids: Iterable[int]) -> tuple[float, dict[str, float]]:
    """Return the share of all answer tokens that a draft vocabulary can draft, and each source's, the least first.

    A token outside it can never be accepted, so a source covered by nine tenths loses one draft in ten at every depth.

    Args:
        rows: the training rows.
        ids: target ids of the draft vocabulary.
    """
    kept = np.fromiter(ids, dtype=np.int64)
    totals: dict[str, list[int]] = {}
    for number in range(len(rows)):
        row = rows[number]
        tokens = np.concatenate([np.asarray(row["input_ids"][start:stop]) for start, stop in row["spans"]])
        found = totals.setdefault(row["source"], [0, 0])
        found[0] += int(np.isin(tokens, kept).sum())
        found[1] += len(tokens)
    shares = {source: found / total for source, (found, total) in totals.items()}
    drafted, answered = (sum(counts) for counts in zip(*totals.values(), strict=True))
    return drafted / answered, dict(sorted(shares.items(), key=lambda item: item[1]))


def report_coverage(rows: RowTable, ids: Tensor) -> dict[str, float]:
    """Say and return what share of each source's answers a draft vocabulary covers, and what to do about a low one."""
    overall, by_source = coverage(rows, ids.tolist())
    least = ", ".join(f"{source} {100 * share:.1f} %" for source, share in list(by_source.items())[:3])
    logger.warning("Draft vocabulary: %d tokens, %.2f %% of the answers; least: %s.", len(ids), 100 * overall, least)
    if min(by_source.values()) < WANTED_COVERAGE:
        logger.warning(
            "Tokens outside the draft vocabulary are never accepted. A larger draft_vocab_size covers more (a head "
            "given as init_head keeps its own)."
        )
    return by_source


def split_rows(rows: Rows, share: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """Return the numbers of training and of held-out rows; rows of one chat stay together, whatever their order.

    Raises:
        ValueError: if either has none.
    """
    chats = rows.data["chat"][:]
    draw = {chat: int(hashlib.sha256(f"{seed}:{chat}".encode()).hexdigest()[:8], 16) / 16**8 for chat in set(chats)}
    # Of few chats none may draw below a small share: the one that draws least is held out then, and never the last.
    least, most = min(draw.values()), max(draw.values())
    limit = min(max(share, math.nextafter(least, 1.0)), most)
    train = [number for number, chat in enumerate(chats) if draw[chat] >= limit]
    held_out = [number for number, chat in enumerate(chats) if draw[chat] < limit]
    if not train or not held_out:
        alike = " All have one id, so they count as one chat, which is not split; give each chat an id of its own."
        raise ValueError(
            f"held_out={share} of {len(rows)} rows leaves {len(train)} to train on and {len(held_out)} held out; "
            f"both need some.{alike if len(draw) == 1 < len(rows) else ''}"
        )
    return train, held_out


def prompt_digests(rows: RowTable, init_head: str | None = None) -> list[str]:
    """Return the digests of all rows' prompts, held-out ones included (they choose the head), and of those that the
    head was trained on before."""
    found = earlier_digests(init_head) if init_head is not None else set()
    for number in range(len(rows)):
        row = rows[number]
        found.add(prompt_digest(row["input_ids"][: row["spans"][0][0]]))
    return sorted(found)


def earlier_digests(head: str) -> set[str]:
    """Return the digests of a head's own training prompts, a directory's or a Hub repo's; none where it names none."""
    file = cached_file(
        head,
        PROMPTS_FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return set() if file is None else read_digests(Path(file))
