"""`spechead train data|eagle|medusa|draft`: the mains of the recipes, from an installed package.

Everything after the method goes to TRL's parser: `--config file.yaml`, and any field as `--field value`.
"""

from __future__ import annotations

import typer

# --help belongs to the recipe's own parser, which knows all fields.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

train = typer.Typer(
    help="Make data from a target's own answers, and train heads and drafts on it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def show(lines: list[str]) -> None:
    """Print what a run has to say, once: the first process speaks."""
    from accelerate.state import PartialState

    if PartialState().is_main_process:
        for line in lines:
            typer.echo(line)


@train.command("data", context_settings=PASS_ON)
def data(context: typer.Context) -> None:
    """Let the target answer prompts."""
    from ..training.generate import generate_data

    show(generate_data(context.args))


@train.command("eagle", context_settings=PASS_ON)
def eagle(context: typer.Context) -> None:
    """Train an EAGLE-1 or EAGLE-3 head."""
    from ..training.run import train_eagle

    show(train_eagle(context.args).lines)


@train.command("medusa", context_settings=PASS_ON)
def medusa(context: typer.Context) -> None:
    """Train Medusa heads."""
    from ..training.run import train_medusa

    show(train_medusa(context.args).lines)


@train.command("draft", context_settings=PASS_ON)
def draft(context: typer.Context) -> None:
    """Align a small draft model with the target."""
    from ..training.draft import distill_draft

    show(distill_draft(context.args).lines)
