"""The command line as a whole: help, errors in one line, exit codes."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from spechead.cli.main import Commands, app, main
from spechead.demo_target import DemoTargetError
from tests.cli.conftest import Run


def test_help_names_every_command(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("demo", "generate", "bench"):
        assert f"\n  {command} " in result.stdout
    assert run("bench", "--help").exit_code == 0


def test_python_m_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "spechead", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: spechead")


def test_main_takes_arguments() -> None:
    with pytest.raises(SystemExit) as stop:
        main(["no-such-command"])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("two\nlines"), 2),
        (OSError("two\nlines"), 1),
        (DemoTargetError("two\nlines"), 1),
        (ImportError("two\nlines"), 1),
        (EOFError("two\nlines"), 1),
    ],
)
def test_errors_are_one_line_with_their_exit_code(error: Exception, code: int) -> None:
    failing = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @failing.command()
    def fail() -> None:
        raise error

    @failing.command()
    def other() -> None: ...

    result = CliRunner().invoke(failing, ["fail"])
    assert result.exit_code == code
    assert result.stderr == "error: two lines\n"


def test_a_defect_keeps_its_traceback() -> None:
    failing = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @failing.command()
    def fail() -> None:
        raise KeyError("defect")

    @failing.command()
    def other() -> None: ...

    assert isinstance(CliRunner().invoke(failing, ["fail"]).exception, KeyError)


def test_a_wrong_option_is_a_usage_error(run: Run) -> None:
    result = run("bench", "--dtype", "int3")
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_target_that_is_not_there_fails(run: Run) -> None:
    result = run("generate", "hello", "--target", "no-such-directory-or-repo/x")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_commands_are_registered_from_one_place() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    assert {"demo", "generate", "bench"} <= names
