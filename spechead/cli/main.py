"""The `spechead` command: every subcommand is one file and one line here.

An error that a user can mend ends as one line on standard error: exit code 2 for what was asked wrongly (ValueError
and the parser's own), 1 for what failed. Anything else is a defect and keeps its traceback.
"""

import sys
from collections.abc import Sequence
from typing import Any

import typer
from huggingface_hub.errors import HTTPError
from rich.console import Console
from typer.core import TyperGroup

from ..demo_target import DemoTargetError
from .bench import bench
from .demo import demo
from .export import export
from .generate import generate
from .inspect import inspect
from .plan import plan
from .publish import publish
from .serve import serve
from .train import train
from .verify import verify

# A package that an option needs may be missing (ImportError), a file may end early (EOFError, which click takes for a
# user's Ctrl-D).
FAILURES = (OSError, RuntimeError, HTTPError, DemoTargetError, ImportError, EOFError)


class Commands(TyperGroup):
    """The group of all commands; turns their errors into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # the parser's own way out; they are RuntimeErrors
            raise
        except ValueError as error:
            raise _fail(error, 2) from error
        except FAILURES as error:
            raise _fail(error, 1) from error


def _fail(error: Exception, code: int) -> typer.Exit:
    text = " ".join(str(error).split()) or type(error).__name__
    Console(stderr=True, soft_wrap=True).print(f"error: {text}", style="bold red", markup=False, highlight=False)
    return typer.Exit(code)


app = typer.Typer(
    cls=Commands,
    help="Speculative decoding for Hugging Face causal LMs: lossless by default, measured before you believe it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(demo)
app.command()(generate)
app.command()(bench)
app.command()(verify)
app.command()(plan)
app.command()(inspect)
app.command()(publish)
app.command()(export)
app.command()(serve)
app.add_typer(train, name="train")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        argv: the arguments; None takes the process's.
    """
    app(args=list(sys.argv[1:] if argv is None else argv), prog_name="spechead")
