"""transformers' TrainingArguments for heads: other defaults, what the machine decides, and what is refused.

`DeviceDefaults` is for every class of training arguments here: without `use_cpu` and `bf16` a recipe runs on what
there is, and a process never has more than one device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils import logging

from ..bench.hardware import native_bfloat16

logger = logging.get_logger(__name__)

UNSAID: Any = None  # default of what the machine decides; after __post_init__ a value

# What transformers' trainer would do with these is done otherwise by HeadTrainer, or would break a run.
IGNORED = {
    "per_device_train_batch_size": "tokens_per_batch and rows_per_batch say how large a batch is",
    "per_device_eval_batch_size": "tokens_per_batch says how large a held-out batch is",
    "auto_find_batch_size": "tokens_per_batch and rows_per_batch say how large a batch is; --dry_run shows its memory",
    "label_smoothing_factor": "the target's own law is what a head learns",
    "train_sampling_strategy": "rows of similar length always share a batch, in an order drawn by seed",
    "average_tokens_across_devices": "the loss is always over the supervised tokens of all processes",
    "bf16_full_eval": "bf16 says it for training and evaluation",
    "fp16_full_eval": "fp16 says it for training and evaluation",
    "prediction_loss_only": "evaluation measures loss and acceptance",
    "eval_accumulation_steps": "evaluation keeps sums alone",
    "include_for_metrics": "evaluation measures loss and acceptance",
    "batch_eval_metrics": "evaluation keeps sums alone",
    "dataloader_drop_last": "every row is trained on",
    "dataloader_persistent_workers": "dataloader_num_workers is all that can be said of loading",
    "dataloader_prefetch_factor": "dataloader_num_workers is all that can be said of loading",
    "save_only_model": "a run that is gone on with needs its optimiser and schedule",
    "ignore_data_skip": "a run that is gone on with takes up the rows where it left them",
    "activation_checkpointing": "an objective cannot compute layers twice; lower tokens_per_batch to save memory",
    "gradient_checkpointing": "an objective cannot compute layers twice; lower tokens_per_batch to save memory",
    "neftune_noise_alpha": "a head learns no embeddings; noise is EAGLE-1's own, on the features",
    "resume_from_checkpoint": "resume goes on from the last checkpoint in output_dir",
}


def default_of(entry: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass's field."""
    factory: Any = entry.default_factory
    return entry.default if factory is dataclasses.MISSING else factory()


def said_of(arguments: Any, *names: str) -> list[str]:
    """Return `name=value` for those fields of a dataclass that differ from their defaults."""
    defaults = {entry.name: default_of(entry) for entry in dataclasses.fields(arguments)}
    values = {name: getattr(arguments, name) for name in names}
    return [f"{name}={value!r}" for name, value in values.items() if value not in (defaults[name], {})]


def warn_of_slow_dtype(dtype: str, device_type: str) -> None:
    """Say once that a target in this dtype is slow on this device.

    Args:
        dtype: the target's, by torch's name.
        device_type: where it runs.
    """
    if dtype == "bfloat16" and device_type == "cpu" and not native_bfloat16("cpu"):
        logger.warning_once(
            "dtype=bfloat16: this CPU has no bfloat16 arithmetic, so the target runs several times slower than in "
            "float32; give --dtype float32."
        )


@dataclass
class DeviceDefaults:
    """Mixed in before TrainingArguments: on what device a run is, and in which arithmetic, unless it is said."""

    use_cpu: bool = field(
        default=UNSAID, metadata={"help": "Stay on the CPU; by default where there is no accelerator."}
    )
    bf16: bool = field(
        default=UNSAID,
        metadata={
            "help": "Autocast to bfloat16, weights and optimiser stay float32; by default where the device has "
            "bfloat16 arithmetic."
        },
    )

    def __post_init__(self) -> None:
        # Not a field: a recipe that is saved leaves them to the machine that it runs on next. bf16 is always saved,
        # since the weights depend on it.
        self.unsaid = ("use_cpu",) if self.use_cpu is None else ()
        if self.use_cpu is None:
            self.use_cpu = not torch.accelerator.is_available()
        if self.bf16 is None:
            device = None if self.use_cpu else torch.accelerator.current_accelerator()
            self.bf16 = not getattr(self, "fp16", False) and native_bfloat16("cpu" if device is None else device.type)
        super().__post_init__()  # type: ignore[misc]  # of TrainingArguments

    @property
    def n_gpu(self) -> int:
        """GPUs of this process, at most one: several would become one nn.DataParallel, which leaves what an objective
        borrows from the target on the first. More are used by more processes."""
        return min(super().n_gpu, 1)  # type: ignore[misc]  # of TrainingArguments


@dataclass
class HeadTrainingArguments(DeviceDefaults, TrainingArguments):
    """transformers' TrainingArguments with the defaults of a head's training.

    Raises:
        ValueError: for what is said of an argument that a head's training does not read, or for no steps at all.
    """

    output_dir: str = field(default="head", metadata={"help": "Where checkpoints, logs and the head go."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule."})
    warmup_steps: float = field(default=0.02, metadata={"help": "Steps of warm-up, or their share."})
    adam_beta2: float = field(default=0.95, metadata={"help": "AdamW's second beta."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradient clipping."})
    logging_steps: float = field(default=20, metadata={"help": "Steps between log lines."})
    eval_strategy: str = field(default="steps", metadata={"help": "When to evaluate."})
    eval_steps: float | None = field(default=200, metadata={"help": "Steps between evaluations."})
    save_strategy: str = field(default="steps", metadata={"help": "When to save."})
    save_steps: float = field(default=200, metadata={"help": "Steps between checkpoints."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept besides the best."})
    load_best_model_at_end: bool = field(default=True, metadata={"help": "Ship the best head, not the last."})
    metric_for_best_model: str | None = field(
        default="auto", metadata={"help": "auto: the measured acceptance length, or the expected one without prompts."}
    )
    greater_is_better: bool | None = field(
        default=None,
        metadata={"help": "Whether more of it is better; by default it is, but for losses and divergences."},
    )
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "The trainer stops at such a loss."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Every parameter is always used."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Batches carry more than labels."})
    # False and not the library's None, which it replaces by False: earlier versions saved that in every recipe.
    activation_checkpointing: bool | None = field(default=False, metadata={"help": "Not for heads."})
    gradient_checkpointing: bool | None = field(default=False, metadata={"help": "Not for heads."})

    def __post_init__(self) -> None:
        for name, instead in IGNORED.items():
            for said in said_of(self, name):
                raise ValueError(f"{said} is not for heads: {instead}. Leave it out.")
        if self.max_steps < 1 and self.max_steps != -1:
            raise ValueError(
                f"max_steps={self.max_steps} trains nothing; give at least 1, or -1 for num_train_epochs."
            )
        if self.max_steps == -1 and not self.num_train_epochs > 0:
            raise ValueError(
                f"num_train_epochs={self.num_train_epochs} trains nothing; give more than 0, or max_steps."
            )
        if self.greater_is_better is None and "divergence" in (self.metric_for_best_model or ""):
            self.greater_is_better = False  # the library knows names that end in "loss"
        super().__post_init__()
