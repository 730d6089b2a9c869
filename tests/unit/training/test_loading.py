"""Sources on disk: names that are patterns, files that are no text, and sources whose columns differ in type."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

from spechead.training.chat import messages_of
from spechead.training.loading import load_sources
from spechead.training.rows import prepare_rows

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("name", ["tw[1].jsonl", "tw*.jsonl", "tw?.jsonl", "tw[12]/a.jsonl", "tw[!a].jsonl"])
def test_a_file_name_is_no_pattern(tmp_path, name):
    for twin in ("tw1.jsonl", "tw2.jsonl", "tw1/a.jsonl", "tw2/a.jsonl"):
        write(tmp_path / twin, [{"prompt": "twin"}])
    assert load_sources([write(tmp_path / name, [{"prompt": "own"}])])["prompt"][:] == ["own"]


def test_a_directory_whose_name_is_a_pattern_is_read_alone(tmp_path):
    write(tmp_path / "tw1" / "a.jsonl", [{"prompt": "twin"}])
    write(tmp_path / "tw[1]" / "a.jsonl", [{"prompt": "own"}])
    assert load_sources([str(tmp_path / "tw[1]")])["prompt"][:] == ["own"]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("first", [b"", b'{"prompt": "good"}\n', b'{"prompt": 1}\n'])
def test_bytes_that_are_no_utf8_are_refused_with_the_files_name(tmp_path, alone, first):
    (tmp_path / "latin.jsonl").write_bytes(first + '{"prompt": "café"}\n'.encode("latin-1"))
    write(tmp_path / "fine.jsonl", [{"prompt": "a"}])
    with pytest.raises(ValueError, match=r"latin\.jsonl cannot be read: line [12] is no UTF-8"):
        load_sources([str(tmp_path / "latin.jsonl" if alone else tmp_path)])


CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [{**USER, "name": "Ann"}, ANSWER]},
        {"messages": [USER, {**ANSWER, "tool_calls": [CALL]}]},
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [{"content": "a", "role": "user"}, {"content": "bc", "role": "assistant"}]},
        {"conversations": [{"from": "human", "value": "a", "weight": 1}, {"from": "gpt", "value": "bc", "weight": 0}]},
        {"messages": json.dumps([USER, ANSWER])},
        {"messages": None},
        {"messages": "no chat"},
        {"prompt": [USER], "messages": [USER, ANSWER]},
    ],
)
def test_sources_whose_messages_differ_in_fields_go_together(tmp_path, other):
    plain = {"id": 1, "messages": [USER, ANSWER], "prompt": '"5"'}
    shared = {"id": 2, "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bc"}]}
    sources = [
        write(tmp_path / f"{number}.jsonl", [record])
        for number, record in enumerate([plain, {**other, "id": 3}, shared])
    ]
    data = load_sources(sources)
    assert data["id"][:] == ["1", "3", "2"]
    assert data["prompt"][0] == '"5"'
    assert messages_of(data[0]) == messages_of(data[2]) == [USER, ANSWER]
    (alone,) = load_sources([sources[1]])
    if "messages" not in other or isinstance(other["messages"], list):
        assert messages_of(data[1]) == messages_of(alone)


def test_a_column_of_several_types_passes_beside_ids_that_become_texts(tmp_path):
    contents = ["text", [{"type": "text"}], {"deep": 1}]
    rows = [{"id": [1], "messages": [{**USER, "content": content}]} for content in contents]
    data = load_sources([write(tmp_path / "a.jsonl", rows)])
    assert data["id"][:] == ["[1]"] * 3
    assert [messages_of(row)[0]["content"] for row in data] == contents


def test_a_text_prompt_stays_beside_a_source_whose_prompt_is_a_list(tmp_path):
    texts = write(tmp_path / "a.jsonl", [{"prompt": "5"}, {"prompt": "[1]"}])
    lists = write(tmp_path / "b.jsonl", [{"prompt": [USER]}])
    assert load_sources([texts, lists])["prompt"][:] == ["5", "[1]", None]


def test_answers_whose_ids_differ_in_type_give_the_rows_that_each_gives_alone(tokenizer, tmp_path):
    columns = {"prompt_ids": [[1, 2]], "response_ids": [[3, 4]], "turn": [0]}
    sources = [
        write(tmp_path / "a.jsonl", [{key: value[0] for key, value in columns.items()}]),
        write(tmp_path / "b.jsonl", [{"prompt_ids": ["x"], "response_ids": ["y", "z"], "turn": "first"}]),
        write(tmp_path / "c.jsonl", [{"prompt_ids": [], "response_ids": [3, 4], "turn": 0}]),
        str(tmp_path / "d.parquet"),
    ]
    Dataset.from_dict(columns).cast_column("turn", Dataset.from_dict({"turn": ["0"]}).features["turn"]).to_parquet(
        sources[-1]
    )
    made = prepare_rows(sources, tokenizer, tmp_path / "cache", 64)
    assert [row["input_ids"] for row in made.data] == [[1, 2, 3, 4]] * 2
    assert sum(made.report["skipped"].values()) == 2


def test_an_id_that_is_a_list_or_an_object_becomes_its_json(tokenizer, tmp_path):
    answered = {"prompt_ids": [5, 6], "response_ids": [7, 8]}
    mixed = write(tmp_path / "a.jsonl", [{"id": made, **answered} for made in (1, [1, 2], {"a": 1}, "x", None)])
    lists = write(tmp_path / "b.jsonl", [{"id": [3, 4], "source": {"of": "b"}, **answered}])
    made = prepare_rows([mixed, lists], tokenizer, tmp_path / "cache", 64)
    assert made.data["row_id"][:] == ["1", "[1, 2]", '{"a": 1}', "x", "4", "[3, 4]"]
    assert made.data["source"][-1] == '{"of": "b"}'
