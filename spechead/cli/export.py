"""`spechead export`: a head, or a draft model, in the format of another server, and the command that serves it.

The work is in hub/export.py; nothing is reported before the result has been read back and compared bit for bit.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..hub.export import ExportReport, export_head
from ..hub.exporters import FORMATS


def export(
    head: Annotated[
        str, typer.Argument(help="Head, or for llamacpp also a draft model: a directory or a Hub repo id.")
    ],
    to: Annotated[str, typer.Option(help=f"Format: {', '.join(FORMATS)}.")],
    output: Annotated[Path, typer.Option(help="Directory to create.")],
    target: Annotated[
        str | None, typer.Option(help="Target, a name or a directory; default: the one in the head's config.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the head's repo.")] = None,
    token: Annotated[str | None, typer.Option(help="Hub token; default: HF_TOKEN or the stored login.")] = None,
    taps: Annotated[
        str | None, typer.Option(help="Taps of a published EAGLE-3 head whose config is ambiguous, as 2,14,25.")
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read weights that exist only as pickles (tensors alone).")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output directory.")] = False,
) -> None:
    """Write a head in another server's format, compare it bit for bit, and print how to serve it.

    Raises:
        ValueError: If the format cannot hold the head, its engine cannot run it, or a shared part cannot be had.
    """
    report = export_head(
        head,
        to,
        output,
        target=target,
        revision=revision,
        token=token,
        taps=parse_taps(taps),
        allow_pickle=allow_pickle,
        overwrite=overwrite,
    )
    show(report, Console(soft_wrap=True))


def parse_taps(text: str | None) -> list[int] | None:
    """Return taps from "2,14,25".

    Raises:
        ValueError: If they are no integers.
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--taps {text!r} must be integers with commas, as 2,14,25.") from None


def show(report: ExportReport, console: Console) -> None:
    """Print what was written, how to serve it, and where that was read."""
    console.print(Text.assemble(("exported ", "bold green"), f"{report.kind} to {report.format}: {report.path}"))
    for name, size in report.files.items():
        console.print(Text(f"  {name}  {size / 2**20:.2f} MiB"))
    console.print(Text(f"  {report.tensors} tensors, read back and equal bit for bit"))
    if report.added:
        console.print(Text(f"  beside the head's own: {', '.join(report.added)}"))
    for note in report.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    console.print(Text("serve:", style="bold"))
    for command in report.commands:
        console.print(Text(f"  {command}"))
    console.print(
        Text(
            f"flags read in {report.origin.name}, {report.origin.flags}; not run against that server here.",
            style="dim",
        )
    )
