"""Acceptance measured, not estimated: held-out prompts decoded with the head as it is now, at every evaluation.

Adds `eval_acceptance_length` (emitted tokens a step, as DecodeStats defines it) to the metrics, so that it can choose
the best checkpoint. The first process decodes, the others get its figure.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..heads.base import Head
from ..heads.medusa import MedusaHeads
from ..mixin import disable_speculation, enable_speculation

logger = logging.get_logger(__name__)

METRIC = "eval_acceptance_length"


def acceptance_length(target: PreTrainedModel, head: Head, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Decode prompts greedily, one at a time, and return emitted tokens per step over all of them.

    The head in training stays as it is: a copy is cast to the target's dtype and used.

    Raises:
        ValueError: if not one step was taken (every answer ended with the prompt's own next token).
    """
    method = "medusa" if isinstance(head, MedusaHeads) else "eagle"
    device = target.get_input_embeddings().weight.device
    enable_speculation(target, head=copy.deepcopy(head).eval())
    emitted = steps = 0
    try:
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
        disable_speculation(target)
    if not steps:
        raise ValueError(
            f"None of the {len(prompts)} held-out prompts needed a step with max_new_tokens={new_tokens}; give more "
            "of either."
        )
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

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the measured length to the metrics."""
        measured = torch.zeros((), dtype=torch.float64, device=args.device if args.device.type != "mps" else "cpu")
        if self.target is not None:
            # Training's random numbers must not depend on how often it was evaluated.
            with torch.random.fork_rng(devices=[args.device] if args.device.type == "cuda" else []):
                measured += acceptance_length(self.target, self.head, self.prompts, self.new_tokens)
        if args.world_size > 1:
            distributed.broadcast(measured, src=0)
        if metrics is not None:
            metrics[METRIC] = measured.item()
