"""The target answers prompts: what to ask, in which batches, and how answers are kept so that a kill loses and repeats
none.

Each process appends to its own `part-*.jsonl`; a line is one answer with its prompt's and its own token ids, EOS
included. On start every process reads all parts, drops a half-written last line, and skips what is there, whatever
number of processes wrote it. Chats with several user turns are answered turn by turn, each on the target's own earlier
answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # ships no types
from transformers.utils import logging

from .chat import ChatEncoder, Skipped, UnusableRow, messages_of
from .rows import hash_of

logger = logging.get_logger(__name__)

PROVENANCE_FILE = "provenance.json"


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
        """Name of the turn, unique in a run."""
        return f"{self.row_id}#{self.turn}"


@dataclass(frozen=True)
class Answer:
    """The target's answer to a question; `retokenized` where only its text was known."""

    response_ids: list[int]
    finish: str
    seed: int | None = None
    retokenized: bool = False


class Backend(Protocol):
    """Answers a batch of questions of one temperature; None where an answer had to be dropped."""

    def answer(self, questions: Sequence[Question]) -> list[Answer | None]:
        """Return one answer a question, in order."""


class AnswerLog:
    """The answers of a run on disk: all parts are read, one is appended to."""

    def __init__(self, directory: Path, rank: int = 0):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.path = directory, directory / f"part-{rank:05d}.jsonl"
        if self.path.exists():
            drop_half_line(self.path)
        self.answers: dict[str, dict[str, Any]] = {}
        for part in sorted(directory.glob("part-*.jsonl")):
            for line in part.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    record = json.loads(line)
                    self.answers[f"{record['id']}#{record['turn']}"] = record

    def __contains__(self, key: str) -> bool:
        return key in self.answers

    def add(self, questions: Iterable[Question], answers: Iterable[Answer | None]) -> int:
        """Append a batch's answers in one write; dropped ones are kept without ids, so they are not asked again.

        Returns:
            The number of answer tokens written.
        """
        lines, tokens = [], 0
        for question, answer in zip(questions, answers, strict=True):
            record: dict[str, Any] = {
                "id": question.row_id,
                "turn": question.turn,
                "source": question.source,
                "temperature": question.temperature,
                "prompt_ids": question.prompt_ids,
            } | (asdict(answer) if answer is not None else {"response_ids": None, "finish": "dropped"})
            self.answers[question.key] = record
            tokens += len(record["response_ids"] or [])
            lines.append(json.dumps(record) + "\n")
        with self.path.open("a") as part:
            part.write("".join(lines))
            part.flush()
            os.fsync(part.fileno())
        return tokens


def drop_half_line(path: Path) -> None:
    """Cut a file after its last newline: what follows was being written when the process was killed."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        logger.warning("%s: dropping a half-written answer; it is asked again.", path)
        with path.open("r+b") as part:
            part.truncate(whole)


def temperature_of(row_id: str, turn: int, temperatures: Sequence[float], seed: int) -> float:
    """Draw a turn's temperature from the mix, the same in every run."""
    digest = hashlib.sha256(f"{seed}:{row_id}#{turn}".encode()).digest()
    return float(temperatures[int.from_bytes(digest[:8], "big") % len(temperatures)])


class Interview:
    """Which turns of which rows are asked next.

    Args:
        rows: source rows with `messages`, `conversations` or `prompt`.
        encoder: renders histories.
        log: answers so far.
        temperatures: the mix.
        seed: of the mix.
        max_prompt_tokens: longer histories are skipped and counted.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        encoder: ChatEncoder,
        log: AnswerLog,
        temperatures: Sequence[float],
        seed: int,
        max_prompt_tokens: int,
    ):
        self.rows, self.encoder, self.log, self.skipped = rows, encoder, log, Skipped()
        self.temperatures, self.seed, self.max_prompt_tokens = temperatures, seed, max_prompt_tokens

    def questions(self, turn: int) -> list[Question]:
        """Return the questions of the `turn`-th user turn that are not answered yet."""
        asked = []
        for place, row in enumerate(self.rows):
            row_id = str(row["id"] if row.get("id") is not None else place)
            if f"{row_id}#{turn}" in self.log:
                continue
            try:
                history = self._history(row, row_id, turn)
            except UnusableRow as reason:
                if turn == 0:
                    self.skipped.add(str(reason), row)
                continue
            if history is None:
                continue
            prompt = self.encoder.prompt(history)
            if len(prompt) > self.max_prompt_tokens:
                self.skipped.add(f"a history of more than {self.max_prompt_tokens} tokens", row)
                continue
            heat = temperature_of(row_id, turn, self.temperatures, self.seed)
            asked.append(Question(row_id, turn, str(row.get("source", "")), heat, prompt))
        return asked

    def _history(self, row: Mapping[str, Any], row_id: str, turn: int) -> list[dict[str, str]] | None:
        """Return the messages up to the `turn`-th user turn with the target's own answers, None if there is no such
        turn."""
        messages = messages_of(row)
        users = [message for message in messages if message.get("role") == "user"]
        if not users or any(not isinstance(user.get("content"), str) or not user["content"].strip() for user in users):
            raise UnusableRow("no user turn with text")
        if turn >= len(users):
            return None
        history = [message for message in messages[:1] if message.get("role") == "system"]
        for place, user in enumerate(users[: turn + 1]):
            history.append({"role": "user", "content": user["content"]})
            if place < turn:
                record = self.log.answers.get(f"{row_id}#{place}")
                if record is None or record["response_ids"] is None:
                    return None
                text = self.encoder.tokenizer.decode(record["response_ids"], skip_special_tokens=True)
                if not text.strip():
                    return None
                history.append({"role": "assistant", "content": text})
        return history


def batches(
    questions: Sequence[Question], rows_per_batch: int, tokens_per_batch: int, new_tokens: int
) -> list[list[Question]]:
    """Group questions of one temperature and similar length, longest first, so memory runs out at once or never.

    A batch holds at most `rows_per_batch` rows and `tokens_per_batch` padded tokens, new ones included.
    """
    made: list[list[Question]] = []
    for question in sorted(questions, key=lambda asked: (asked.temperature, -len(asked.prompt_ids), asked.key)):
        batch = made[-1] if made else None
        if (
            batch is None
            or batch[0].temperature != question.temperature
            or len(batch) >= rows_per_batch
            or (len(batch) + 1) * (len(batch[0].prompt_ids) + new_tokens) > tokens_per_batch
        ):
            made.append([question])
        else:
            batch.append(question)
    return made


def batch_seed(seed: int, batch: Sequence[Question]) -> int:
    """Return the seed a batch is sampled with: a function of the run's seed and the batch."""
    return int(hash_of([seed, [question.key for question in batch]])[:8], 16)


def check_provenance(directory: Path, provenance: Mapping[str, Any], is_main: bool) -> None:
    """Write what made a run's answers, or compare it with what made those that are there.

    Raises:
        ValueError: if the directory holds answers made otherwise.
    """
    path = directory / PROVENANCE_FILE
    if path.exists():
        before = json.loads(path.read_text())
        changed = [name for name in provenance if name != "versions" and before.get(name) != provenance[name]]
        if changed:
            raise ValueError(
                f"{directory} holds answers made with other settings ({', '.join(changed)}): give another output "
                "directory, or the same settings to go on."
            )
    elif is_main:
        path.write_text(json.dumps(provenance, indent=1))


def answer_all(
    interview: Interview,
    backend: Backend,
    log: AnswerLog,
    turns: int,
    rows_per_batch: int,
    tokens_per_batch: int,
    new_tokens: int,
    show: bool,
) -> Iterator[int]:
    """Ask turn by turn and batch by batch, yielding the answer tokens of each batch as soon as it is on disk."""
    start, total = time.monotonic(), 0
    for turn in range(turns):
        pending = batches(interview.questions(turn), rows_per_batch, tokens_per_batch, new_tokens)
        with tqdm(
            total=sum(len(batch) for batch in pending), desc=f"turn {turn + 1}", unit="row", disable=not show
        ) as bar:
            for batch in pending:
                tokens = log.add(batch, backend.answer(batch))
                total += tokens
                bar.set_postfix_str(f"{total / (time.monotonic() - start):.0f} tokens/s")
                bar.update(len(batch))
                yield tokens
