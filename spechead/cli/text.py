"""Text as it comes, token by token, with accepted draft tokens marked."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..bench.pieces import TextPieces, drafted_flags

DRAFTED = "green"


def marked(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], steps: Sequence[tuple[int, int]]) -> Text:
    """Return finished text with accepted draft tokens in colour.

    Args:
        tokenizer: the target's.
        tokens: new ids; the first is the prompt's own, which no step emitted.
        steps: emitted and kept tokens of each step (`stats.emitted_per_step` of the row).
    """
    pieces, text = TextPieces(tokenizer), Text()
    for token, drafted in zip(tokens, drafted_flags(steps), strict=True):
        text.append(pieces.add(token), DRAFTED if drafted else "")
    return text.append(pieces.rest())


class MarkingStreamer(BaseStreamer):
    """Prints one row's text as it is generated, accepted draft tokens in colour.

    A streamer gets ids alone. All tokens between two target forwards belong to one step, and all but its last were
    drafted; so a forward of the target prints the step before it. The last step may have been cut on a drafted token:
    `finish` takes it from the figures of the call.

    Args:
        tokenizer: the target's.
        console: where to print.
        mark: colour accepted draft tokens; without it each token is printed at once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console, mark: bool) -> None:
        self.console, self.mark = console, mark
        self._pieces = TextPieces(tokenizer)
        self._prompt_seen = False
        self._step: list[int] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt (the first call) or a new token."""
        if not self._prompt_seen:
            self._prompt_seen = True
        elif self.mark:
            self._step += value.flatten().tolist()
        else:
            for token in value.flatten().tolist():
                self._print(self._pieces.add(token), False)

    def end(self) -> None:
        """Nothing: what waits is printed by `finish`, which knows how the last step ended."""

    def forward_begins(self, *_: Any) -> None:
        """Print the step that is over; a forward-pre-hook of the target."""
        self._flush(len(self._step) - 1)

    def finish(self, steps: Sequence[tuple[int, int]] | None) -> None:
        """Print the rest.

        Args:
            steps: the row's `stats.emitted_per_step`; None when nothing was drafted.
        """
        self._flush(steps[-1][1] if steps else 0)
        self._print(self._pieces.rest(), False)
        self.console.print()

    def _flush(self, drafted: int) -> None:
        for place, token in enumerate(self._step):
            self._print(self._pieces.add(token), place < drafted)
        self._step = []

    def _print(self, text: str, drafted: bool) -> None:
        if text:
            self.console.print(Text(text, DRAFTED if drafted else ""), end="", soft_wrap=True)
