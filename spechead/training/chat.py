"""Chats to token ids and answer spans, by the boundaries of what the chat template renders.

An answer is what the template adds between "history plus generation prompt" and "history plus answer", compared on
token ids: the first must be a prefix of the second, so what is trained is what serving would feed. Text is never
searched, so markers inside a user's text change nothing. A template that rewrites history (drops earlier thinking,
say) gives one row a turn; every other one gives one row a chat.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
EXAMPLES_KEPT = 3
# A template refuses a chat with its own words or, where it did not foresee one, with Python's; serving/prompts.py
# answers the same errors with a 400.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
MOST_IDS = 2**24  # no vocabulary is near it, and the counts of answers take memory up to the largest id


@dataclass(frozen=True)
class TokenRow:
    """Token ids of one training row and the half-open ranges of its answer tokens."""

    input_ids: list[int]
    spans: list[list[int]]


@dataclass
class Skipped:
    """Rows left out, counted by reason, with a few examples of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, example: object) -> None:
        """Count one row and keep it as an example if there are few."""
        self.counts[reason] += 1
        kept = self.examples.setdefault(reason, [])
        if len(kept) < EXAMPLES_KEPT:
            kept.append(str(example)[:200])

    def include(self, other: Skipped) -> None:
        """Count what another process has left out as well."""
        self.counts += other.counts
        for reason, examples in other.examples.items():
            self.examples[reason] = (self.examples.get(reason, []) + examples)[:EXAMPLES_KEPT]

    def lines(self) -> list[str]:
        """Return one line a reason: its count and its first example."""
        return [
            f"skipped {count} rows: {reason}; e.g. {self.examples[reason][0]}" for reason, count in self.counts.items()
        ]


class UnusableRow(ValueError):
    """A row that cannot be trained on; its message is the reason it is counted under."""


class ChatEncoder:
    """Turns chats into `TokenRow`s with one tokenizer, template and set of template arguments.

    Args:
        tokenizer: with a chat template.
        template_kwargs: arguments of the template (`enable_thinking` and the like), the ones used when serving.
        end_ids: token ids that end an answer; the tokenizer's EOS if None.

    Raises:
        ValueError: if the tokenizer has no chat template, or a template argument is not the template's to read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        end_ids: Iterable[int] | None = None,
    ):
        if tokenizer.chat_template is None:
            raise ValueError(
                f"The tokenizer of {tokenizer.name_or_path!r} has no chat template, so chats cannot be rendered. Use "
                "a target with one, set tokenizer.chat_template, or give rows with prompt_ids and response_ids."
            )
        own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        if taken := sorted(own & set(template_kwargs or {})):
            raise ValueError(
                f"template_kwargs sets {', '.join(taken)}, apply_chat_template's own; give names that the "
                "template names (enable_thinking and the like)."
            )
        self.tokenizer, self.template_kwargs = tokenizer, dict(template_kwargs or {})
        self.end_ids = frozenset(end_ids if end_ids is not None else [tokenizer.eos_token_id])

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a history with the generation prompt: what is fed when serving.

        Raises:
            UnusableRow: if the template refuses the history.
        """
        return self._render(messages, generation=True)

    def closing_id(self) -> int:
        """Return the end id that the template closes an answer with, else the tokenizer's EOS.

        Raises:
            ValueError: if there are several end ids and neither is one of them.
        """
        question, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}
        try:
            before = self._render([question], generation=True)
            after = self._render([question, answer], generation=False)
        except UnusableRow:  # wants a system message, say
            before = after = []
        # What both begin with is the user's turn, which may end with the same id.
        both = enumerate(zip(before, after, strict=False))
        behind = next((place for place, (one, other) in both if one != other), len(before))
        ends = (token for token in after[behind:] if token in self.end_ids)
        closing = next(ends, self.tokenizer.eos_token_id)
        if closing in self.end_ids:
            return int(closing)
        if len(self.end_ids) > 1:
            raise ValueError(
                f"None of the end ids {sorted(self.end_ids)} is what the chat template closes an answer with, nor the "
                f"tokenizer's eos_token_id={closing}. Set tokenizer.eos_token to the one that ends an answer."
            )
        return next(iter(self.end_ids))

    def _render(self, messages: Sequence[Message], generation: bool) -> list[int]:
        try:
            return list(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tokenize=True,
                    add_generation_prompt=generation,
                    return_dict=False,
                    **self.template_kwargs,
                )
            )
        except TEMPLATE_ERRORS as error:
            reason = f"the chat template refuses it ({type(error).__name__}: {str(error)[:100]})"
            raise UnusableRow(reason) from error

    def rows(self, messages: Sequence[Message]) -> list[TokenRow]:
        """Return the rows of one chat, each with `0 < answer tokens < all tokens`.

        Raises:
            UnusableRow: if the chat's roles or contents are not those of a chat, it has no answer, or the template
                refuses it or does not continue its own generation prompt.
        """
        check_messages(messages)
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise UnusableRow("no assistant turn")
        rendered = [self._turn(messages, place) for place in turns]
        last = rendered[-1].input_ids
        if all(last[: len(row.input_ids)] == row.input_ids for row in rendered):
            rendered = [TokenRow(last, [span for row in rendered for span in row.spans])]
        for row in rendered:
            answers = sum(stop - start for start, stop in row.spans)
            if not 0 < answers < len(row.input_ids):
                raise UnusableRow("no token, or every token, would be supervised")
        return rendered

    def _turn(self, messages: Sequence[Message], place: int) -> TokenRow:
        before = self._render(messages[:place], generation=True)
        after = self._render(messages[: place + 1], generation=False)
        if after[: len(before)] != before:
            raise UnusableRow("the rendered answer does not continue the generation prompt")
        stop = len(after)
        ends = [index for index in range(len(before), stop) if after[index] in self.end_ids]
        # What the template puts after the end token (ChatML's newline) is never generated.
        stop = ends[-1] + 1 if ends else stop
        if stop == len(before):
            raise UnusableRow("empty answer")
        return TokenRow(after[:stop], [[len(before), stop]])


def check_messages(messages: Sequence[Message]) -> None:
    """Raise UnusableRow unless these are system (optional), then user and assistant in turn, all with text."""
    roles = [message.get("role") for message in messages]
    body = roles[1:] if roles[:1] == ["system"] else roles
    if not body:
        raise UnusableRow("no messages")
    if any(role not in ("user", "assistant") for role in body):
        raise UnusableRow("roles other than system, user and assistant")
    if body[0] != "user":
        raise UnusableRow("the assistant speaks first")
    if any(first == second for first, second in pairwise(body)):
        raise UnusableRow("one role twice in a row")
    for message in messages:
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise UnusableRow("a message without text")


def messages_of(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row's messages from `messages`, ShareGPT's `conversations` (lists, or JSON of one) or a bare `prompt`.

    Raises:
        UnusableRow: if the row has none of them, or a ShareGPT speaker is unknown.
    """
    found = {name: value_of(row, name) for name in ("messages", "conversations")}
    for name, turns in found.items():
        if turns and not (isinstance(turns, list | tuple) and all(isinstance(turn, Mapping) for turn in turns)):
            raise UnusableRow(f"{name} is no list of turns")
    if found["messages"]:
        return [dict(message) for message in found["messages"]]
    if found["conversations"]:
        roles = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
        try:
            return [{"role": roles[turn["from"]], "content": turn["value"]} for turn in found["conversations"]]
        except (KeyError, TypeError) as error:  # a speaker that is a list, say
            raise UnusableRow(f"unknown speaker or field {error} in conversations") from error
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    raise UnusableRow("neither messages, conversations nor prompt")


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """Return a row's value, decoded where it is JSON: what sources that disagree on a column's type are brought to."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:  # a text of its own, for the reader to refuse
            pass
    return value


def given_ids(row: Mapping[str, Any]) -> TokenRow:
    """Return the row that `prompt_ids` and `response_ids` are.

    Raises:
        UnusableRow: if they are no token ids, or too few.
    """
    prompt, response = (value_of(row, name) or [] for name in ("prompt_ids", "response_ids"))
    if not all(isinstance(ids, list) and all(map(is_whole, ids)) for ids in (prompt, response)):
        raise UnusableRow("ids that are no token ids")
    if not prompt or len(response) < 2:
        raise UnusableRow("no prompt, or fewer than two answer tokens")
    return TokenRow([int(token) for token in prompt + response], [[len(prompt), len(prompt) + len(response)]])


def given_turn(row: Mapping[str, Any]) -> int:
    """Return the number of a row's first turn.

    Raises:
        UnusableRow: if `turn` is no number of a turn.
    """
    turn = value_of(row, "turn")
    if turn is None:
        return 0
    if not is_whole(turn):
        raise UnusableRow("a turn that is no number from 0 on")
    return int(turn)


def is_whole(value: object) -> bool:
    """Tell whether this is an id or a turn. One float in a file makes floats of all its numbers, so 7.0 is 7."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST_IDS and value % 1 == 0
