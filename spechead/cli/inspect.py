"""`spechead inspect`: print what a head checkpoint is and every known trap in it; exit code 1 if it is broken.

The work is in hub/inspect.py.
"""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig

from ..hub.inspect import HeadReport, inspect_head

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def inspect(
    head: Annotated[str, typer.Argument(help="Head to inspect: a directory or a Hub repo id.")],
    target: Annotated[str | None, typer.Option(help="Target to check the pair with; only its config is read.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the head's repo.")] = None,
    token: Annotated[str | None, typer.Option(help="Hub token; default: HF_TOKEN or the stored login.")] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read weights that exist only as pickles (tensors alone).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say what a head checkpoint is, and name every known trap of its format; exit code 1 if it is broken."""
    target_config = None if target is None else AutoConfig.from_pretrained(target, token=token)
    report = inspect_head(head, target_config, revision=revision, token=token, allow_pickle=allow_pickle)
    if as_json:
        typer.echo(json.dumps(asdict(report) | {"path": str(report.path), "broken": report.broken}, indent=2))
    else:
        show(report, Console())
    if report.broken:
        raise typer.Exit(code=1)


def show(report: HeadReport, console: Console) -> None:
    """Print a report as a table of facts and flags, then the traps."""
    table = Table(title=Text(str(report.path)), show_header=False, title_justify="left")
    for label, text in report.facts.items():
        table.add_row(Text(label), Text(text))
    if report.flags:
        table.add_section()
    for label, text in report.flags.items():
        table.add_row(Text(label), Text(text))
    console.print(table)
    for trap in report.traps:
        finding = Text.assemble((f"{trap.level}: ", STYLES[trap.level]), f"{trap.message} [{trap.name}]")
        console.print(finding, soft_wrap=True)
    verdict = "broken: load_head refuses it" if report.broken else "sound: load_head takes it"
    console.print(Text(verdict, style="bold red" if report.broken else "bold green"))
