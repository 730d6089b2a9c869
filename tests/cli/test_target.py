"""Which target the commands take: the one asked for, else what the head was trained for, else the demo target."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

from spechead.cli import loading
from spechead.cli.loading import target_for
from spechead.demo_target import REPO_ID
from tests.cli.conftest import Run
from tests.tiny_heads import make_head

QUIET = Console(quiet=True)


@pytest.fixture
def head(target_directory: str, tmp_path: Path) -> str:
    """A head of the tiny target that says so."""
    made = make_head("eagle3", AutoModelForCausalLM.from_pretrained(target_directory))
    made.config.target_name = target_directory
    made.save_pretrained(tmp_path / "head")
    return str(tmp_path / "head")


def test_the_one_asked_for_comes_first(head: str) -> None:
    assert target_for("other", [head], QUIET) == "other"


def test_without_a_head_it_is_the_demo_target() -> None:
    assert target_for(None, None, QUIET) == REPO_ID


def test_heads_of_several_targets_need_a_word(head: str, target_directory: str, tmp_path: Path) -> None:
    made = make_head("medusa", AutoModelForCausalLM.from_pretrained(target_directory))
    made.config.target_name = "someone/else"
    made.save_pretrained(tmp_path / "second")
    with pytest.raises(ValueError, match=r"several targets .*someone/else"):
        target_for(None, [head, str(tmp_path / "second")], QUIET)


@pytest.mark.parametrize(
    ("dtype", "native", "said"), [("bfloat16", False, 1), ("bfloat16", True, 0), ("float32", False, 0)]
)
def test_a_cpu_without_bfloat16_is_named(
    target_directory: str, monkeypatch: pytest.MonkeyPatch, dtype: loading.Dtype, native: bool, said: int
) -> None:
    monkeypatch.setattr(loading, "native_bfloat16", lambda device_type: native)
    console = Console(record=True, quiet=False, file=StringIO())
    loading.load_target(target_directory, console, dtype=dtype, device="cpu")
    assert console.export_text().count("no bfloat16 arithmetic") == said


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "w4 w5", "--speculative", "eagle", "--max-new-tokens", "4"],
        ["bench", "--max-new-tokens", "4", "--method", "eagle", "--per-group", "1", "--no-peak-memory"],
        ["plan"],
    ],
)
def test_a_head_brings_its_target(run: Run, head: str, target_directory: str, arguments: list[str]) -> None:
    result = run(*arguments, "--head", head)
    assert result.exit_code == 0, result.output
    assert "which the head was trained for" in result.stderr
    assert Path(target_directory).name in result.stderr
