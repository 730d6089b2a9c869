"""Verdicts: which figures lead to which decision, and what is said about a low acceptance."""

from dataclasses import replace
from typing import Any

import pytest

from spechead.bench.results import Cell, Hardware, Load, Model, Results, Versions
from spechead.bench.verdict import best, describe, verdicts
from spechead.decoding import LIKELY_CAUSES


def cell(method: str = "eagle", group: str = "mean", **changes: Any) -> Cell:
    values: dict[str, Any] = {
        "load": 0,
        "group": group,
        "method": method,
        "rows": 8,
        "tokens_per_second": 10.0,
        "ratio": 1.5,
        "ratio_low": 1.4,
        "ratio_high": 1.6,
        "seconds_to_first_token": 0.1,
        "acceptance_length": 2.5,
        "acceptance_rate": 0.6,
        "drafting": 0.2,
    }
    return Cell(**{**values, **changes})


def results(*cells: Cell, loads: list[Load] | None = None) -> Results:
    methods = ["plain", *dict.fromkeys(each.method for each in cells if each.method != "plain")]
    return Results(
        created="2026-01-01T00:00:00+00:00",
        command=["spechead", "bench"],
        versions=Versions("3.11", "2.13", "5.24", "0.1"),
        hardware=Hardware("cpu", 1, 2, "x86_64"),
        models=[Model("t", "target", "llama", 10, "float32")],
        methods={name: {} for name in methods},
        loads=loads or [Load(16)],
        source="builtin",
        prompts={"chat": ["a"], "code": ["b"]},
        cells=list(cells),
    )


def decision(*cells: Cell, loads: list[Load] | None = None) -> tuple[str, str]:
    found = verdicts(results(*cells, loads=loads))
    assert len(found) == 1
    return found[0].decision, found[0].reason


def test_a_sure_gain_is_kept() -> None:
    assert decision(cell()) == ("keep", "1.50x plain, interval [1.40, 1.60]")


def test_groups_that_lose_are_named() -> None:
    parts = [cell(group="code", ratio=2.2), cell(group="chat", ratio=0.8)]
    what, why = decision(cell(), *parts)
    assert what == "keep"
    assert "slower on chat, where auto would step back" in why
    parts = [cell(group=group, ratio=ratio, method="auto") for group, ratio in (("code", 2.2), ("chat", 0.8))]
    assert decision(cell(method="auto"), *parts)[1].endswith("; slower on chat")


def test_a_gain_without_interval_says_so() -> None:
    what, why = decision(cell(ratio=1.2, ratio_low=None, ratio_high=None))
    assert what == "keep"
    assert "no interval" in why
    close = cell(ratio=1.01, ratio_low=None, ratio_high=None, acceptance_length=1.2)
    assert decision(close)[0] == "try more prompts"


def test_what_cannot_be_told_apart_asks_for_more_prompts() -> None:
    what, why = decision(cell(ratio=1.0, ratio_low=0.9, ratio_high=1.1, acceptance_length=1.2))
    assert what == "try more prompts"
    assert "no difference shown" in why


@pytest.mark.parametrize(
    ("changes", "what", "why"),
    [
        ({"acceptance_rate": 0.1}, "drop", "10% of the drafted depth is kept"),
        ({"drafting": 0.6}, "try fewer drafted tokens", "60% of the steps' time"),
        ({}, "try fewer drafted tokens", "2.50 tokens a step do not pay"),
        ({"acceptance_length": 1.1}, "drop", "costs in work"),
    ],
)
def test_a_sure_loss_is_dropped_or_mended(changes: dict[str, Any], what: str, why: str) -> None:
    lost = {"ratio": 0.7, "ratio_low": 0.6, "ratio_high": 0.8}
    found = decision(cell(**{**lost, **changes}))
    assert found[0] == what
    assert why in found[1]


def test_large_batches_are_to_be_made_smaller() -> None:
    lost = cell(ratio=0.7, ratio_low=0.6, ratio_high=0.8)
    assert decision(lost, loads=[Load(16, batch_size=16)])[0] == "try smaller batches"


def test_where_some_groups_win_auto_is_tried() -> None:
    lost = {"ratio": 0.9, "ratio_low": 0.85, "ratio_high": 0.95}
    what, why = decision(cell(**lost), cell(group="code", ratio=1.4), cell(group="chat", ratio=0.5))
    assert what == "try auto"
    assert "pays on code alone" in why
    assert decision(cell("auto", **lost), cell("auto", "code", ratio=1.4))[0] != "try auto"


def test_bugs_come_before_speed() -> None:
    what, why = decision(cell(bugs=2))
    assert what == "drop"
    assert "spechead verify" in why


def test_a_low_acceptance_of_something_trained_lists_the_causes_in_order() -> None:
    low = [
        cell(acceptance_rate=0.1),
        cell(group="chat", acceptance_rate=0.05),
        cell(group="code", acceptance_rate=0.2),
    ]
    (found,) = verdicts(results(*low))
    assert [cause.startswith(start) for cause, start in zip(found.causes, LIKELY_CAUSES, strict=True)] == [True] * 5
    for cause, word in zip(
        found.causes, ("tokenizer", "family or revision", "taps", "template", "domain"), strict=True
    ):
        assert word in cause
    assert "code keeps 20%, chat 5%" in found.causes[-1]
    assert verdicts(results(cell(acceptance_rate=0.31)))[0].causes == []
    assert verdicts(results(cell("prompt_lookup", acceptance_rate=0.1)))[0].causes == []
    assert verdicts(results(cell("eagle K=4", acceptance_rate=0.1)))[0].causes != []


def test_each_load_has_its_best() -> None:
    lost = {"ratio": 0.7, "ratio_low": 0.6, "ratio_high": 0.8}
    found = verdicts(
        results(
            cell(ratio=1.3, ratio_low=1.2, ratio_high=1.4),
            cell("prompt_lookup"),
            replace(cell(**lost), load=1, acceptance_length=1.1),
            loads=[Load(16), Load(16, batch_size=4), Load(16, batch_size=8)],
        )
    )
    assert best(found, 0).startswith("keep prompt_lookup: 1.50x")
    assert best(found, 1) == "keep plain generation: nothing that was measured is faster"
    assert [verdict.method for verdict in found if verdict.load == 0] == ["prompt_lookup", "eagle"]
    assert describe(found[1]).startswith("eagle: keep (1.30x plain")


def test_one_group_is_its_own_mean() -> None:
    assert decision(cell(group="code"))[0] == "keep"
