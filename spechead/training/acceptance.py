"""Acceptance measured, not estimated: held-out prompts decoded with the head as it is now, at every evaluation.

Adds `eval_acceptance_length` (emitted tokens a step, as DecodeStats defines it) to the metrics, so that it can choose
the best checkpoint. The first process decodes, the others get its figure.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from ..heads.base import Head
from ..heads.medusa import MedusaHeads
from ..mixin import disable_speculation, enable_speculation

logger = logging.get_logger(__name__)

METRIC = "eval_acceptance_length"


def acceptance_length(target: PreTrainedModel, head: Head, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Decode prompts greedily, one at a time, and return emitted tokens per step over all of them.

    The head in training stays as it is: a copy is cast to the target's dtype and used. Where every answer ends with
    the prompt's own next token no step is taken, and the length is 1, as without a head.
    """
    method = "medusa" if isinstance(head, MedusaHeads) else "eagle"
    device = target.get_input_embeddings().weight.device
    own = target.generation_config
    enable_speculation(target, head=copy.deepcopy(head).eval())
    emitted = steps = 0
    try:
        # The law that heads learn is the target's, without penalties or beams that its config may ask of an answer.
        target.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=device)
            output = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                speculative=method,
                do_sample=False,
                max_new_tokens=new_tokens,
                return_dict_in_generate=True,
            )
            emitted += output.stats.emitted_tokens
            steps += output.stats.row_steps
    finally:
        target.generation_config = own
        disable_speculation(target)
    if not steps:
        logger.warning(
            "%d held-out prompts were answered by one token each: their acceptance counts as 1. Raise "
            "acceptance_prompts if evaluations say this.",
            len(prompts),
        )
        return 1.0
    return emitted / steps


class MeasureAcceptance(TrainerCallback):
    """Decodes held-out prompts with the head at each evaluation.

    Args:
        target: the loaded target; None on processes other than the first.
        head: the head in training.
        prompts: token ids of held-out prompts.
        new_tokens: to decode for each.
    """

    def __init__(self, target: PreTrainedModel | None, head: Head, prompts: Sequence[Sequence[int]], new_tokens: int):
        self.target, self.head, self.prompts, self.new_tokens = target, head, prompts, new_tokens

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Decode a prompt once: a pair that cannot be decoded shows now, and not at the first evaluation."""
        self.measure(args, self.prompts[:1], 2)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the measured length to the metrics."""
        measured = self.measure(args, self.prompts, self.new_tokens)
        if metrics is not None:
            metrics[METRIC] = measured

    def measure(self, args: TrainingArguments, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Return the first process's acceptance length, on every process.

        Raises:
            RuntimeError: on the other processes, if the first one could not decode.
        """
        device = args.device if args.device.type != "mps" else torch.device("cpu")
        measured = torch.full((), math.nan, dtype=torch.float64, device=device)
        try:
            if self.target is not None:
                # Training's random numbers must not depend on how often it was evaluated.
                with torch.random.fork_rng(devices=[args.device] if args.device.type == "cuda" else []):
                    measured.fill_(acceptance_length(self.target, self.head, prompts, new_tokens))
        finally:  # the others wait for a figure, whatever happened here
            if args.world_size > 1:
                distributed.broadcast(measured, src=0)
        if measured.isnan():
            raise RuntimeError("The first process could not decode the held-out prompts; its own error says why.")
        return measured.item()
