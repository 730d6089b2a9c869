"""A training run from its arguments to a head on disk: the mains of train_eagle.py and train_medusa.py.

Nothing here prints; what a command shows is in the `Outcome` it returns.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, TrainerCallback, set_seed
from transformers.utils import logging

from ..heads.base import Head
from ..heads.config import Eagle3Config, EagleConfig, MedusaConfig
from ..heads.eagle import EagleHead
from ..heads.eagle3 import Eagle3Head
from ..heads.load import load_head
from ..heads.medusa import MedusaHeads
from ..hub.provenance import RECIPE_FILE, write_digests
from .acceptance import METRIC as ACCEPTANCE
from .acceptance import MeasureAcceptance
from .arguments import HeadTrainingArguments
from .batching import refuse_beyond_positions, refuse_long_rows
from .callbacks import CurveAndLog, FirstDepthFirst, StopOnSignal
from .checkpoints import open_output, settings_of
from .dataset import RowDataset
from .dry_run import dry_run
from .eagle import Eagle3Objective, EagleObjective
from .ends import TargetEnds
from .features import final_tap
from .medusa import MedusaObjective
from .objective import Objective
from .probe import check_causality
from .recipe import (
    DataArguments,
    EagleArguments,
    MedusaArguments,
    RunArguments,
    parse,
    save_recipe,
)
from .rows import Rows, hash_of, refuse_ids_beyond
from .selection import draft_vocabulary, prompt_digests, report_coverage
from .sources import Sources, load_config, load_rows, load_tokenizer, open_sources
from .start import loaded_head, start_from_target, start_lm_heads
from .trainer import WEIGHTS, HeadTrainer

logger = logging.get_logger(__name__)

SUMMARY_FILE = "training.json"
METHODS = {Eagle3Head: "eagle", EagleHead: "eagle", MedusaHeads: "medusa"}


@dataclass
class Outcome:
    """What a run gives: the head's directory (None where it stopped early) and the lines to show."""

    head: Path | None
    lines: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def train_eagle(argv: Sequence[str] | None = None) -> Outcome:
    """Train an EAGLE head from `--config` and overrides."""
    data, run, method, training = parse((DataArguments, RunArguments, EagleArguments, HeadTrainingArguments), argv)

    def build(config: PreTrainedConfig, rows: Rows) -> Head:
        kind, cls = (Eagle3Config, Eagle3Head) if method.method == "eagle3" else (EagleConfig, EagleHead)
        if method.init_head is not None:
            return loaded_head(method.init_head, cls, config)
        vocab_size = int(config.get_text_config().vocab_size)
        size = min(method.draft_vocab_size or vocab_size, vocab_size)
        chosen = {"draft_vocab_size": size} if cls is Eagle3Head else {}
        head = cls(kind.for_target(config, **(chosen | method.head)))
        if cls is Eagle3Head:
            head.set_draft_vocab(torch.tensor(draft_vocabulary(rows, head.config.draft_vocab_size, vocab_size)))
        return head

    def objective(head: Head, ends: TargetEnds, rows: Rows) -> Objective:
        if isinstance(head, Eagle3Head):
            kept = None
            if method.softmax_rows and method.softmax_rows < len(head.draft_to_target):
                frequent = draft_vocabulary(rows, method.softmax_rows, head.config.vocab_size)
                kept = head.target_to_draft[torch.tensor(frequent)]
            return Eagle3Objective(head, ends, method.depths, method.decay, None if kept is None else kept[kept >= 0])
        return EagleObjective(head, ends, method.noise)

    fresh = method.init_from_target and method.init_head is None
    return Run(data, run, method, training).execute(build, objective, fresh)


def train_medusa(argv: Sequence[str] | None = None) -> Outcome:
    """Train Medusa heads from `--config` and overrides."""
    data, run, method, training = parse((DataArguments, RunArguments, MedusaArguments, HeadTrainingArguments), argv)

    def build(config: PreTrainedConfig, rows: Rows) -> Head:
        if method.init_head is not None:
            return loaded_head(method.init_head, MedusaHeads, config)
        return MedusaHeads(MedusaConfig.for_target(config, **({"num_heads": method.num_heads} | method.head)))

    def objective(head: Head, ends: TargetEnds, rows: Rows) -> Objective:
        if isinstance(head, MedusaHeads) and method.init_head is None:
            start_lm_heads(head, ends.lm_head)
        ids = None
        if method.softmax_rows and method.softmax_rows < head.config.vocab_size:
            ids = draft_vocabulary(rows, method.softmax_rows, head.config.vocab_size)
        return MedusaObjective(head, ends, method.decay, ids)

    return Run(data, run, method, training).execute(build, objective, fresh=False)


class Run:
    """One training run; `execute` is the whole of it."""

    def __init__(self, data: DataArguments, run: RunArguments, method: Any, training: HeadTrainingArguments):
        self.data, self.run, self.method, self.training = data, run, method, training
        self.output = Path(training.output_dir)

    def execute(self, build: Any, make_objective: Any, fresh: bool) -> Outcome:
        """Load, train and save.

        Args:
            build: (target config, rows) -> head.
            make_objective: (head, ends, rows) -> objective.
            fresh: start the head from the target's weights.
        """
        tokenizer = load_tokenizer(self.data)
        rows = load_rows(self.data, tokenizer)
        config = load_config(self.data)
        lengths = rows.lengths()
        refuse_long_rows(lengths, self.run.tokens_per_batch)  # before a store is written for hours
        refuse_beyond_positions(max(lengths), config, "max_length")
        refuse_ids_beyond(rows.report, config.get_text_config().vocab_size)
        set_seed(self.training.seed)  # what the target does not give the head is drawn
        head = build(config, rows)
        covered = None
        if isinstance(head, Eagle3Head) and self.training.process_index == 0:  # it reads all rows; one process saves
            covered = report_coverage(rows, head.draft_to_target)
        taps = tuple(sorted({*head.taps, final_tap(config)}))
        sources = open_sources(
            self.data,
            rows,
            config,
            taps,
            self.training.device,
            self.training.world_size,
            started=f"started-{hash_of(head.config.to_diff_dict())}" if fresh else None,
            acceptance=self.run.acceptance_prompts > 0 and self.training.process_index == 0,
            dry_run=self.run.dry_run,
        )
        head.bind(sources.ends, match_dtype=False)
        if fresh:
            head = self.started(head, sources)
        objective = make_objective(head, sources.ends, rows)
        train, held_out = sources.datasets(self.data.held_out)
        if self.run.write_store:
            if sources.store is None:
                raise ValueError("write_store needs features: store; with features: online nothing is written.")
            return Outcome(None, [f"Feature store written: {sources.store.directory}"])
        trainer, stop = self.trainer(objective, train, held_out, sources)
        check_causality(objective, train, sources.features, self.training.device)
        if self.run.dry_run:
            return Outcome(None, dry_run(trainer, rows, tokenizer, sources, self.data))
        batch = self.training.world_size * self.training.gradient_accumulation_steps
        chosen_by = self.training.metric_for_best_model if self.training.load_best_model_at_end else None
        more = {"rows": rows.key, "micro_batches": batch, "metric_for_best_model": chosen_by}
        told = settings_of(self.training, self.data, self.run, self.method, **more)
        try:
            checkpoint = open_output(self.output, self.run.resume, told, self.training.process_index == 0)
            trainer.go_on(checkpoint)
        finally:
            stop.restore()
        if stop.stopped:
            return Outcome(None, [f"Stopped and saved in {self.output}; the same command goes on."])
        return self.save(head, sources, rows, trainer, covered)

    def started(self, head: Head, sources: Sources) -> Head:
        """Start a head from the target's weights, or from the started head that was written beside the store.

        Raises:
            ValueError: if the target is not loaded and no started head lies beside the store.
        """
        if self.training.process_index > 0:
            return head  # DDP starts every process from the first one's weights
        if sources.started is not None and (sources.started / WEIGHTS).exists():
            return load_head(sources.started).float().bind(sources.ends, match_dtype=False)
        if sources.target is None:
            raise ValueError(
                "The head is to start from the target, which is not loaded, and the store has no started head of "
                "this config. Run the same command once with one process and --write_store true, or set "
                "init_from_target: false."
            )
        start_from_target(head, sources.target)
        if sources.started is not None:
            head.save_pretrained(sources.started)
        return head

    def trainer(
        self, objective: Objective, train: RowDataset, held_out: RowDataset, sources: Sources
    ) -> tuple[HeadTrainer, StopOnSignal]:
        """Return the trainer with its callbacks."""
        stop = StopOnSignal()
        callbacks: list[TrainerCallback] = [stop, CurveAndLog(self.output)]
        share = getattr(self.method, "first_depth_share", 0.0)
        if share:
            callbacks.append(FirstDepthFirst(objective, share))
        best = "eval_expected_length"
        if self.run.acceptance_prompts > 0:
            target = sources.target if self.training.process_index == 0 else None
            prompts = self.prompts(held_out)
            longest = max(map(len, prompts)) + self.run.acceptance_new_tokens
            refuse_beyond_positions(longest, sources.ends.config, "acceptance_new_tokens or max_length")
            callbacks.append(MeasureAcceptance(target, objective.head, prompts, self.run.acceptance_new_tokens))
            best = ACCEPTANCE
        if self.training.metric_for_best_model == "auto":
            self.training.metric_for_best_model, self.training.greater_is_better = best, True
        trainer = HeadTrainer(
            objective,
            self.training,
            train,
            held_out,
            sources.features,
            self.run.tokens_per_batch,
            self.run.rows_per_batch,
            callbacks,
        )
        return trainer, stop

    def prompts(self, held_out: RowDataset) -> list[list[int]]:
        """Return `acceptance_prompts` held-out prompts, spread over the sources: each up to its first answer."""
        prompts = []
        count = min(self.run.acceptance_prompts, len(held_out))
        for place in range(count):
            row = held_out.rows[held_out.numbers[place * len(held_out) // count]]
            prompts.append(row["input_ids"][: row["spans"][0][0]])
        return prompts

    def save(
        self, head: Head, sources: Sources, rows: Rows, trainer: HeadTrainer, covered: dict[str, float] | None
    ) -> Outcome:
        """Write the head in the target's dtype, check that it loads to the same tensors, and say how to use it.

        Raises:
            ValueError: if what was written does not read back.
        """
        if self.training.process_index != 0:
            return Outcome(None)
        head.config.target_name = self.data.target
        head.config.target_revision = self.data.target_revision
        head.config.target_fingerprint = sources.fingerprint
        longest = max(trainer.train_dataset.lengths)
        started = head.config.trained_positions or 0  # as far as the layer it started from
        head.config.trained_positions = None if isinstance(head, MedusaHeads) else max(longest, started)
        head.to(getattr(torch, self.data.dtype)).save_pretrained(self.output)
        written = load_head(self.output).state_dict()
        different = [
            name for name, tensor in head.state_dict().items() if not torch.equal(tensor.cpu(), written[name])
        ]
        if different:
            raise ValueError(f"{self.output} does not read back what was trained: {', '.join(different)} differ.")
        save_recipe(self.output / RECIPE_FILE, self.data, self.run, self.method, self.training)
        state = trainer.state
        best = {"metric": self.training.metric_for_best_model, "value": state.best_metric}
        is_best = self.training.load_best_model_at_end and state.best_metric is not None
        step = state.best_global_step if is_best else state.global_step
        summary = {
            "target": self.data.target,
            "target_revision": self.data.target_revision,
            "target_fingerprint": sources.fingerprint,
            "rows": rows.report,
            "rows_key": rows.key,
            "draft_vocab_coverage": covered,
            "steps": state.global_step,
            "epochs": state.epoch,
            "step": step,
            "best": best if is_best else None,
            "log": state.log_history,
            "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
            "python": platform.python_version(),
        }
        (self.output / SUMMARY_FILE).write_text(json.dumps(summary, indent=1))
        digests = prompt_digests(rows, self.method.init_head)
        write_digests(digests, self.output)
        use = f"--target {self.data.target} --head {self.output} --speculative {METHODS[type(head)]}"
        use += f" --dtype {self.data.dtype}"
        lines = [
            f"Head: {self.output} (step {step}, "
            + (f"best {best['metric']}: {best['value']})" if is_best else "the last)"),
            f"Use it:     spechead generate '...' {use}",
            f"Publish it: spechead publish <user>/<name> {self.output} --license <licence>",
        ]
        return Outcome(self.output, lines, {best["metric"]: best["value"]} if is_best else {})
