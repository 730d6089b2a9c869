"""The first step of a draft that was cut out of its target: it learns to write again, on the target's own answers.

A model that lost most of its layers says nothing worth learning from, so samples of its own come second. TRL's
SFTTrainer does the training; used by draft.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset, Features, List, Value
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import SFTConfig, SFTTrainer

from ..demo_target import cache_directory
from .checkpoints import open_output, settings_of
from .recipe import as_mapping
from .rows import Rows, prepare_rows, refuse_ids_beyond
from .sources import end_ids

if TYPE_CHECKING:
    from .draft import DraftArguments, DraftTrainingArguments

ANSWERS_DIRECTORY = "answers"  # in the output directory: checkpoints, then the model itself
SHARED = (
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "seed",
    "data_seed",
    "use_cpu",
    "bf16",
    "gradient_checkpointing",
    "logging_steps",
    "save_steps",
    "logging_nan_inf_filter",
    "report_to",
    "disable_tqdm",
)


def learn_answers(
    draft: PreTrainedModel,
    asked: DraftArguments,
    training: DraftTrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    callbacks: list[TrainerCallback],
) -> PreTrainedModel:
    """Train a draft on the target's answers, or load what an earlier run of this step saved.

    Args:
        draft: in float32; trained in place.
        asked: names the answers and how they are learnt.
        training: the second step's arguments, whose schedule, precision and logging hold here too.
        tokenizer: the target's.
        callbacks: of the trainer.

    Returns:
        The draft; where a callback stopped the run early, it is not saved and the same command goes on.

    Raises:
        ValueError: if the answers hold ids that the draft lacks, or an earlier run was told something else.
    """
    directory = Path(training.output_dir) / ANSWERS_DIRECTORY
    arguments = SFTConfig(
        output_dir=str(directory),
        num_train_epochs=asked.answers_epochs,
        per_device_train_batch_size=asked.answers_batch_size,
        learning_rate=asked.answers_learning_rate,
        max_length=asked.answers_max_length,
        train_sampling_strategy="group_by_length",
        save_total_limit=1,
        **{name: getattr(training, name) for name in SHARED},
    )
    rows = prepare_rows(
        asked.answers or [],
        tokenizer,
        cache_directory(),
        asked.answers_max_length,
        as_mapping("template_kwargs", asked.template_kwargs),
        end_ids(asked, tokenizer),
    )
    refuse_ids_beyond(rows.report, draft.config.get_text_config().vocab_size)
    made_of = {name: getattr(asked, name) for name in ("target", "target_revision", "draft", "keep_every")}
    told = settings_of(arguments, rows=rows.key, batch=asked.answers_batch_size, **made_of)
    last = open_output(directory, asked.resume, told, training.process_index == 0)
    if (directory / "config.json").exists():
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=draft.dtype)
        return loaded
    trainer = SFTTrainer(
        model=draft,
        args=arguments,
        train_dataset=answers_dataset(rows),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=last)
    if trainer.state.global_step >= trainer.state.max_steps:
        trainer.save_model(str(directory))
    trained: PreTrainedModel = trainer.accelerator.unwrap_model(trainer.model)
    return trained


def answers_dataset(rows: Rows) -> Dataset:
    """Return ids and which of them are answers, as SFTTrainer reads them."""
    features = Features({"input_ids": List(Value("int32")), "assistant_masks": List(Value("int8"))})

    def masked(row: dict[str, Any]) -> dict[str, Any]:
        mask = [0] * len(row["input_ids"])
        for start, stop in row["spans"]:
            mask[start:stop] = [1] * (stop - start)
        return {"input_ids": row["input_ids"], "assistant_masks": mask}

    return rows.data.map(masked, remove_columns=rows.data.column_names, features=features)
