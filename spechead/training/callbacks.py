"""What a head's training does beside its steps: stop cleanly on SIGTERM, keep a JSONL log, draw the loss curve."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from .objective import Objective

logger = logging.get_logger(__name__)

LOG_FILE, CURVE_FILE = "log.jsonl", "loss_curve.png"


class StopOnSignal(TrainerCallback):
    """On SIGTERM: finish the step, save a checkpoint, stop. All processes agree, whichever got the signal first."""

    def __init__(self) -> None:
        self.stopped = False
        self._asked = False
        self._previous: Any = None

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self._asked = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over SIGTERM, once for all the trainings of a run."""
        if self._previous is None:
            self._previous = signal.signal(signal.SIGTERM, self._ask)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Turn a signal into a save and a stop; a step is whole here, so the checkpoint resumes exactly."""
        asked = torch.tensor(int(self._asked), device=args.device)
        if args.world_size > 1:
            distributed.all_reduce(asked, op=distributed.ReduceOp.MAX)
        if asked.item():
            self.stopped = True
            control.should_save = control.should_training_stop = True
            # An evaluation due at this step would outlast the time between SIGTERM and SIGKILL.
            control.should_evaluate = False
            if args.save_total_limit == 1:
                # With this limit the library ends a training by deleting every checkpoint but the best.
                args.save_total_limit = 2
            logger.warning("SIGTERM: saving at step %d and stopping.", state.global_step)

    def restore(self) -> None:
        """Give SIGTERM back; called after training, however it ended."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None


class FirstDepthFirst(TrainerCallback):
    """Trains the first depth alone for the first `share` of the steps; a resumed run is where it would have been.

    A depth costs a forward of the head, and all depths rest on the first: most of what a head learns it learns there.
    """

    def __init__(self, objective: Objective, share: float):
        self.objective, self.share = objective, share

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the depths of the step."""
        first = state.global_step < self.share * state.max_steps
        self.objective.trained_depths = 1 if first else self.objective.depths


class CurveAndLog(TrainerCallback):
    """Appends every log line to `log.jsonl` and redraws `loss_curve.png` whenever a checkpoint is saved."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._start = time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write one line."""
        if state.is_world_process_zero and logs:
            self.directory.mkdir(parents=True, exist_ok=True)
            line = {"step": state.global_step, "seconds": round(time.monotonic() - self._start, 1), **logs}
            with (self.directory / LOG_FILE).open("a") as log:
                log.write(json.dumps(line) + "\n")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Draw the curve of the run so far, resumed parts included."""
        if state.is_world_process_zero:
            draw_curve(state.log_history, self.directory / CURVE_FILE)


def draw_curve(history: list[dict[str, float]], path: Path) -> None:
    """Draw training and held-out loss, and the expected length, over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    for name, label in (("loss", "training loss"), ("eval_loss", "held-out loss")):
        points = [(line["step"], line[name]) for line in history if name in line]
        if points:
            axis.plot(*zip(*points, strict=True), label=label)
    axis.set_xlabel("step")
    axis.set_ylabel("loss per supervised entry")
    axis.legend(loc="upper left")
    lengths = [(line["step"], line["eval_expected_length"]) for line in history if "eval_expected_length" in line]
    if lengths:
        right = axis.twinx()
        right.plot(*zip(*lengths, strict=True), color="tab:green", label="expected length")
        right.set_ylabel("expected acceptance length")
        right.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
