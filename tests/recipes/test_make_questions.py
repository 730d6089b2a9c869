"""Open questions, translations and tasks over sentences: as many as said, all different, repeatable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import make_questions


def made(path: Path, *arguments: str) -> list[dict]:
    assert make_questions.main(["--output", str(path), *arguments]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def parallel(tmp_path: Path) -> list[str]:
    (tmp_path / "de.txt").write_text("".join(f"Das ist Satz {number}.\n" for number in range(80)))
    (tmp_path / "en.txt").write_text("".join(f"This is Sentence {number}.\n" for number in range(80)))
    return ["--parallel", str(tmp_path / "de.txt"), str(tmp_path / "en.txt")]


def test_questions_are_all_different_and_complete(tmp_path: Path) -> None:
    rows = made(tmp_path / "out.jsonl", "--questions", "100000")
    texts = [row["messages"][0]["content"] for row in rows]
    assert len(set(texts)) == len(texts) > 1000
    assert not any("{" in text or "}" in text for text in texts)
    assert len({row["id"] for row in rows}) == len(rows)
    assert {row["source"] for row in rows} == {"question"}


def test_sentences_are_translated_summarised_and_asked_about(tmp_path: Path, parallel: list[str]) -> None:
    counts = ["--questions", "5", "--translations", "7", "--texts", "8"]
    rows = made(tmp_path / "out.jsonl", *counts, *parallel)
    by_kind = {kind: [row for row in rows if row["source"] == kind] for kind in ("question", "translation", "text")}
    assert [len(each) for each in by_kind.values()] == [5, 7, 8]
    translations = {row["messages"][0]["content"] for row in by_kind["translation"]}
    assert len(translations) == 7
    assert all(text.startswith("Translate German to English: Das ist Satz") for text in translations)
    for row in by_kind["text"]:
        sentences = row["messages"][0]["content"].count("This is Sentence")
        assert 12 <= sentences <= 32
    assert {row["messages"][0]["content"].split(" ")[0] for row in by_kind["text"]} >= {
        "Summarize:",
        "Summarize",
        "Read",
    }


def test_the_same_seed_gives_the_same_file(tmp_path: Path, parallel: list[str]) -> None:
    first, again, other = (
        made(tmp_path / f"{number}.jsonl", "--questions", "20", "--seed", seed, *parallel)
        for number, seed in enumerate(("1", "1", "2"))
    )
    assert first == again != other


def test_files_of_unequal_length_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, count in (("a", 3), ("b", 4)):
        (tmp_path / name).write_text("x\n" * count)
    arguments = ["--output", str(tmp_path / "out"), "--parallel", str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(SystemExit):
        make_questions.main(arguments)
    assert "3 and 4 lines" in capsys.readouterr().err


def test_blank_lines_are_no_sentences(tmp_path: Path, parallel: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for path in map(Path, parallel[1:]):
        path.write_text(path.read_text() + "\n" * 80)
    rows = made(tmp_path / "out.jsonl", "--questions", "0", "--translations", "160", "--texts", "20", *parallel)
    assert len(rows) == 80 + 20
    assert all("Satz" in row["messages"][0]["content"] for row in rows[:80])
    assert all(row["messages"][0]["content"].count("Sentence") >= 12 for row in rows[80:])
    Path(parallel[1]).write_text("\n" * 160)
    with pytest.raises(SystemExit):
        make_questions.main(["--output", str(tmp_path / "none"), *parallel])
    assert "no line holds a sentence in both files" in capsys.readouterr().err


def test_less_than_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_questions.main(["--output", str(tmp_path / "none"), "--translations", "-1"])
    assert "--translations -1 asks for less than nothing; give 0 or more" in capsys.readouterr().err
