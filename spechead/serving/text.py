"""From tokens to text while they come: whole characters only, and never a character of a stop string.

`TextStream` is one row's stopping criterion and its text at once: the decode loop shows it every token; what it has
released can no longer be part of a stop string or of an unfinished character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.convert_slow_tokenizer import bytes_to_unicode

UNKNOWN = "\ufffd"
UNFINISHED = 4  # a character has at most four bytes, each of which may show as one replacement character
CONTEXT = 8  # tokens before a new one that its text may depend on
WINDOW = 32  # tokens decoded at once before older ones are let go
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Detokenizer:
    """Turn tokens into text one by one; the pieces joined are the text of all of them.

    Only the last few tokens are decoded again, so that a token costs the same at any length.

    Args:
        tokenizer: the target's.
        prompt: the prompt's ids: whether the first word begins with a space depends on them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self._window = list(prompt[-CONTEXT:])
        self._given = self._settled(self._decode(self._window))  # characters of the window's text given out before

    def push(self, token: int) -> str:
        """Take one token; returns the text that is settled by it, perhaps none."""
        self._window.append(token)
        text = self._decode(self._window)
        piece = text[self._given : self._settled(text)]
        self._given += len(piece)
        if len(self._window) > WINDOW:
            self._shorten(text)
        return piece

    def finish(self) -> str:
        """Return what is left, an unfinished character as a replacement character."""
        text = self._decode(self._window)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    @staticmethod
    def _settled(text: str) -> int:
        """Return how many leading characters later tokens cannot change."""
        open_ended = len(text) - len(text.rstrip(UNKNOWN))
        return len(text) - min(open_ended, UNFINISHED)

    def _shorten(self, text: str) -> None:
        """Let old tokens go where the rest, decoded alone, still ends the text, a settled character first."""
        ungiven = len(text) - self._given
        for start in range(len(self._window) - CONTEXT, 0, -1):
            tail = self._decode(self._window[start:])
            if len(tail) > ungiven and text.endswith(tail):
                break
        else:
            if len(self._window) < 4 * WINDOW:
                return
            start = len(self._window) - CONTEXT  # tokens without text, or bytes that are no text: nothing to keep
            tail = self._decode(self._window[start:])
        self._window = self._window[start:]
        self._given = max(len(tail) - ungiven, 0)


class TextStream(StoppingCriteria):
    """The text of one row, cut at the first stop string.

    Args:
        detokenizer: a fresh one.
        stop: strings that end the text; they are never part of it.
        ends: ids of end tokens, which have no text.

    Attributes:
        begins: where the last token's text begins, in characters of the whole text.
        known: length of the text known so far, cut at a stop string.
        released: length of the text handed out by `take`.
        stopped: a stop string was met.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], ends: frozenset[int]) -> None:
        self.detokenizer, self.stop, self.ends = detokenizer, tuple(stop), ends
        self.begins = self.known = self.released = 0
        self.stopped = False
        self._held = ""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        """Take the token that a row's ids `[1, end]` end with; returns whether a stop string is complete."""
        token = int(input_ids[0, -1])
        self.begins = self.known
        if token not in self.ends:
            self._add(self.detokenizer.push(token))
        return self.stopped

    def take(self) -> str:
        """Return the text released since the last take."""
        held = 0 if self.stopped else max(map(self._overlap, self.stop), default=0)
        return self._release(len(self._held) - held)

    def close(self) -> str:
        """Return all that is left, once the row has ended."""
        if not self.stopped:
            self._add(self.detokenizer.finish())
        return self._release(len(self._held))

    def _add(self, piece: str) -> None:
        self._held += piece
        found = [place for place in map(self._held.find, self.stop) if place >= 0]
        if found:
            self.stopped = True
            self._held = self._held[: min(found)]
        self.known = self.released + len(self._held)

    def _release(self, count: int) -> str:
        piece, self._held = self._held[:count], self._held[count:]
        self.released += len(piece)
        return piece

    def _overlap(self, stop: str) -> int:
        """Return how many of the held characters may begin a stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)


@cache
def _byte_alphabet() -> dict[str, int]:
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> tuple[str, bytes]:
    """Return one token's text and its own bytes, which differ where it holds a part of a character."""
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if UNKNOWN not in text:
        return text, text.encode()
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if match := BYTE_TOKEN.fullmatch(piece):
        return text, bytes([int(match.group(1), 16)])
    alphabet = _byte_alphabet()
    if piece and all(letter in alphabet for letter in piece):
        return text, bytes(alphabet[letter] for letter in piece)
    return text, text.encode()
