"""What is asked and kept: windows of rows, places instead of answers in memory, and turns left out by reason."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections import Counter

import pytest
from datasets import Dataset

from spechead.training import generations
from spechead.training.answer_log import Answer, AnswerLog, Question
from spechead.training.chat import ChatEncoder
from spechead.training.generations import Interview, answer_all


class Echo:
    """Answers with the question's name; `said` are other answers by name."""

    def __init__(self, tokenizer, said=None):
        self.tokenizer, self.said, self.asked, self.counts = tokenizer, said or {}, [], Counter()

    def answer(self, questions):
        self.asked += [question.key for question in questions]
        return [self.said.get(question.key, self._answer(question.key)) for question in questions]

    def _answer(self, text):
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Answer([*ids, self.tokenizer.eos_token_id], "stop")


def chat(turns, system=None):
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": first + [{"role": "user", "content": f"ask {turn}"} for turn in range(turns)]}


def interview(rows, tokenizer, log, longest=1000):
    names = [str(place) for place in range(len(rows))]
    return Interview(Dataset.from_list(rows), names, ChatEncoder(tokenizer), log, [0.0], 0, longest)


def run(asking, backend):
    return sum(answer_all(asking, backend, 3, 10_000, 8, show=False))


def records(where):
    return [json.loads(line) for part in sorted(where.glob("part-*.jsonl")) for line in part.read_text().splitlines()]


def test_rows_are_rendered_and_answered_a_window_at_a_time(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(generations, "WINDOW_ROWS", 4)
    backend, log = Echo(tokenizer), AnswerLog(tmp_path)
    rows = [chat(1 + place % 3) for place in range(10)]
    run(interview(rows, tokenizer, log), backend)
    windows = [key for key, _ in itertools.groupby(int(key.split("#")[0]) // 4 for key in backend.asked)]
    assert windows == [0, 1, 2]
    assert sorted(backend.asked) == sorted(f"{place}#{turn}" for place in range(10) for turn in range(1 + place % 3))
    by_key = {(record["id"], record["turn"]): record for record in records(tmp_path)}
    assert len(by_key) == len(records(tmp_path)) == len(backend.asked)
    assert "2#0<|im_end|>" in tokenizer.decode(by_key["2", 1]["prompt_ids"])
    again = Echo(tokenizer)
    run(interview(rows, tokenizer, AnswerLog(tmp_path, rank=1)), again)
    assert again.asked == []


def test_later_turns_go_on_from_answers_that_another_process_wrote(tokenizer, tmp_path):
    log = AnswerLog(tmp_path, rank=3)
    [first] = interview([chat(2)], tokenizer, log).questions({"0": chat(2)}, 0)
    log.add([first], Echo(tokenizer, {}).answer([first]))
    backend = Echo(tokenizer)
    run(interview([chat(2)], tokenizer, AnswerLog(tmp_path)), backend)
    assert backend.asked == ["0#1"]
    assert "0#0<|im_end|>" in tokenizer.decode(records(tmp_path)[0]["prompt_ids"])


def test_answers_stay_on_disk(tmp_path):
    log = AnswerLog(tmp_path)
    for batch in range(20):
        asked = [Question(f"{batch}-{row}", 0, "", 0.0, [5] * 2000) for row in range(50)]
        log.add(asked, [Answer([batch] * 1000, "stop")] * 50)
    tracemalloc.start()
    again = AnswerLog(tmp_path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 500 * 1000  # ids alone would be 24 kB a row
    assert again.response_ids("19-49#0") == [19] * 1000
    assert log.response_ids("7-0#0") == [7] * 1000


@pytest.mark.parametrize(
    "answer", [None, Answer([], "length"), Answer([256], "stop")], ids=["dropped", "without ids", "without text"]
)
def test_a_turn_after_no_answer_is_left_out_and_counted(tokenizer, tmp_path, answer):
    for _ in range(2):  # told again after a restart
        log = AnswerLog(tmp_path)
        asking = interview([chat(3), chat(1)], tokenizer, log)
        backend = Echo(tokenizer, {"0#0": answer})
        assert answer is None or not tokenizer.decode(answer.response_ids, skip_special_tokens=True)
        run(asking, backend)
        assert asking.skipped.counts == {"a turn that follows a dropped or empty answer (and those after it)": 1}
    assert {(record["id"], record["turn"]) for record in records(tmp_path)} == {("0", 0), ("1", 0)}


def test_rows_that_cannot_be_asked_are_counted_once_and_end_no_run(tokenizer, tmp_path):
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'no' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + tokenizer.chat_template
    )
    silent = {"messages": [{"role": "system", "content": None}, {"role": "user", "content": "Hi"}]}
    empty = {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": " "}]}
    rows = [chat(2, "no"), chat(2, "yes"), silent, empty, chat(1, "long" * 300), chat(2, "")]
    asking = interview(rows, tokenizer, AnswerLog(tmp_path))
    backend = Echo(tokenizer)
    run(asking, backend)
    assert sorted(backend.asked) == ["1#0", "1#1", "5#0", "5#1"]
    assert asking.skipped.counts == {
        "the chat template refuses it (TemplateError: System role not supported)": 1,
        "a system message without text": 1,
        "no user turn with text": 1,
        "a history of more than 1000 tokens": 1,
    }
    assert all(len(examples) == 1 for examples in asking.skipped.examples.values())
