"""Passages become answers and prompts: long and plain ones only, each once, none that shares words with what is
measured, the same file for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import make_passages

WORDS = ["river", "stone", "Harbour", "winter", "letter", "garden", "Captain", "silver", "morning", "bridge"]


def passage(number: int, sentences: int = 8) -> str:
    order = WORDS[number % len(WORDS) :] + WORDS[: number % len(WORDS)]
    letters = f"{number:b}".replace("0", "a").replace("1", "b")
    ends = (WORDS[at % len(WORDS)] for at in range(sentences))
    return " ".join(f"The {' '.join(order)} of {letters} came home with {end}." for end in ends)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = [
        {"prompt": f"Summarize: {passage(number)}\nWhere does the {WORDS[number]} come from?", "completion": "Home."}
        for number in range(8)
    ]
    rows += [{"text": passage(0)}, {"text": passage(8)}, {"text": "Too short."}, {"text": "12 34 | " * 80}]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "in"


def made(tmp_path: Path, source: Path, *arguments: str) -> tuple[list[dict], list[dict]]:
    texts, prompts = tmp_path / "texts.jsonl", tmp_path / "prompts.jsonl"
    files = ["--source", str(source), "--texts", str(texts), "--prompts", str(prompts)]
    assert make_passages.main([*files, "--summaries", "3", "--over-passages", "5", *arguments]) == 0
    return tuple([json.loads(line) for line in path.read_text().splitlines()] for path in (texts, prompts))


def test_every_long_plain_passage_is_an_answer_once(tmp_path: Path, source: Path) -> None:
    texts, _ = made(tmp_path, source)
    answers = [row["messages"][1]["content"] for row in texts]
    assert len(answers) == len(set(answers)) >= 9
    assert any(passage(8) == answer for answer in answers)
    for row in texts:
        ask, answer = (message["content"] for message in row["messages"])
        assert " ".join(answer.split()[:6]) in ask


def test_prompts_carry_passages_and_the_source_s_questions(tmp_path: Path, source: Path) -> None:
    _, prompts = made(tmp_path, source)
    kinds = [row["source"] for row in prompts]
    assert (kinds.count("summary"), kinds.count("passages"), kinds.count("question")) == (3, 5, 8)
    assert len({row["id"] for row in prompts}) == len(prompts)
    asked = [row["messages"][0]["content"] for row in prompts if row["source"] == "question"]
    assert sorted(asked) == sorted(f"Where does the {word} come from?" for word in WORDS[:8])


def test_what_is_measured_is_left_out(tmp_path: Path, source: Path) -> None:
    measured = tmp_path / "bench.jsonl"
    measured.write_text(json.dumps({"turns": [f"Please shorten: {passage(3)}"]}) + "\n")
    texts, prompts = made(tmp_path, source, "--exclude", str(measured))
    kept = json.dumps([texts, prompts])
    assert passage(3)[:60] not in kept
    assert passage(4)[:60] in kept


def test_long_passages_are_cut_at_sentence_ends() -> None:
    parts = make_passages.pieces(passage(1, sentences=60))
    assert len(parts) > 3
    assert all(part.endswith(".") and len(part) < 2 * make_passages.PIECE for part in parts)
    assert " ".join(parts) == passage(1, sentences=60)


def test_the_same_seed_gives_the_same_files(tmp_path: Path, source: Path) -> None:
    first, again = made(tmp_path, source), made(tmp_path, source)
    assert first == again
    assert made(tmp_path, source, "--seed", "1") != first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--source", "IN"], "give --texts, --prompts, or both"),
        (["--source", "nowhere", "--texts", "out"], "nowhere does not exist"),
        (["--source", "IN", "--texts", "out", "--exclude", "nowhere"], "nowhere does not exist"),
        (["--source", "EMPTY", "--texts", "out"], "holds no passage"),
    ],
)
def test_bad_arguments_are_refused_by_name(tmp_path, source, capsys, arguments, said) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": "short"}\n')
    places = {"IN": str(source), "EMPTY": str(tmp_path / "empty.jsonl"), "out": str(tmp_path / "out.jsonl")}
    with pytest.raises(SystemExit) as stopped:
        make_passages.main([places.get(argument, argument) for argument in arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
