"""A tiny target on disk, as the commands load it, and a runner that gives what they print."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spechead.cli.main import app
from tests.tiny import table_model
from tests.tiny_tokenizer import tiny_tokenizer

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target that counts w4 w5 w6 w7 and over again, and w8 .. w47 likewise; it has room for long prompts."""
    model = table_model([0, 1, 2, 3, 5, 6, 7, 4, *range(9, 48), 8])
    model.config.max_position_embeddings = 4096
    directory = tmp_path_factory.mktemp("models") / "tiny-target"
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return str(directory)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in an empty directory; `run(*arguments, input=...)`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments: str, input: str | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=input, prog_name="spechead")

    return invoke
