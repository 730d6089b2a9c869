"""The answers of `generate_data` on disk: kept so that a kill loses and repeats none, and none is taken for another's.

A line of a `part-*.jsonl` is one answer with its prompt's and its own token ids, EOS included. Each process appends to
its own part; on start one process cuts half-written last lines off all parts, then every process notes which answers
are there, whatever number of processes wrote them.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

from .rows import hash_of

logger = logging.get_logger(__name__)


def key_of(row_id: str, turn: int) -> str:
    """Return the name of a turn, unique in a run."""
    return f"{row_id}#{turn}"


@dataclass(frozen=True)
class Question:
    """One turn to be answered: `prompt_ids` is the rendered history with the generation prompt."""

    row_id: str
    turn: int
    source: str
    temperature: float
    prompt_ids: list[int]

    @property
    def key(self) -> str:
        """The turn's name."""
        return key_of(self.row_id, self.turn)


@dataclass(frozen=True)
class Answer:
    """The target's answer to a question; `retokenized` where only its text was known."""

    response_ids: list[int]
    finish: str
    seed: int | None = None
    retokenized: bool = False


class AnswerLog:
    """The answers of a run on disk: all parts are read, one is appended to, and in memory is only where each lies."""

    def __init__(self, directory: Path, rank: int = 0):
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"part-{rank:05d}.jsonl"
        self._places: dict[str, tuple[Path, int]] = {}  # part, and first byte of the line
        self._asked: dict[str, str] = {}  # digest of the prompt
        for part in sorted(directory.glob("part-*.jsonl")):
            start = 0
            with part.open("rb") as lines:
                for line in lines:
                    record = json.loads(line)
                    key = key_of(record["id"], record["turn"])
                    self._places[key], self._asked[key] = (part, start), hash_of(record["prompt_ids"])
                    start += len(line)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def check(self, key: str, prompt_ids: Sequence[int]) -> None:
        """Raise ValueError if the answer that is kept under this name was given to another prompt."""
        if self._asked[key] != hash_of(prompt_ids):
            row, _, turn = key.rpartition("#")
            raise ValueError(
                f"{self.path.parent} holds an answer for row {row}, turn {turn}, that was given to another prompt: "
                "the data was edited since, or its rows have no ids and moved. Give another output directory, or add "
                "rows at the end or with ids of their own."
            )

    def response_ids(self, key: str) -> list[int] | None:
        """Read an answer back; None where it was dropped.

        Raises:
            KeyError: if the turn was never answered.
        """
        part, start = self._places[key]
        with part.open("rb") as lines:
            lines.seek(start)
            ids: list[int] | None = json.loads(lines.readline())["response_ids"]
        return ids

    def add(self, questions: Iterable[Question], answers: Iterable[Answer | None]) -> int:
        """Append a batch's answers in one write; dropped ones are kept without ids, so they are not asked again.

        Returns:
            The number of answer tokens written.
        """
        lines, tokens = [], 0
        with self.path.open("ab") as part:
            start = part.tell()
            for question, answer in zip(questions, answers, strict=True):
                record: dict[str, Any] = {
                    "id": question.row_id,
                    "turn": question.turn,
                    "source": question.source,
                    "temperature": question.temperature,
                    "prompt_ids": question.prompt_ids,
                } | (asdict(answer) if answer is not None else {"response_ids": None, "finish": "dropped"})
                lines.append(json.dumps(record).encode() + b"\n")
                self._places[question.key] = self.path, start
                self._asked[question.key] = hash_of(question.prompt_ids)
                start += len(lines[-1])
                tokens += len(record["response_ids"] or [])
            part.write(b"".join(lines))
            part.flush()
            os.fsync(part.fileno())
        return tokens


def repair_parts(directory: Path) -> None:
    """Cut every part after its last newline: what follows was being written when its process was killed.

    To be called by one process, before any of them writes.
    """
    for path in sorted(directory.glob("part-*.jsonl")):
        size = path.stat().st_size
        if not size:  # an empty file cannot be mapped
            continue
        with path.open("rb") as part, mmap.mmap(part.fileno(), 0, access=mmap.ACCESS_READ) as content:
            whole = content.rfind(b"\n") + 1
        if whole < size:
            logger.warning("%s: dropping a half-written answer; it is asked again.", path)
            os.truncate(path, whole)
