"""scripts/make_load_prompts.py: what it writes, and that training never sees the completion files."""

from pathlib import Path

import pytest

from scripts import make_load_prompts
from scripts.make_prompts import HELD_BACK
from spechead.bench.prompts import load_prompts


def test_completion_prompts_are_heads_of_files_that_training_does_not_see(tmp_path: Path) -> None:
    path = tmp_path / "new" / "completion.jsonl"
    assert make_load_prompts.main(["--kind", "completion", "--output", str(path)]) == 0
    prompts = load_prompts(str(path))
    assert len(prompts) == 12
    assert {prompt.group for prompt in prompts} == {"completion"}
    assert {prompt.id.removeprefix("complete-") for prompt in prompts} <= HELD_BACK
    for prompt in prompts:
        text = prompt.messages[0]["content"]
        assert 800 < len(text) < 4000
        assert text.endswith("\n```")
        assert "def " in text


def test_code_prompts_are_completions_and_edits_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "code.jsonl"
    assert make_load_prompts.main(["--kind", "code", "--count", "10", "--output", str(path)]) == 0
    prompts = load_prompts(str(path))
    assert [prompt.id.partition("-")[0] for prompt in prompts] == ["complete", "edit"] * 5
    assert {prompt.group for prompt in prompts} == {"code"}
    for prompt in prompts:
        text = prompt.messages[0]["content"]
        assert text.startswith("Complete" if prompt.id.startswith("complete") else "Write one short comment")
        assert text.count("```python") == 1
        assert prompt.id.partition("-")[2] in HELD_BACK


def test_the_same_seed_gives_the_same_noise(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate(("1", "1", "2")):
        path = tmp_path / f"{number}.jsonl"
        arguments = ["--kind", "random", "--count", "3", "--seed", seed, "--output", str(path)]
        assert make_load_prompts.main(arguments) == 0
        texts.append(path.read_text())
    assert texts[0] == texts[1] != texts[2]
    assert len(load_prompts(str(tmp_path / "0.jsonl"))) == 3


@pytest.mark.parametrize("count", ["0", "13"])
def test_counts_that_cannot_be_made_are_refused(
    count: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make_load_prompts.main(["--kind", "completion", "--count", count, "--output", str(tmp_path / "x")])
    assert "out of range" in capsys.readouterr().err
