"""The trainer of every head: transformers' own, with batches by length, a loss over the global supervised count, and a
head that is saved as a head.

What is the library's stays the library's: Accelerate's processes and autocast, gradient accumulation, optimiser,
schedule, clipping, checkpoints with RNG and data position, logging and `report_to`. The module it trains is an
objective (`Eagle3Objective`, `EagleObjective`, `MedusaObjective`) that owns the head alone; the target is not part of
it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from .acceptance import METRIC, MeasureAcceptance
from .batch import collate, supervised_entries
from .batching import LengthBatches, refuse_long_rows
from .checkpoints import STATE_FILE
from .dataset import Features, RowDataset
from .objective import Objective

logger = logging.get_logger(__name__)

WEIGHTS = "model.safetensors"
BY_DEPTH = ("loss_by_depth", "correct", "tried")
SUMMED = ("loss", "entries", *BY_DEPTH)


class HeadTrainer(Trainer):
    """Trains a head through its objective.

    Args:
        objective: the module to train; `objective.head` is what is saved.
        args: transformers' arguments.
        train_dataset: rows to train on.
        eval_dataset: held-out rows.
        features: where the target's hidden states come from.
        tokens_per_batch: padded tokens of a micro-batch.
        rows_per_batch: rows of a micro-batch at most; None is any number. Evaluation keeps to the tokens alone.
        callbacks: further callbacks.

    Raises:
        ValueError: if a row of either data set fits no batch, the objective has parameters besides the head's, or the
            metric that chooses the best head is none that is measured.
    """

    control: TrainerControl
    loss_is_scaled_for_ga = True  # compute_loss divides by the supervised entries of the whole global batch

    def __init__(
        self,
        objective: Objective,
        args: TrainingArguments,
        train_dataset: RowDataset,
        eval_dataset: RowDataset,
        features: Features,
        tokens_per_batch: int,
        rows_per_batch: int | None = None,
        callbacks: list[Any] | None = None,
    ):
        for dataset in (train_dataset, eval_dataset):  # the first evaluation may be thousands of steps away
            refuse_long_rows(dataset.lengths, tokens_per_batch)
        super().__init__(
            model=objective, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, callbacks=callbacks
        )
        self.features, self.tokens_per_batch, self.rows_per_batch = features, tokens_per_batch, rows_per_batch
        self._batches: LengthBatches
        self._said_first = False
        self._refuse_unknown_metric(objective.depths)
        only_head = {id(parameter) for parameter in objective.head.parameters()}
        stray = [name for name, parameter in objective.named_parameters() if id(parameter) not in only_head]
        if stray:
            raise ValueError(
                f"The objective would train {stray}, which are not the head's; only head parameters may train."
            )

    def _refuse_unknown_metric(self, depths: int) -> None:
        wanted = self.args.metric_for_best_model
        if wanted is None or self.args.eval_strategy == "no":
            return
        sums: dict[str, Tensor] = {name: torch.zeros(depths if name in BY_DEPTH else ()) for name in SUMMED}
        known = [*held_out_metrics(sums, "eval")]
        known += [METRIC for callback in self.callback_handler.callbacks if isinstance(callback, MeasureAcceptance)]
        if f"eval_{wanted.removeprefix('eval_')}" not in known:
            raise ValueError(f"metric_for_best_model={wanted!r} is not measured; give one of {', '.join(known)}.")

    def get_train_dataloader(self) -> DataLoader:
        """Return this process's batches; every process gets the same number, filled up with empty ones."""
        world = self.args.world_size
        self._batches = LengthBatches(
            self.train_dataset.lengths,
            self.tokens_per_batch,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
            multiple=world * self.args.gradient_accumulation_steps,
            rank=self.args.process_index,
            world_size=world,
            rows_per_batch=self.rows_per_batch,
        )
        return self._loader(self.train_dataset, self._batches)

    def _loader(self, dataset: RowDataset, batches: LengthBatches) -> DataLoader:
        return DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            generator=torch.Generator(),  # the library's would draw from the RNG that checkpoints restore
        )

    def _run_epoch(self, *args: Any, epoch: int, **kwargs: Any) -> None:
        # The library reaches set_epoch only through Accelerate's own loader; the order must follow the epoch on resume
        # too.
        self._batches.set_epoch(epoch)
        super()._run_epoch(*args, epoch=epoch, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor:
        count = sum(supervised_entries(batch["supervised"]) for batch in batch_samples)
        count = torch.as_tensor(count, device=device)
        return self.accelerator.gather(count[None]).sum().clamp(min=1)

    def _prepare_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = super()._prepare_inputs(inputs)
        return self.features(inputs, self.accelerator.unwrap_model(self.model).taps)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return the batch's summed loss over the global batch's supervised entries.

        Gradients are averaged over processes afterwards, so the number of processes is multiplied back in.

        Raises:
            ValueError: at the first loss that is not finite, naming the rows of the batch.
        """
        numbers = inputs.pop("numbers")
        if not self._said_first:
            logger.warning(
                "Process %d of %d: its first batch holds rows %s.",
                self.args.process_index,
                self.args.world_size,
                numbers.tolist(),
            )
            self._said_first = True
        outputs = model(**inputs)
        if not torch.isfinite(outputs["loss"]):
            raise ValueError(
                f"The loss is {outputs['loss'].item()} at step {self.state.global_step + 1} in the batch of rows "
                f"{numbers.tolist()} (process {self.args.process_index}). Lower the learning rate or clip harder, or "
                "drop these rows; the last checkpoint is intact."
            )
        loss = outputs["loss"] / num_items_in_batch * self.args.world_size
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: RowDataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return the held-out loss, accuracy by depth and the acceptance length these would give.

        `expected_length` is 1 + a_1 + a_1 a_2 + ...: a chain of greedy drafts against a greedy target, were depths
        independent. Callbacks may add to the metrics before they are logged.
        """
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        world = self.args.world_size
        batches = LengthBatches(
            dataset.lengths,
            self.tokens_per_batch,
            seed=0,
            multiple=world,
            shuffle=False,
            rank=self.args.process_index,
            world_size=world,
        )
        self.model.eval()
        totals: dict[str, Tensor] = {}
        for inputs in self._loader(dataset, batches):
            inputs = self._prepare_inputs(inputs)
            inputs.pop("numbers")
            with self.accelerator.autocast():
                outputs = self.model(**inputs)
            for name in SUMMED:
                totals[name] = totals.get(name, 0) + outputs[name].double()
        self.model.train()
        totals = {name: self.accelerator.reduce(total, "sum").cpu() for name, total in totals.items()}
        metrics = held_out_metrics(totals, metric_key_prefix)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.log(metrics)
        return metrics

    def go_on(self, checkpoint: str | None) -> None:
        """Train, from a checkpoint where one is given; a run whose last step it holds takes no further one.

        The library asks whether `max_steps` are done only after a step.
        """
        state = None if checkpoint is None else TrainerState.load_from_json(str(Path(checkpoint) / STATE_FILE))
        if checkpoint is None or state is None or not 0 < self.args.max_steps <= state.global_step:
            self.train(resume_from_checkpoint=checkpoint)
            return
        self.state = state
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            checkpoint = str(Path(checkpoint).with_name(Path(state.best_model_checkpoint).name))
        self._load_from_checkpoint(checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        os.makedirs(output_dir, exist_ok=True)
        self.accelerator.unwrap_model(self.model).head.save_pretrained(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        head = self.accelerator.unwrap_model(model if model is not None else self.model).head
        head.load_state_dict(load_file(Path(resume_from_checkpoint) / WEIGHTS), strict=True)

    def _load_best_model(self) -> None:
        logger.info("Best checkpoint: %s (%s).", self.state.best_model_checkpoint, self.state.best_metric)
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def held_out_metrics(totals: dict[str, Tensor], prefix: str) -> dict[str, float]:
    """Turn sums over the held-out rows into metrics.

    Args:
        totals: `loss`, `entries` [] and `loss_by_depth`, `correct`, `tried` [J].
        prefix: of the metrics' names.
    """
    accuracy = totals["correct"] / totals["tried"].clamp(min=1)
    entries = totals["entries"].clamp(min=1)
    metrics = {
        f"{prefix}_loss": float(totals["loss"] / entries),
        f"{prefix}_expected_length": float(1 + accuracy.cumprod(0).sum()),
    }
    for depth, (right, loss) in enumerate(
        zip(accuracy, totals["loss_by_depth"] / totals["tried"].clamp(min=1), strict=True)
    ):
        metrics[f"{prefix}_accuracy_{depth + 1}"] = float(right)
        metrics[f"{prefix}_divergence_{depth + 1}"] = float(loss)
    return metrics
