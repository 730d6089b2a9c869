"""What the commands share: loading a target, and options that mean the same everywhere."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..demo_target import resolve_target

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

TargetOption = Annotated[str, typer.Option(help="Target: a Hub repo id or a directory.")]
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
    return model.to(device or default_device()).eval(), tokenizer


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
