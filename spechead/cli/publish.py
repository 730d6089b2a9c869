"""`spechead publish <repo> <head directory>`: check a head, render its card, and send what changed in one commit.

The work is in hub/publish.py; the order of the arguments is `hf upload`'s.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..hub.publish import PublishReport
from ..hub.publish import publish as publish_head

STYLES = {"+": "green", "-": "red", "~": "yellow", "=": "dim"}


def publish(
    repo_id: Annotated[str, typer.Argument(help="Repo to publish to: <user>/<name>.")],
    head_dir: Annotated[
        Path, typer.Argument(help="The head's directory: config.json, model.safetensors, results.json, recipe.yaml.")
    ],
    private: Annotated[bool | None, typer.Option("--private/--public", help="Of a new repo.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to; created where it does not exist.")] = None,
    token: Annotated[str | None, typer.Option(help="Hub token; default: HF_TOKEN or the stored login.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    commit_message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    license: Annotated[
        str | None, typer.Option(help="Licence for the card, as apache-2.0; default: README.md's.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Hub data set for the card; repeat it. Default: the recipe's.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Target to compare with; default: the config's, if it is here.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="What `spechead verify` wrote; default: verify.json in the directory.")
    ] = None,
    allow_unmeasured: Annotated[
        bool, typer.Option("--allow-unmeasured", help="Publish without results or certificate; the card says so.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the folder and print what differs from the repo; send nothing.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Where the folder is written and kept.")] = None,
) -> None:
    """Publish a head with a card rendered from its results.

    Raises:
        ValueError: If a check fails.
        PublishError: If the Hub refuses or cannot be reached.
    """
    report = publish_head(
        repo_id,
        head_dir,
        private=private,
        revision=revision,
        token=token,
        create_pr=create_pr,
        commit_message=commit_message,
        license=license,
        datasets=dataset,
        target=target,
        certificate=certificate,
        allow_unmeasured=allow_unmeasured,
        dry_run=dry_run,
        output=output,
    )
    show(report, Console(soft_wrap=True), dry_run)


def show(report: PublishReport, console: Console, dry_run: bool) -> None:
    """Print what differed, what the publisher should know, and where it is now."""
    for line in report.lines:
        console.print(Text(line, style=STYLES.get(line[:1], "")))
    for note in report.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    if dry_run:
        console.print(Text(f"dry run: nothing was sent; the folder is {report.folder}"))
    elif report.url is not None:
        console.print(Text.assemble(("published ", "bold green"), f"{report.repo_id}: {report.url}"))
        where = "" if report.revision is None else f', revision="{report.revision}"'
        console.print(Text(f'use it: enable_speculation(target, head="{report.repo_id}"{where})'))
