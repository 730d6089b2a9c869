"""What the commands share: loading a target, and options that mean the same everywhere."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ..bench.hardware import native_bfloat16
from ..demo_target import REPO_ID, resolve_target
from ..heads.base_config import HeadConfig
from ..heads.checkpoint import Checkpoint, read_checkpoint, read_config, resolve
from ..heads.convert import OWN
from ..heads.load import OWN_CONFIGS, make_config

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

SLOW_NODES = (
    "note: this CPU has no bfloat16 arithmetic (AVX-512 BF16, AMX). In that dtype a forward over several tokens takes "
    "several times one over a single token, so drafts cost more than elsewhere. speculative=auto takes it into "
    "account; --dtype float32 avoids it."
)

TargetOption = Annotated[
    str | None,
    typer.Option(
        help="Target: a Hub repo id or a directory. Default: what the head was trained for, else the demo target."
    ),
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of the target's repo.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Dtype to load in; auto is the checkpoint's own.")]
DeviceOption = Annotated[str | None, typer.Option(help="Device; default: an accelerator if there is one, else cpu.")]
AttentionOption = Annotated[str | None, typer.Option(help="Attention implementation: sdpa, eager, flash_attention_2.")]
HeadOption = Annotated[
    list[str] | None, typer.Option(help="Head: a Hub repo id or a directory. Repeat it for several heads.")
]
DraftModelOption = Annotated[str | None, typer.Option(help="Draft model: a Hub repo id or a directory.")]
TemplateOption = Annotated[
    str | None, typer.Option(help="Arguments for the chat template, as JSON: '{\"enable_thinking\": false}'.")
]
MaxNewTokensOption = Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")]
NumDraftTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens drafted a step (depth of a tree); default: the method's own.")
]
SeedOption = Annotated[int, typer.Option(help="Seed for sampling.")]


def target_for(target: str | None, heads: Sequence[str] | None, console: Console) -> str:
    """Return the target asked for, else the one that the heads name, else the demo target's repo id.

    Raises:
        ValueError: if the heads name several targets.
    """
    if target is not None:
        return target
    found = {path: head_config(path).target_name for path in heads or ()}
    names = sorted({name for name in found.values() if name})
    if len(names) > 1:
        said = ", ".join(f"{path} for {name}" for path, name in found.items())
        raise ValueError(f"the heads were trained for several targets ({said}); say which with --target.")
    if names:
        console.print(f"Target: {names[0]}, which the head was trained for.", markup=False, soft_wrap=True)
    return names[0] if names else REPO_ID


def head_config(path: str, target: PreTrainedConfig | None = None) -> HeadConfig:
    """Return a head's config; published layouts, whose configs say less, are read with their tensors.

    Args:
        path: a directory or a Hub repo id.
        target: the target's config, from which a published head's taps follow.
    """
    place = resolve(path)
    source = read_config(place)
    if source.get("model_type") in OWN_CONFIGS:
        return make_config(Checkpoint(place, OWN, source, {}), target)
    return make_config(read_checkpoint(place), target)


def load_target(
    name: str,
    console: Console,
    *,
    dtype: Dtype = "auto",
    device: str | None = None,
    attention: str | None = None,
    revision: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target and its tokenizer, ready to generate.

    Args:
        name: a Hub repo id or a directory; the demo target's repo id is fetched also without the Hub.
        console: where progress is shown.
        dtype: "auto" is the checkpoint's own.
        device: where to put it.
        attention: attention implementation; None is transformers' choice.
        revision: of the repo.

    Raises:
        OSError: if there is nothing under that name.
        ValueError: if it is no causal LM.
    """
    logging.disable_progress_bar()
    place = resolve_target(name, console)
    kept = None if place != name else revision  # the demo target's directory has no revisions
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, revision=kept)
    except (OSError, ValueError) as error:
        if Path(place).is_dir():
            raise
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{name} is no directory here, so it was looked up on the Hub: {error}") from error
    model = AutoModelForCausalLM.from_pretrained(
        place,
        revision=kept,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        **({} if attention is None else {"attn_implementation": attention}),
    )
    model = model.to(device or default_device()).eval()
    if model.dtype == torch.bfloat16 and not native_bfloat16(model.device.type):
        console.print(SLOW_NODES, style="yellow", markup=False, soft_wrap=True)
    return model, tokenizer


def default_device() -> str:
    """Return the accelerator that torch sees, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def template_arguments(text: str | None) -> dict[str, Any]:
    """Read the chat template's arguments.

    Raises:
        ValueError: if the text is no JSON object.
    """
    if text is None:
        return {}
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--chat-template-kwargs {text!r} is no JSON ({error.msg}); give an object.") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"--chat-template-kwargs {text!r} must be a JSON object such as '{{\"key\": true}}'.")
    return arguments
