"""The main of distill_draft.py: align a small draft model with its target, on the draft's own samples.

TRL's DistillationTrainer does the training; here is what surrounds it: a draft made from the target itself where the
family has no small sibling (every k-th layer kept), the target's answers to begin with, LoRA merged when the draft is
saved, and prompts from the recipe's sources.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging
from trl import DistillationConfig, DistillationTrainer

from ..demo_target import resolve_target
from ..hub.provenance import RECIPE_FILE
from .arguments import DeviceDefaults
from .callbacks import CurveAndLog, StopOnSignal
from .chat import Skipped, UnusableRow, check_messages, messages_of
from .checkpoints import open_output, settings_of
from .checks import as_sources, at_least_one, check_dtype
from .draft_answers import ANSWERS_DIRECTORY, learn_answers
from .recipe import as_mapping, parse, save_recipe
from .rows import hash_of, load_sources
from .run import Outcome
from .sources import load_target, load_tokenizer

logger = logging.get_logger(__name__)

# Of TRL's arguments and the library's, what decides a draft besides what decides any run.
DECIDING = (
    *("beta", "lmbda", "max_completion_length", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("temperature", "top_k", "top_p"),
)


@dataclass
class DraftArguments:
    """The target, the draft it gets, and the prompts."""

    target: str = field(metadata={"help": "Target model: Hub name or directory."})
    data: list[str] = field(
        metadata={"help": "Prompts: JSONL or parquet files, directories, or Hub datasets (name[:split])."}
    )
    target_revision: str | None = field(default=None, metadata={"help": "Revision of the target."})
    dtype: str = field(default="bfloat16", metadata={"help": "The target's dtype, and the saved draft's."})
    draft: str | None = field(default=None, metadata={"help": "Draft to align: Hub name or directory."})
    keep_every: int | None = field(
        default=None, metadata={"help": "Make the draft from every k-th layer of the target."}
    )
    answers: list[str] | None = field(
        default=None,
        metadata={"help": "The target's own answers (rows of generate_data), which all weights learn first."},
    )
    answers_epochs: float = field(default=1.0, metadata={"help": "Passes over the answers."})
    answers_learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate on the answers."})
    answers_batch_size: int = field(default=2, metadata={"help": "Rows of answers a batch and process."})
    answers_max_length: int = field(default=1024, metadata={"help": "Longer rows of answers are cut."})
    lora_rank: int = field(
        default=0, metadata={"help": "Train LoRA adapters of this rank and merge them; 0 = all weights."}
    )
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapters."})
    template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of the chat template."}
    )
    limit: int | None = field(default=None, metadata={"help": "Only the first so many prompts."})
    resume: bool = field(
        default=True, metadata={"help": "Go on from the last checkpoint in output_dir, if there is one."}
    )

    def __post_init__(self) -> None:
        self.template_kwargs = as_mapping("template_kwargs", self.template_kwargs)
        self.data = as_sources(self.data)
        check_dtype(self.dtype)
        if (self.draft is None) == (self.keep_every is None):
            raise ValueError(
                "Give either draft (a model of the target's family) or keep_every (layers of the target itself)."
            )
        self.answers = [self.answers] if isinstance(self.answers, str) else self.answers
        if self.keep_every is not None and self.keep_every < 2:
            raise ValueError(f"keep_every={self.keep_every} drops no layer of the target; give at least 2.")
        at_least_one(answers_batch_size=self.answers_batch_size, lora_alpha=self.lora_alpha, limit=self.limit)
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank={self.lora_rank} must be at least 0 (0 = all weights).")
        if self.answers_epochs <= 0 or self.answers_learning_rate <= 0 or self.answers_max_length < 2:
            raise ValueError(
                f"answers_epochs={self.answers_epochs} and answers_learning_rate={self.answers_learning_rate} must be "
                f"above 0, answers_max_length={self.answers_max_length} at least 2."
            )


@dataclass
class DraftTrainingArguments(DeviceDefaults, DistillationConfig):
    """TRL's DistillationConfig with the defaults of a draft's training."""

    output_dir: str = field(default="draft", metadata={"help": "Where checkpoints, logs and the draft go."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate."})
    max_completion_length: int | None = field(
        default=128, metadata={"help": "Tokens the draft samples for each prompt."}
    )
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Such a loss shows in the log."})


def shrink(target: PreTrainedModel, keep_every: int) -> PreTrainedModel:
    """Return a new model with the target's first layer, every k-th after it, and its last; the target stays as it is.

    Args:
        target: a causal LM whose layers all have one shape.
        keep_every: k, at least 2.

    Raises:
        ValueError: if no layer would be dropped, or the layers cannot be found.
    """
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    count = int(text.num_hidden_layers)
    kept = sorted({*range(0, count, max(keep_every, 1)), count - 1})
    if keep_every < 2 or len(kept) == count:
        raise ValueError(f"keep_every={keep_every} of {count} layers drops none; give a number from 2 to {count - 1}.")
    prefix = next(
        (name for name, part in target.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count), None
    )
    if prefix is None:
        raise ValueError(f"{type(target).__name__} has no list of {count} layers to keep some of; give draft instead.")
    text.num_hidden_layers = len(kept)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[layer] for layer in kept]
    small = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    place = {layer: new for new, layer in enumerate(kept)}
    weights = {}
    for name, tensor in target.state_dict().items():
        if name.startswith(f"{prefix}."):
            layer, _, rest = name[len(prefix) + 1 :].partition(".")
            if int(layer) not in place:
                continue
            name = f"{prefix}.{place[int(layer)]}.{rest}"
        weights[name] = tensor
    small.load_state_dict(weights, strict=True)
    small.generation_config = copy.deepcopy(target.generation_config)
    return small


def prompts(asked: DraftArguments) -> Dataset:
    """Return the prompts, as messages up to the first user turn, in a column `prompt`.

    Raises:
        ValueError: if no row has one.
    """
    skipped = Skipped()
    found: list[dict[str, Any]] = []
    for row in load_sources(asked.data):
        if asked.limit is not None and len(found) >= asked.limit:
            break
        try:
            messages = messages_of(row)
            first = next(place for place, message in enumerate(messages) if message.get("role") == "user")
            check_messages(messages[: first + 1])
            found.append({"prompt": messages[: first + 1]})
        except UnusableRow as reason:
            skipped.add(str(reason), row)
        except StopIteration:
            skipped.add("no user turn", row)
    for line in skipped.lines():
        logger.warning(line)
    if not found:
        raise ValueError("No row has messages, conversations or a prompt. " + " ".join(skipped.lines()))
    return Dataset.from_list(found)


def distill_draft(argv: Sequence[str] | None = None) -> Outcome:
    """Align a draft as `--config` and overrides say, and save it merged, in the target's dtype."""
    asked, training = parse((DraftArguments, DraftTrainingArguments), argv)
    training.chat_template_kwargs = {**(training.chat_template_kwargs or {}), **asked.template_kwargs} or None
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(asked)
    tokenizer.padding_side = "left"
    target = load_target(asked, training.device)
    draft = load_draft(asked, target)
    lora = None
    if asked.lora_rank:
        lora = LoraConfig(
            r=asked.lora_rank, lora_alpha=asked.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    output, stop = Path(training.output_dir), StopOnSignal()
    halted = Outcome(None, [f"Stopped and saved in {output}; the same command goes on."])
    own_prompts = prompts(asked)
    try:
        if asked.answers:
            log = CurveAndLog(output / ANSWERS_DIRECTORY)
            draft = learn_answers(draft, asked, training, tokenizer, [stop, log])
            if stop.stopped:
                return halted
        trainer = DistillationTrainer(
            model=draft,
            teacher_model=target,
            args=training,
            train_dataset=own_prompts,
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[stop, CurveAndLog(output)],
        )
        deciding = {name: getattr(training, name, None) for name in DECIDING}
        told = settings_of(training, asked, prompts=hash_of(own_prompts["prompt"][:]), **deciding)
        trainer.train(resume_from_checkpoint=open_output(output, asked.resume, told, training.process_index == 0))
    finally:
        stop.restore()
    if stop.stopped:
        return halted
    if training.process_index == 0:
        model = trainer.accelerator.unwrap_model(trainer.model)
        model = model.merge_and_unload() if lora is not None else model
        model.to(getattr(torch, asked.dtype)).save_pretrained(output)
        tokenizer.save_pretrained(output)
        save_recipe(output / RECIPE_FILE, asked, training)
    return Outcome(output, last_lines(asked, output, draft))


def last_lines(asked: DraftArguments, output: Path, draft: PreTrainedModel) -> list[str]:
    """Say what was saved, how it is used, and how it is published."""
    return [
        f"Draft: {output} ({draft.num_parameters():,} parameters)",
        f"Use it:     spechead generate '...' --target {asked.target} --draft-model {output} "
        "--speculative draft_model",
        f"Publish it: hf upload <user>/<name> {output} --exclude 'checkpoint-*' --exclude '{ANSWERS_DIRECTORY}/*'",
    ]


def load_draft(asked: DraftArguments, target: PreTrainedModel) -> PreTrainedModel:
    """Return the draft in float32: optimisers of small models need the precision, and there is room."""
    if asked.draft is None:
        return shrink(target, asked.keep_every or 1).float()
    return AutoModelForCausalLM.from_pretrained(resolve_target(asked.draft), dtype=torch.float32)
