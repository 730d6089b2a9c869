"""Rows from sources: what is kept, cut, skipped and counted; the cache's key; the draft vocabulary; the split."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from spechead.training import rows as rows_module
from spechead.training.rows import load_sources, prepare_rows, refuse_ids_beyond
from spechead.training.selection import coverage, draft_vocabulary, report_coverage, split_rows


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def answers(tmp_path):
    made = [{"id": number, "prompt_ids": [1, 2, 3], "response_ids": [7] * (number + 1)} for number in range(6)]
    return write(tmp_path / "answers.jsonl", [*made, {"id": 6, "prompt_ids": [1], "response_ids": None}])


@pytest.fixture
def chats(tmp_path):
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}
    good = [{"id": f"c{number}", "messages": [user, assistant]} for number in range(3)]
    return write(tmp_path / "chats.jsonl", [*good, {"id": "bad", "messages": [assistant]}])


def test_ids_are_taken_as_they_are_and_unusable_rows_counted(tokenizer, answers, tmp_path):
    made = prepare_rows([answers], tokenizer, tmp_path / "cache", 6)
    by_id = {row["row_id"]: row for row in made.data}
    assert sorted(by_id) == ["1", "2", "3", "4", "5"]
    assert by_id["2"]["input_ids"] == [1, 2, 3, 7, 7, 7]
    assert by_id["2"]["spans"] == [[3, 6]]
    assert by_id["5"]["input_ids"] == [1, 2, 3, 7, 7, 7]  # cut to max_length
    assert made.report["skipped"] == {
        "no prompt, or fewer than two answer tokens": 1,
        "neither response_ids nor messages": 1,
    }
    assert made.report["answer_tokens"] == sum(stop - start for row in made.data for start, stop in row["spans"])
    assert made.lengths() == [len(row["input_ids"]) for row in made.data]


def test_sources_of_different_kinds_go_together(tokenizer, answers, chats, tmp_path):
    made = prepare_rows([answers, chats], tokenizer, tmp_path / "cache", 64)
    assert [row["row_id"] for row in made.data] == ["1", "2", "3", "4", "5", "c0", "c1", "c2"]
    chat = made[5]
    ((start, stop),) = chat["spans"]
    assert tokenizer.decode(chat["input_ids"][start:stop]) == "bc<|im_end|>"
    assert made.report["skipped"]["the assistant speaks first"] == 1
    assert len(made.report["skipped_examples"]) == 3


def test_nothing_left_is_an_error_with_the_reasons(tokenizer, tmp_path):
    path = write(tmp_path / "bad.jsonl", [{"messages": [{"role": "assistant", "content": "a"}]}])
    with pytest.raises(ValueError, match=r"No row is left.*assistant speaks first"):
        prepare_rows([path], tokenizer, tmp_path / "cache", 64)


def test_the_cache_is_hit_by_the_same_inputs_and_missed_by_any_other(tokenizer, chats, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    keys = [prepare_rows([chats], tokenizer, cache, 64).key]
    built = []
    plain = rows_module.build_rows
    monkeypatch.setattr(rows_module, "build_rows", lambda *args: built.append(1) or plain(*args))
    assert prepare_rows([chats], tokenizer, cache, 64).key == keys[0]
    copied = tmp_path / "elsewhere" / Path(chats).name
    copied.parent.mkdir()
    shutil.copyfile(chats, copied)
    os.utime(chats, (1, 1))
    assert {prepare_rows([str(same)], tokenizer, cache, 64).key for same in (chats, copied)} == {keys[0]}
    assert not built
    keys.append(prepare_rows([chats], tokenizer, cache, 63).key)
    keys.append(prepare_rows([chats], tokenizer, cache, 64, {"enable_thinking": False}).key)
    with open(chats, "a") as file:
        file.write(
            json.dumps(
                {"id": "c9", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
            )
            + "\n"
        )
    keys.append(prepare_rows([chats], tokenizer, cache, 64).key)
    monkeypatch.setattr(rows_module, "ROWS_VERSION", 99)
    keys.append(prepare_rows([chats], tokenizer, cache, 64).key)
    template = tokenizer.chat_template
    tokenizer.chat_template = template + "{# another #}"
    keys.append(prepare_rows([chats], tokenizer, cache, 64).key)
    tokenizer.chat_template = template
    keys.append(prepare_rows([chats], tokenizer, cache, 64, None, [1]).key)
    tokenizer.add_tokens(["brand-new"])
    keys.append(prepare_rows([chats], tokenizer, cache, 64).key)
    assert len(set(keys)) == len(keys) == 8
    assert len(built) == 7


@pytest.mark.parametrize("text", ["", '{"prompt": "a"}\n{oops\n'])
def test_files_that_cannot_be_read_are_named(tmp_path, text):
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.jsonl cannot be read"):
        load_sources([str(path)])


def test_a_dot_in_an_id_does_not_make_one_chat_of_all(tokenizer, tmp_path):
    answered = {"prompt_ids": [5, 6], "response_ids": [7, 8]}
    lines = [{"id": f"sharegpt.{number}", **answered} for number in range(60)]
    lines += [{"id": "sharegpt.7", "turn": 1, **answered}]
    made = prepare_rows([write(tmp_path / "a.jsonl", lines)], tokenizer, tmp_path / "cache", 64)
    train, held_out = split_rows(made, 0.3)
    assert 8 < len(held_out) < 30
    second = next(number for number in range(61) if made[number]["row_id"] == "sharegpt.7.1")
    assert (7 in train) == (second in train)


def test_the_draft_vocabulary_is_the_most_frequent_answers_filled_with_low_ids(tokenizer, tmp_path):
    record = {"id": 0, "prompt_ids": [200, 201], "response_ids": [50] * 5 + [40] * 3 + [60]}
    made = prepare_rows([write(tmp_path / "a.jsonl", [record])], tokenizer, tmp_path / "cache", 64)
    assert draft_vocabulary(made, 2, 300) == [40, 50]
    assert draft_vocabulary(made, 5, 300) == [0, 1, 40, 50, 60]  # fewer distinct tokens than asked for
    with pytest.raises(ValueError, match="more than"):
        draft_vocabulary(made, 301, 300)
    assert draft_vocabulary(made, 2, 300, among=[3, 50, 60, 70]) == [50, 60]
    assert draft_vocabulary(made, 3, 300, among=[70, 3, 60]) == [3, 60, 70]
    with pytest.raises(ValueError, match="more than the given 3"):
        draft_vocabulary(made, 4, 300, among=[70, 3, 60])
    with pytest.raises(ValueError, match="another target"):
        draft_vocabulary(made, 5, 60)


def test_coverage_is_told_by_source_the_least_covered_first(caplog):
    rows = [
        {"source": "chat", "input_ids": [9, 1, 2, 1, 1], "spans": [[1, 5]]},
        {"source": "news", "input_ids": [9, 1, 7, 8, 9, 2], "spans": [[1, 3], [4, 6]]},
    ]
    assert coverage(rows, [1, 2]) == (6 / 8, {"news": 2 / 4, "chat": 1.0})
    with caplog.at_level("WARNING"):
        assert report_coverage(rows, torch.tensor([1, 2])) == {"news": 0.5, "chat": 1.0}
    assert "75.00 % of the answers; least: news 50.0 %" in caplog.text
    assert "A larger draft_vocab_size" in caplog.text
    caplog.clear()
    report_coverage(rows, torch.tensor([1, 2, 7, 9]))
    assert "larger" not in caplog.text


def test_the_split_keeps_a_chat_together_and_needs_both_sides(tokenizer, tmp_path):
    records = [
        {"id": number, "turn": turn, "prompt_ids": [1, 2], "response_ids": [3, 4]}
        for number in range(60)
        for turn in range(2)
    ]
    made = prepare_rows([write(tmp_path / "a.jsonl", records)], tokenizer, tmp_path / "cache", 64)
    train, held_out = split_rows(made, 0.2)
    names = np.array(made.data["row_id"])
    chats_of = [{name.split(".")[0] for name in names[part]} for part in (train, held_out)]
    assert sorted(train + held_out) == list(range(120))
    assert not chats_of[0] & chats_of[1]
    assert 10 <= len(held_out) <= 40
    assert split_rows(made, 0.2) == (train, held_out)
    for share, fewest in ((1e-9, 1), (1 - 1e-9, 0)):  # at least one chat on either side, whatever is drawn
        train, held_out = split_rows(made, share)
        smaller = (held_out, train)[fewest == 0]
        assert len({made[number]["chat"] for number in smaller}) == 1


def test_a_source_that_is_nothing_says_what_it_may_be(tmp_path):
    with pytest.raises(ValueError, match="neither a file, nor a directory"):
        load_sources([str(tmp_path / "missing.jsonl")])
    (tmp_path / "mixed").mkdir()
    write(tmp_path / "mixed" / "a.jsonl", [{"prompt": "a"}])
    Dataset.from_dict({"prompt": ["b"]}).to_parquet(str(tmp_path / "mixed" / "b.parquet"))
    with pytest.raises(ValueError, match="one kind"):
        load_sources([str(tmp_path / "mixed")])
    only = tmp_path / "mixed" / "b.parquet"
    assert load_sources([str(only)])["prompt"][:] == ["b"]


def test_a_directory_of_answers_ignores_its_provenance(tokenizer, tmp_path):
    where = tmp_path / "answers"
    where.mkdir()
    write(where / "part-00000.jsonl", [{"id": "1", "turn": 0, "prompt_ids": [1], "response_ids": [2, 3]}])
    (where / "provenance.json").write_text("{}")
    assert len(prepare_rows([str(where)], tokenizer, tmp_path / "cache", 64)) == 1


GOOD = {"id": "good", "prompt_ids": [1, 2], "response_ids": [3, 4]}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"response_ids": [3, 4]}, "no prompt"),
        ({"prompt_ids": None, "response_ids": [3, 4]}, "no prompt"),
        ({"prompt_ids": 1, "response_ids": [3, 4]}, "no token ids"),
        ({"prompt_ids": [1], "response_ids": [3, -100]}, "no token ids"),
        ({"prompt_ids": [-1], "response_ids": [3, 4]}, "no token ids"),
        ({"prompt_ids": [1], "response_ids": [3, None]}, "no token ids"),
        ({"prompt_ids": [1], "response_ids": ["3", "a"]}, "no token ids"),
        ({"prompt_ids": [1], "response_ids": "a text"}, "no token ids"),
        ({"prompt_ids": [1], "response_ids": [3, 4.5]}, "no token ids"),
        ({"prompt_ids": [1], "response_ids": [3, 2**31]}, "no token ids"),
        ({"prompt_ids": [1], "response_ids": [3, True]}, "no token ids"),
        ({"prompt_ids": [1], "response_ids": [[3], [4]]}, "no token ids"),
        ({"prompt_ids": [1], "response_ids": {"a": 1}}, "no token ids"),
        ({**GOOD, "turn": "first"}, "a turn that is no number"),
        ({**GOOD, "turn": -1}, "a turn that is no number"),
        ({**GOOD, "turn": [1]}, "a turn that is no number"),
    ],
)
def test_a_row_whose_ids_or_turn_are_none_is_counted_and_the_others_stay(tokenizer, tmp_path, bad, reason):
    source = write(tmp_path / "a.jsonl", [GOOD, bad, {**GOOD, "id": "too"}])
    made = prepare_rows([source], tokenizer, tmp_path / "cache", 64)
    assert [row["row_id"] for row in made.data] == ["good", "too"]
    assert made[1]["input_ids"] == [1, 2, 3, 4]
    ((counted, count),) = made.report["skipped"].items()
    assert reason in counted
    assert count == 1


def test_ids_beyond_a_vocabulary_are_refused_by_the_largest(tokenizer, tmp_path):
    record = {"prompt_ids": [900, 2], "response_ids": [3, 4]}
    made = prepare_rows([write(tmp_path / "a.jsonl", [GOOD, record])], tokenizer, tmp_path / "cache", 64)
    assert made.report["largest_id"] == 900
    refuse_ids_beyond(made.report, 901)
    with pytest.raises(ValueError, match=r"token id 900, .* has 900 ids.*another tokenizer. Give answers"):
        refuse_ids_beyond(made.report, 900)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("report.json", b""),
        ("report.json", b'{"rows": 3'),
        ("report.json", b"[]"),
        ("report.json", b'{"rows": 2}'),
        ("report.json", b"\xff"),
        ("rows.arrow", b""),
        ("rows.arrow", b"broken"),
        ("rows.arrow", None),
        ("counts.npy", b""),
        ("counts.npy", None),
    ],
)
def test_cached_rows_that_cannot_be_read_are_built_again(tokenizer, chats, tmp_path, caplog, file, content):
    made = prepare_rows([chats], tokenizer, tmp_path / "cache", 64)
    kept, report = made.data[:], made.report
    del made
    (written := next((tmp_path / "cache").glob("rows-*[!k]")) / file).unlink()
    if content is not None:
        written.write_bytes(content)
    with caplog.at_level("WARNING"):
        again = prepare_rows([chats], tokenizer, tmp_path / "cache", 64)
    assert (again.data[:], again.report) == (kept, report)
    assert "are built again" in caplog.text
    assert not list(again.directory.glob(".report*"))
    assert len(np.load(again.directory / "counts.npy")) == len(tokenizer)


def test_one_id_in_all_rows_is_one_chat_and_the_split_says_so(tokenizer, tmp_path):
    made = prepare_rows([write(tmp_path / "a.jsonl", [GOOD] * 5)], tokenizer, tmp_path / "cache", 64)
    with pytest.raises(ValueError, match=r"of 5 rows leaves.*All have one id, so they count as one chat"):
        split_rows(made, 0.3)
