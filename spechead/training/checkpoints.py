"""Which checkpoint a run goes on from: the newest whole one, in a directory whose run was told the same.

`settings.json` in the output directory says what decides the weights. A run that was told something else, or
whose data has grown, would go on with weights and an optimiser that mean other things there, and is refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..bench.strict_json import write_json

logger = logging.get_logger(__name__)

SETTINGS_FILE = "settings.json"
STATE_FILE = "trainer_state.json"  # the library writes it last
# A head's or a draft's weights, adapters or shards; the optimiser; the schedule. Any may be missing or empty after a
# full disk, or where someone deleted it to save room.
PARTS = (("*.safetensors",), ("optimizer.pt", "optimizer.bin"), ("scheduler.pt",))
# Where things lie and what is shown: none of it changes a weight. What `data` holds is in the key of the rows.
FREE = frozenset(
    ("acceptance_new_tokens", "acceptance_prompts", "cache", "data", "dry_run", "features", "resume", "store")
) | {"write_store"}
# Of the library's arguments, those that do.
DECIDING = (
    *("adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "data_seed", "fp16", "learning_rate", "lr_scheduler_kwargs"),
    *("lr_scheduler_type", "max_grad_norm", "max_steps", "num_train_epochs", "optim", "optim_args", "seed"),
    *("warmup_steps", "weight_decay"),
)


def settings_of(training: Any, *others: Any, **more: Any) -> dict[str, Any]:
    """Return what decides the weights of a run.

    Args:
        training: transformers' arguments.
        others: the recipe's own dataclasses.
        more: what follows from them, such as the key of the rows.
    """
    said = {entry.name: getattr(part, entry.name) for part in others for entry in dataclasses.fields(part)}
    said = {name: value for name, value in said.items() if name not in FREE}
    said |= {name: getattr(training, name) for name in DECIDING} | more
    said = {name: value.value if isinstance(value, Enum) else value for name, value in said.items()}
    plain: dict[str, Any] = json.loads(json.dumps(said, default=str))
    return plain


def whole_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints that were written to their end and hold all that a run goes on with, the newest last."""
    found: dict[int, Path] = {}
    for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        try:
            json.loads((path / STATE_FILE).read_text())
            if all(any(holds(path, name) for name in names) for names in PARTS):
                found[int(step)] = path
        except (OSError, ValueError):
            continue  # killed while it was written
    return [found[step] for step in sorted(found)]


def holds(checkpoint: Path, pattern: str) -> bool:
    """Say whether a checkpoint has files of this pattern, none of them empty."""
    sizes = [path.stat().st_size for path in checkpoint.glob(pattern)]
    return bool(sizes) and all(sizes)


def open_output(directory: Path, resume: bool, settings: dict[str, Any], write: bool) -> str | None:
    """Return the checkpoint to go on from, or None for a new run, whose settings are written down.

    Args:
        directory: the run's output directory.
        resume: whether to go on from a checkpoint there.
        settings: what decides the weights of this run.
        write: whether this process writes files.

    Raises:
        ValueError: if the checkpoints there are of a run that was told something else, or are not to be gone on from.
    """
    checkpoints = whole_checkpoints(directory)
    if checkpoints and not resume:
        raise ValueError(
            f"resume=false, and {directory} holds {checkpoints[-1].name} of an earlier run, which a later start would "
            "take for this one's. Give another output_dir, or delete its checkpoints."
        )
    known = directory / SETTINGS_FILE
    if checkpoints and known.exists():
        differences = compare(json.loads(known.read_text()), settings)
        if differences:
            raise ValueError(
                f"{directory} holds {checkpoints[-1].name} of another run: {'; '.join(differences)}. Give another "
                "output_dir, go on from its head with init_head, or delete its checkpoints."
            )
    if write:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(settings, known)
    if not checkpoints:
        return None
    if write:
        logger.warning("Going on from %s.", checkpoints[-1])
    return str(checkpoints[-1])


def compare(before: dict[str, Any], now: dict[str, Any]) -> Sequence[str]:
    """Return what differs between two runs' settings, one phrase each."""
    names = sorted(before.keys() | now.keys())
    return [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in names
        if before.get(name) != now.get(name)
    ]
