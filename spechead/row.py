"""Row: what belongs to one row of a running batch alone: how it samples, when it stops, who hears of its tokens.

Made by the mixin and by the server; context.Context drives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from .sampling import Sampler


@dataclass
class Row:
    """What belongs to one row alone.

    Attributes:
        sampler: processors, greedy or not, generator.
        criteria: its stopping criteria.
        prompt_width: columns of the prompt, left pads included.
        end: columns in use: prompt and emitted tokens.
        max_length: columns at which it stops.
        on_token: called with every emitted token, for a server's stream; may be None.
        keep_scores: record this row's processed scores, whatever the context records.
        scores, logits: processed scores and raw logits `[V]` of emitted tokens, if kept.
        stopped: met a criterion.
    """

    sampler: Sampler
    criteria: StoppingCriteriaList
    prompt_width: int
    end: int
    max_length: int
    on_token: Callable[[int], None] | None = None
    keep_scores: bool = False
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    stopped: bool = False
    eos: frozenset[int] = field(init=False)
    other_criteria: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        fixed = (EosTokenCriteria, MaxLengthCriteria)
        ends = [criterion for criterion in self.criteria if type(criterion) is EosTokenCriteria]
        self.eos = frozenset(token for criterion in ends for token in criterion.eos_token_id.flatten().tolist())
        self.other_criteria = [criterion for criterion in self.criteria if type(criterion) not in fixed]

    @property
    def emitted(self) -> int:
        """Tokens emitted so far."""
        return self.end - self.prompt_width

    def stops(self, token: int, ids: Tensor) -> bool:
        """Whether the row stops on the token it has just emitted; `ids` is `[1, end]`."""
        stop = self.end >= self.max_length or token in self.eos
        scores = tuple(score[None] for score in self.scores) if self.other_criteria and self.scores else None
        for criterion in self.other_criteria:  # every criterion sees every token, as in plain decoding
            met = torch.as_tensor(criterion(ids, scores)).flatten()
            if len(met) != 1:
                raise ValueError(
                    f"{type(criterion).__name__} returned {len(met)} values for one row; with speculative=... "
                    "criteria are called a row at a time and return one value a row of the ids they are given."
                )
            stop = bool(met) or stop
        return stop


def rows_of_call(
    ids: Tensor, processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: Any, generator: Any
) -> list[Row]:
    """Make the rows of one call of generate.

    Args:
        ids: prompts `[B, P]`.
        processors: what generate prepared.
        criteria: likewise; a length criterion of the caller's own has taken the place of the config's.
        config: the generation config in force.
        generator: one torch.Generator, a list with one a row, or None.

    Raises:
        ValueError: if there are fewer or more generators than rows.
    """
    generators = generator if isinstance(generator, (list, tuple)) else [generator] * len(ids)
    for own in generators:
        if own is not None and not isinstance(own, torch.Generator):
            raise ValueError(f"generator={generator!r} must be a torch.Generator, or a list with one a row.")
    if len(generators) != len(ids):
        raise ValueError(
            f"generator= holds {len(generators)} generators for {len(ids)} rows (num_return_sequences counted); "
            "give one, or one a row."
        )
    width, sample = ids.shape[1], bool(config.do_sample)
    ends = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
    end = min(ends, default=config.max_length)
    return [
        Row(Sampler(processors, row, sample, own), criteria, width, width, end) for row, own in enumerate(generators)
    ]
