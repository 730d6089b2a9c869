"""The prompts that carry a text: as many and as long as said, different, repeatable, and none from a held-back
module."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import make_questions

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_prompts.py"
LONG, CHATS = 120, 20


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_prompts", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    where = tmp_path_factory.mktemp("prompts")
    first = where / "first.jsonl"
    first.write_text("".join(json.dumps({"id": n, "prompt": f"Question {n}?"}) + "\n" for n in range(40)))
    command = [sys.executable, str(SCRIPT), "--output", str(where / "out.jsonl"), "--long", str(LONG)]
    command += ["--first-turns", str(first), "--chats", str(CHATS)]
    subprocess.run(command, check=True, capture_output=True, timeout=250)
    return [json.loads(line) for line in (where / "out.jsonl").read_text().splitlines()]


def test_long_prompts_carry_a_text_of_the_said_length(made):
    texts = [row["messages"][0]["content"] for row in made if row["id"].startswith("long-")]
    assert len(texts) == len(set(texts)) == LONG
    assert all(1500 <= len(text) <= 4000 for text in texts)
    kinds = {row["source"] for row in made}
    assert {f"python-{kind}" for kind in ("complete", "edit", "explain", "question", "summary")} <= kinds


def test_chats_have_two_user_turns(made):
    chats = [row for row in made if row["id"].startswith("chat-")]
    assert len(chats) == CHATS
    assert all([message["role"] for message in row["messages"]] == ["user", "user"] for row in chats)
    assert len({row["messages"][0]["content"] for row in chats}) == CHATS


def test_questions_of_the_other_script_open_chats(script, tmp_path):
    questions = tmp_path / "questions.jsonl"
    assert make_questions.main(["--output", str(questions), "--questions", "12"]) == 0
    asked = {json.loads(line)["messages"][0]["content"] for line in questions.read_text().splitlines()}
    chats = script.chats(questions, 500, random.Random(0))  # more than there are
    assert {row["messages"][0]["content"] for row in chats} == asked
    assert all(len(row["messages"]) == 2 and row["source"] == "two-turns-question" for row in chats)


def test_held_back_modules_are_left_out(script):
    names = {path.stem for path in script.modules()}
    assert "asyncio" in {path.parent.name for path in script.modules()}
    assert not names & script.HELD_BACK
    assert "textwrap" in script.HELD_BACK


def test_the_same_seed_gives_the_same_prompts(script):
    path = next(path for path in script.modules() if path.name == "argparse.py")
    pieces = [list(script.code_pieces(path, random.Random(3))) for _ in range(2)]
    assert pieces[0] == pieces[1]
    assert len(pieces[0]) > 5
    assert script.about_code(pieces[0][2], random.Random(1)) == script.about_code(pieces[0][2], random.Random(1))
