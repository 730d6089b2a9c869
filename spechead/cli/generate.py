"""`spechead generate`: answer one prompt, speculating, with the text streamed and a line of figures at the end."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..bench.measure import pad_left
from ..bench.prompts import encode
from ..config import SpeculativeConfig
from ..mixin import enable_speculation
from ..stats import DecodeStats
from . import loading
from .text import MarkingStreamer


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The user's message; - or nothing reads standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the message from a file instead.")] = None,
    target: loading.TargetOption = None,
    revision: loading.RevisionOption = None,
    speculative: Annotated[
        str, typer.Option(help="auto, prompt_lookup, draft_model, medusa, eagle; none is plain generation.")
    ] = "auto",
    head: loading.HeadOption = None,
    draft_model: loading.DraftModelOption = None,
    num_draft_tokens: loading.NumDraftTokensOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    chat_template_kwargs: loading.TemplateOption = None,
    max_new_tokens: loading.MaxNewTokensOption = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k likeliest tokens; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from this share of probability.")] = 1.0,
    min_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Least share of the likeliest token's.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 avoids tokens that were there.")] = None,
    seed: loading.SeedOption = 0,
    dtype: loading.DtypeOption = "auto",
    device: loading.DeviceOption = None,
    attention: loading.AttentionOption = None,
    color: Annotated[bool, typer.Option("--color", help="Mark accepted draft tokens in the text.")] = False,
) -> None:
    """Answer a prompt."""
    messages = [{"role": "user", "content": read_prompt(prompt, file)}]
    messages[:0] = [{"role": "system", "content": system}] if system else []
    template = loading.template_arguments(chat_template_kwargs)
    if raw and (system or template):
        raise ValueError("--raw takes no --system and no --chat-template-kwargs: it uses no chat template.")
    method: Any = None
    if speculative != "none":  # refused before anything is loaded
        method = SpeculativeConfig(method=speculative, num_draft_tokens=num_draft_tokens)  # type: ignore[arg-type]  # strict
    console = Console(stderr=True)
    target = loading.target_for(target, head, console)
    model, tokenizer = loading.load_target(
        target, console, dtype=dtype, device=device, attention=attention, revision=revision
    )
    if method is not None:
        model = enable_speculation(model, head=head or None, draft_model=draft_model, tokenizer=tokenizer)
    ids = list(tokenizer(messages[-1]["content"])["input_ids"]) if raw else encode(tokenizer, messages, template)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    if repetition_penalty is not None:
        sampling["repetition_penalty"] = repetition_penalty
    torch.manual_seed(seed)
    streamer = MarkingStreamer(tokenizer, Console(highlight=False, force_terminal=True if color else None), color)
    stats = stream(model, ids, streamer, {**sampling, "max_new_tokens": max_new_tokens, "speculative": method})
    console.print(describe(stats), style="dim", highlight=False, soft_wrap=True)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt from the argument, a file or standard input.

    Raises:
        ValueError: if there is none, or more than one.
    """
    if prompt is not None and file is not None:
        raise ValueError("give the prompt as an argument or as --file, not both.")
    if file is not None:
        text = file.read_text(encoding="utf-8")
    elif prompt not in (None, "-"):
        text = str(prompt)
    elif prompt is None and sys.stdin.isatty():
        raise ValueError("there is no prompt; give one as an argument, with --file, or on standard input.")
    else:
        text = sys.stdin.read()
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("standard input or the argument holds bytes that are no UTF-8; give text.") from error
    if not text.strip():
        raise ValueError("the prompt is empty; give some text.")
    return text.strip("\n")


def stream(model: Any, ids: list[int], streamer: MarkingStreamer, arguments: dict[str, Any]) -> DecodeStats | None:
    """Generate one row through a streamer, and return its figures."""
    if arguments["speculative"] is None:
        del arguments["speculative"]
    hook = model.register_forward_pre_hook(streamer.forward_begins)
    try:
        inputs = pad_left(model, [ids], arguments["max_new_tokens"])
        output = model.generate(**inputs, **arguments, streamer=streamer, return_dict_in_generate=True)
    finally:
        hook.remove()
    stats: DecodeStats | None = getattr(output, "stats", None)
    streamer.finish(None if stats is None else stats.emitted_per_step[0])
    return stats


def describe(stats: DecodeStats | None) -> str:
    """Return the line of figures."""
    if stats is None:
        return "plain generation: nothing was drafted"
    lossy = ", lossy" if stats.lossy else ""
    notes = "".join(f"; {note}" for note in stats.notes)
    return (
        f"{stats.method}{lossy}: {stats.emitted_tokens + 1} tokens in {stats.target_forwards + 1} target forwards, "
        f"acceptance length {stats.acceptance_length:.2f}, acceptance rate {stats.acceptance_rate:.0%}{notes}"
    )
