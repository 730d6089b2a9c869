"""Prompts: the package's own set, Spec-Bench's layout, a request log, selection, encoding."""

import json
from collections import Counter
from pathlib import Path

import pytest

from spechead.bench.prompts import KINDS, SPEC_BENCH_GROUPS, Prompt, builtin_prompts, encode, from_rows, load_prompts
from tests.tiny_tokenizer import tiny_tokenizer


def write(path: Path, rows: list[object]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_the_own_set_has_seven_kinds_of_real_prompts() -> None:
    prompts = builtin_prompts()
    counts = Counter(prompt.group for prompt in prompts)
    assert tuple(counts) == KINDS
    assert min(counts.values()) >= 4
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert all(prompt.id.startswith(prompt.group.split("-")[0]) for prompt in prompts)
    lengths = {kind: [len(p.messages[0]["content"]) for p in prompts if p.group == kind] for kind in KINDS}
    assert all(min(lengths[kind]) > 800 for kind in ("summary", "passage"))
    assert all(min(values) > 150 for values in lengths.values())
    assert sum("```" in p.messages[0]["content"] for p in prompts) == counts["code"]


def spec_bench(category: str, number: int, turns: int = 1) -> dict[str, object]:
    return {"question_id": number, "category": category, "turns": [f"turn {turn}" for turn in range(turns)]}


def test_spec_bench_has_thirteen_categories_in_six_groups(tmp_path: Path) -> None:
    rows = [spec_bench(category, number, 2) for number, category in enumerate(SPEC_BENCH_GROUPS)]
    prompts = load_prompts(write(tmp_path / "spec.jsonl", rows))
    assert len(SPEC_BENCH_GROUPS) == len(prompts) == 13
    assert set(SPEC_BENCH_GROUPS.values()) == {
        "multi-turn",
        "translation",
        "summarization",
        "qa",
        "math_reasoning",
        "rag",
    }
    assert prompts[0] == Prompt("0", "multi-turn", ({"role": "user", "content": "turn 0"},), ("turn 1",))


def test_a_few_of_a_group_are_spread_over_it(tmp_path: Path) -> None:
    names = ["writing"] * 10 + ["coding"] * 10 + ["stem"] * 10 + ["qa"] * 2
    path = write(tmp_path / "spec.jsonl", [spec_bench(name, number) for number, name in enumerate(names)])
    assert [prompt.id for prompt in load_prompts(path, per_group=3)] == ["0", "10", "20", "30", "31"]
    assert [prompt.id for prompt in load_prompts(path, groups=["qa"], per_group=1)] == ["30"]


def test_a_request_log_keeps_roles_and_drops_the_answers(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    rows = [
        {"messages": [*chat, {"role": "assistant", "content": "hello"}], "id": "a", "group": "short"},
        {"prompt": "just text"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    first, second, third = load_prompts(write(tmp_path / "log.jsonl", rows))
    assert first == Prompt("a", "short", tuple(chat))
    assert second == Prompt("log-2", "log", ({"role": "user", "content": "just text"},))
    assert third.messages == ({"role": "user", "content": "q"},)


def test_another_file_goes_through_datasets(tmp_path: Path) -> None:
    from datasets import Dataset

    path = tmp_path / "log.parquet"
    Dataset.from_list([{"prompt": "one"}, {"prompt": "two"}]).to_parquet(str(path))
    assert [prompt.messages[0]["content"] for prompt in load_prompts(str(path))] == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "x"}\n{oops', r"log\.jsonl, line 2 is no JSON"),
        ("[1]", r"line 1 must hold an object; it holds list"),
        ('{"text": "x"}', r"row 1 of log cannot be a prompt: neither messages"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r"row 1 of log cannot be a prompt: no messages"),
        ('{"category": "poems", "turns": ["x"]}', r"category 'poems' is none of writing"),
        ('{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "a"}', r"several rows have the id 'a'"),
        ('{"category": ["writing"], "turns": ["x"]}', r"category \['writing'\] is none of"),
        ('{"category": "writing", "turns": "hello", "question_id": 1}', r"turns='hello' must be a list of texts"),
        ('{"category": "writing", "turns": [5], "question_id": 1}', r"turns=\[5\] must be a list of texts"),
        ('{"category": "writing", "turns": ["x"]}', r"question_id is missing"),
        ('{"messages": "hello"}', r"messages is no list of turns"),
        ('{"conversations": ["hello"]}', r"conversations is no list of turns"),
        ("\n", r"holds no prompt"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path))


def test_unknown_sources_and_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="no/such-data"):
        load_prompts("no/such-data")
    with pytest.raises(ValueError, match=r"no prompt is of group poems; there are chat, code"):
        load_prompts("builtin", groups=["poems"])
    with pytest.raises(ValueError, match="per_group=0"):
        load_prompts("builtin", per_group=0)


def test_encoding_uses_the_template_its_arguments_or_neither() -> None:
    tokenizer = tiny_tokenizer()
    chat = (
        {"role": "user", "content": "w5 w6"},
        {"role": "assistant", "content": "w7"},
        {"role": "user", "content": "w8"},
    )
    assert encode(tokenizer, chat) == [1, 5, 6, 2, 7, 1, 8, 2]
    closed = tiny_tokenizer("{% if think %}w9 {% endif %}{{ messages[0]['content'] }}")
    assert encode(closed, chat, {"think": True}) == [9, 5, 6]
    bare = tiny_tokenizer(None)
    assert encode(bare, chat) == [5, 6, 7, 8]
    with pytest.raises(ValueError, match="no chat template"):
        encode(bare, chat, {"think": True})


def test_an_id_of_zero_is_an_id(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"id": 0, "prompt": "x"}\n{"prompt": "y"}\n{"id": "", "prompt": "z"}\n')
    assert [prompt.id for prompt in load_prompts(str(path))] == ["0", "log-2", "log-3"]


def test_rows_without_a_group_take_the_sources_name() -> None:
    assert [prompt.group for prompt in from_rows([{"prompt": "a"}, {"prompt": "b", "group": "x"}], "mine")] == [
        "mine",
        "x",
    ]
