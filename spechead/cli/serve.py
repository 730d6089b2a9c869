"""`spechead serve`: OpenAI's HTTP interface over a target that speculates, on this machine.

The API key comes from the environment alone, so that no process list shows it.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..config import SpeculativeConfig
from ..mixin import enable_speculation
from ..serving.limits import Limits
from . import loading

KEY_VARIABLE = "SPECHEAD_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
GRACE = 5  # seconds beyond the requests' own timeout before a shutdown cuts them off
OFF = "off"


def serve(
    target: loading.TargetOption = None,
    revision: loading.RevisionOption = None,
    head: loading.HeadOption = None,
    draft_model: loading.DraftModelOption = None,
    speculative: Annotated[
        str, typer.Option(help="auto, prompt_lookup, draft_model, medusa, eagle; off decodes plainly.")
    ] = "auto",
    num_draft_tokens: loading.NumDraftTokensOption = None,
    name: Annotated[str | None, typer.Option(help="What requests call the model; default: the target's name.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback it needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    max_rows: Annotated[int, typer.Option(min=1, help="Rows that run at once.")] = Limits.max_rows,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and answer; default: the target's, 4096 at most.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="New tokens of an answer; default: no limit.")] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Rows that wait; beyond it comes 429.")] = Limits.max_queue,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for a request, with its wait.")] = Limits.timeout,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request's body.")] = Limits.max_body,
    dtype: loading.DtypeOption = "auto",
    device: loading.DeviceOption = None,
    attention: loading.AttentionOption = None,
) -> None:
    """Serve OpenAI's chat and text completions; SPECHEAD_API_KEY sets the key that clients must give."""
    key = os.environ.get(KEY_VARIABLE) or None
    if host not in LOOPBACK and key is None:
        raise ValueError(f"--host {host} lets other machines in; set {KEY_VARIABLE} to the key they must give.")
    if speculative == OFF and num_draft_tokens is not None:
        raise ValueError(f"--num-draft-tokens {num_draft_tokens} means nothing to --speculative off; drop one.")
    try:
        import uvicorn

        from ..serving.app import create_app
    except ImportError as error:
        raise RuntimeError(f"{error.name} is not installed; run: pip install 'spechead[serve]'") from error
    console = Console(stderr=True)
    target = loading.target_for(target, head, console)
    model, tokenizer = loading.load_target(
        target, console, dtype=dtype, device=device, attention=attention, revision=revision
    )
    model = enable_speculation(model, head=head or None, draft_model=draft_model, tokenizer=tokenizer)
    config: Any = OFF
    if speculative != OFF:
        config = SpeculativeConfig(method=speculative, num_draft_tokens=num_draft_tokens)  # type: ignore[arg-type]  # strict
    served = name or served_name(target)
    app = create_app(
        model,
        tokenizer,
        name=served,
        speculative=config,
        limits=Limits(max_rows, max_length, max_tokens, max_queue, timeout, max_body),
        api_key=key,
        hosts=LOOPBACK if key is None else None,
    )
    console.print(describe(app.state.engine, served), markup=False, highlight=False, soft_wrap=True)
    grace = int(timeout) + GRACE
    uvicorn.run(app, host=host, port=port, access_log=False, log_level="info", timeout_graceful_shutdown=grace)


def served_name(target: str) -> str:
    """Return what requests call a target by default: its repo id, or its directory's name without the path."""
    return Path(target).resolve().name if Path(target).exists() else target


def describe(engine: Any, name: str) -> str:
    """Return what is printed at the start: the model, the method, the limits and the memory they bound."""
    limits, size = engine.limits, engine.kv_bytes / 2**20
    notes = "".join(f"\nnote: {note}" for note in engine.stats.notes)
    return (
        f"{name}: speculative={engine.stats.method}; {limits.max_rows} rows of {limits.length} tokens at most, which "
        f"take up to {size:,.1f} MiB for keys and values; {limits.max_queue} more wait{notes}"
    )
