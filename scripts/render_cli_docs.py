"""Write docs/cli.md from the commands' own --help.

python scripts/render_cli_docs.py
"""

import inspect
from pathlib import Path

from typer.main import get_command
from typer.testing import CliRunner

from spechead.cli.main import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
WIDTH = 100
INTRODUCTION = """\
# The command line

`spechead` and `python -m spechead` are the same program. An error is one line on standard error; the exit code is 2
for what was asked wrongly and 1 for what failed. This page is rendered from `--help` by `make cards`.
"""


def render() -> str:
    """Return the page: the help of the program, then of every command."""
    parts = [INTRODUCTION]
    names = list(get_command(app).commands)  # type: ignore[attr-defined]  # a group has commands
    for arguments in [[], *([name] for name in names)]:
        shown = " ".join(["spechead", *arguments])
        run = CliRunner().invoke(app, [*arguments, "--help"], prog_name="spechead", terminal_width=WIDTH)
        text = "\n".join(line.rstrip() for line in inspect.cleandoc(run.stdout).splitlines())
        parts.append(f"## `{shown}`\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
