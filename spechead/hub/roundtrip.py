"""Whether an exported head reads back as the head it came from: every tensor bit for bit, every field that computes.

Called by export.py before it reports success. The reader is the one that `load_head` uses for published checkpoints,
so an export that this accepts is one that a user of the format can import again.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..heads.base import Head
from ..heads.base_config import DRAFTING_FIELDS, HeadConfig
from ..heads.checkpoint import read_checkpoint
from ..heads.config import Eagle3Config
from ..heads.load import build_head
from ..heads.published import complete, config_for
from ..heads.traps import find_traps
from .exporters.fields import state_of
from .exporters.plan import Plan

# Fields that no published format has, and that do not change what a head computes.
NOT_COMPARED = {
    "target_name",
    "target_revision",
    "target_fingerprint",
    "target_num_layers",
    "trained_positions",
    "initializer_range",
    *DRAFTING_FIELDS,
}


def differences(directory: Path, plan: Plan, head: Head) -> list[str]:
    """List how an exported directory differs from the head, read back as any published checkpoint.

    Args:
        directory: The written directory.
        plan: What was written, with what it adds to the head.
        head: The head that was exported.

    Returns:
        One phrase a difference; empty if there is none.
    """
    checkpoint = read_checkpoint(directory, allow_pickle=plan.weights.endswith(".pt"))
    if checkpoint.layout != plan.layout:
        return [f"it reads as layout {checkpoint.layout}, not {plan.layout}"]
    taps = head.config.taps if isinstance(head.config, Eagle3Config) else None
    layers = head.config.target_num_layers
    config = config_for(checkpoint.layout, checkpoint.source, checkpoint.tensors, num_layers=layers, taps=taps)
    traps = find_traps(checkpoint.layout, checkpoint.source, config, checkpoint.tensors, taps_stated=taps is not None)
    found = [trap.message for trap in traps if trap.level == "error"]
    if found:
        return found
    rebuilt = build_head(config, complete(config, checkpoint.source, checkpoint.tensors), str(directory))
    expected = state_of(head) | dict(plan.added)
    tensors = tensor_differences(expected, rebuilt.state_dict())
    return tensors + field_differences(head.config, config, dict(plan.changed))


def tensor_differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """List tensors that are missing, unexpected, or differ in a bit, a shape or the dtype."""
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    wrong += [f"{name} is unexpected" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        ours, theirs = expected[name], found[name].cpu()
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape or not torch.equal(ours, theirs):
            wrong.append(f"{name} differs")
    return wrong


def field_differences(before: HeadConfig, after: HeadConfig, changed: dict[str, Any]) -> list[str]:
    """List fields that a format did not keep, apart from those that it changes on purpose.

    Args:
        before: The head's config.
        after: The config read back.
        changed: Fields that read back otherwise because of tensors that the format adds.
    """
    library = {entry.name for entry in fields(PreTrainedConfig)}
    names = [entry.name for entry in fields(before) if entry.name not in library | NOT_COMPARED]
    wrong = []
    for name in names:
        expected, found = changed.get(name, getattr(before, name)), getattr(after, name)
        if normal(expected) != normal(found):
            wrong.append(f"{name} reads back as {found!r} instead of {expected!r}")
    return wrong


def normal(value: Any) -> Any:
    """Return a field's value in a form that compares across files: floats in RoPE, lists for tuples, no nulls."""
    if isinstance(value, dict):
        return {key: float(item) if isinstance(item, int) else item for key, item in value.items() if item is not None}
    return list(value) if isinstance(value, tuple) else value
