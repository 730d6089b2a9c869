"""The text that each token of an answer adds. Used by the commands, for text as it comes, and by results files."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextPieces:
    """Turns ids into the text each adds; bytes of an unfinished character wait for the rest.

    Decoding starts at the last finished piece, not at the single token: many tokenizers write a token after others
    differently from a token alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._before, self._read = 0, 0

    def add(self, token: int) -> str:
        """Return the text that became certain with this token."""
        self._ids.append(token)
        known = self._decode(self._ids[self._before : self._read])
        text = self._decode(self._ids[self._before :])
        if text.endswith(INCOMPLETE):
            return ""
        self._before, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def rest(self) -> str:
        """Return what still waits at the end."""
        known = self._decode(self._ids[self._before : self._read])
        return self._decode(self._ids[self._before :])[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def drafted_flags(steps: Sequence[tuple[int, int]]) -> list[bool]:
    """Return for each new token whether it had been drafted; the first is the prompt's own, which no step emitted.

    Args:
        steps: emitted and kept tokens of each step (`stats.emitted_per_step` of the row).
    """
    return [False] + [place < kept for emitted, kept in steps for place in range(emitted)]
