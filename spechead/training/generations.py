"""The target answers prompts: what to ask, and in which batches.

Chats with several user turns are answered turn by turn, each on the target's own earlier answers, a window of rows at
a time: what is in memory does not grow with the data. Answers that are there are not asked again.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from datasets import Dataset
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # ships no types

from .answer_log import Answer, AnswerLog, Question, key_of
from .chat import ChatEncoder, Skipped, UnusableRow, messages_of
from .rows import hash_of

WINDOW_ROWS = 4096  # held at once: many batches to sort by length, about 100 MB of prompts


class Backend(Protocol):
    """Answers a batch of questions of one temperature; None where an answer had to be dropped.

    Attributes:
        counts: what became of answers and requests, by reason.
    """

    counts: Counter[str]

    def answer(self, questions: Sequence[Question]) -> list[Answer | None]:
        """Return one answer a question, in order."""


def temperature_of(row_id: str, turn: int, temperatures: Sequence[float], seed: int) -> float:
    """Draw a turn's temperature from the mix, the same in every run."""
    digest = hashlib.sha256(f"{seed}:{row_id}#{turn}".encode()).digest()
    return float(temperatures[int.from_bytes(digest[:8], "big") % len(temperatures)])


class Interview:
    """Which turns of which rows are asked next.

    Args:
        rows: source rows with `messages`, `conversations` or `prompt`; they stay on disk.
        row_ids: their names, all different.
        encoder: renders histories.
        log: answers so far.
        temperatures: the mix.
        seed: of the mix.
        max_prompt_tokens: longer histories are skipped and counted.
    """

    def __init__(
        self,
        rows: Dataset,
        row_ids: Sequence[str],
        encoder: ChatEncoder,
        log: AnswerLog,
        temperatures: Sequence[float],
        seed: int,
        max_prompt_tokens: int,
    ):
        self.rows, self.row_ids, self.encoder, self.log, self.skipped = rows, row_ids, encoder, log, Skipped()
        self.temperatures, self.seed, self.max_prompt_tokens = temperatures, seed, max_prompt_tokens

    def windows(self) -> Iterator[dict[str, dict[str, Any]]]:
        """Yield the rows by name, `WINDOW_ROWS` at a time."""
        for start in range(0, len(self.row_ids), WINDOW_ROWS):
            names = self.row_ids[start : start + WINDOW_ROWS]
            yield {name: self.rows[place] for place, name in enumerate(names, start)}

    def questions(self, rows: dict[str, dict[str, Any]], turn: int) -> list[Question]:
        """Return the questions of the `turn`-th user turn that are not answered yet.

        Rows that have no such turn, or that cannot be asked it (which is counted), are taken out of `rows`.

        Raises:
            ValueError: if an answer is there that was given to another prompt.
        """
        asked = []
        for row_id, row in list(rows.items()):
            prompt = None
            try:
                prompt = self._prompt(row_id, row, turn)
            except UnusableRow as reason:
                self.skipped.add(str(reason), row)
            if prompt is None:
                del rows[row_id]
            elif key_of(row_id, turn) in self.log:
                self.log.check(key_of(row_id, turn), prompt)
            else:
                heat = temperature_of(row_id, turn, self.temperatures, self.seed)
                asked.append(Question(row_id, turn, str(row.get("source", "")), heat, prompt))
        return asked

    def _prompt(self, row_id: str, row: Mapping[str, Any], turn: int) -> list[int] | None:
        """Return the rendered history up to the `turn`-th user turn, on the target's own answers; None if there is no
        such turn."""
        messages = messages_of(row)
        users = [message for message in messages if message.get("role") == "user"]
        history = [message for message in messages[:1] if message.get("role") == "system"]
        if not users or any(not isinstance(user.get("content"), str) or not user["content"].strip() for user in users):
            raise UnusableRow("no user turn with text")
        if any(not isinstance(message.get("content"), str) for message in history):
            raise UnusableRow("a system message without text")
        if turn >= len(users):
            return None
        for place, user in enumerate(users[: turn + 1]):
            history.append({"role": "user", "content": user["content"]})
            if place < turn:
                ids = self.log.response_ids(key_of(row_id, place))
                text = self.encoder.tokenizer.decode(ids or [], skip_special_tokens=True)
                if not text.strip():
                    raise UnusableRow("a turn that follows a dropped or empty answer (and those after it)")
                history.append({"role": "assistant", "content": text})
        prompt = self.encoder.prompt(history)
        if len(prompt) > self.max_prompt_tokens:
            raise UnusableRow(f"a history of more than {self.max_prompt_tokens} tokens")
        return prompt


def count_turns(row: Mapping[str, Any]) -> int:
    """Return the user turns of a source row; 0 where it is unusable."""
    try:
        return sum(message.get("role") == "user" for message in messages_of(row))
    except UnusableRow:
        return 0


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


def answer_all(
    interview: Interview,
    backend: Backend,
    rows_per_batch: int,
    tokens_per_batch: int,
    new_tokens: int,
    show: bool,
) -> Iterator[int]:
    """Ask window by window, turn by turn and batch by batch, yielding the answer tokens of each batch as soon as it is
    on disk."""
    start, total = time.monotonic(), 0
    turns = sum(map(count_turns, interview.rows)) if show else None
    with tqdm(total=turns, unit="turn", disable=not show) as bar:
        for rows in interview.windows():
            left = sum(map(count_turns, rows.values()))
            for turn in itertools.count():
                pending = batches(interview.questions(rows, turn), rows_per_batch, tokens_per_batch, new_tokens)
                if not rows:
                    break
                for batch in pending:
                    tokens = interview.log.add(batch, backend.answer(batch))
                    total += tokens
                    bar.set_postfix_str(f"{total / (time.monotonic() - start):.0f} tokens/s")
                    bar.update(len(batch))
                    left -= len(batch)
                    yield tokens
            bar.update(left)  # answered earlier, or skipped
