"""The results file: strict fields, checks, an append that survives an interrupt."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spechead import load_head
from spechead.bench import strict_json
from spechead.bench.results import Cell, Difference, Hardware, Load, Model, Record, Results, Versions, load, save
from spechead.bench.run import describe_model
from tests.tiny import tiny_model
from tests.tiny_heads import make_head


def record(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "load": 0,
        "method": "plain",
        "prompts": ["a"],
        "group": "chat",
        "repeat": 0,
        "seconds": 1.5,
        "seconds_to_first_token": 0.5,
        "new_tokens": 8,
    }
    return Record(**{**values, **changes})


def results(**changes: Any) -> Results:
    values: dict[str, Any] = {
        "created": "2026-01-01T00:00:00+00:00",
        "command": ["spechead", "bench"],
        "versions": Versions("3.11", "2.13", "5.24", "0.1"),
        "hardware": Hardware("cpu", 1, 2, "x86_64"),
        "models": [Model("t", "target", "llama", 10, "float32", fingerprint={"config": "ab"})],
        "methods": {"plain": {}, "prompt_lookup": {"num_draft_tokens": 4}},
        "loads": [Load(16)],
        "source": "builtin",
        "prompts": {"chat": ["a", "b"]},
        "records": [
            record(),
            record(method="prompt_lookup", stats={"steps": 3}, differences=[Difference(2, 5, None, verdict="bug")]),
        ],
        "cells": [Cell(0, "chat", "plain", 1, 5.0, 1.0, 1.0, 1.0, 0.5)],
    }
    return Results(**{**values, **changes})


def test_a_file_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    save(results(), path)
    assert load(path) == results()
    assert os.listdir(path.parent) == ["results.json"]


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    save(results(), path)

    def cut(*args: Any, **kwargs: Any) -> None:
        args[1].write('{"schema": 1, "recor')
        raise KeyboardInterrupt

    monkeypatch.setattr(strict_json.json, "dump", cut)
    with pytest.raises(KeyboardInterrupt):
        save(results(complete=True), path)
    monkeypatch.undo()
    assert load(path) == results()
    assert os.listdir(tmp_path) == ["results.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "its schema is 2, this version reads 1"),
        ({"surplus": 1}, "surplus"),
        ({"source": 5}, "source"),
        ({"hardware": {"device": "cpu", "memory": "much", "count": 1, "architecture": "x"}}, "memory"),
        ({"methods": {"prompt_lookup": {}}}, "first method must be 'plain'"),
        ({"records": [asdict(record(method="medusa"))]}, "does not have"),
        ({"records": [asdict(record(prompts=["z"]))]}, "does not have"),
        ({"records": [asdict(record(load=1))]}, "load=1 is out of range"),
        ({"records": [{**asdict(record()), "new_tokens": 1.5}]}, "new_tokens"),
        ({"cells": [{"load": 0}]}, "missing"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({**asdict(results()), **change}))
    with pytest.raises(ValueError, match=message):
        load(path)


def test_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"results\.json is no results file"):
        load(path)


def test_figures_that_are_no_numbers_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        save(results(records=[record(seconds=float("nan"))]), tmp_path / "results.json")
    assert os.listdir(tmp_path) == []


def test_a_later_turn_counts_as_its_prompt() -> None:
    results(records=[record(prompts=["a/2"])]).check()


def test_a_prompts_own_id_may_hold_a_slash() -> None:
    run = results(
        prompts={"chat": ["a", "team/b"]}, records=[record(prompts=[name]) for name in ("team/b", "team/b/2")]
    )
    run.check()
    with pytest.raises(ValueError, match="that the run does not have"):
        results(records=[record(prompts=["team/a"])]).check()


@pytest.mark.parametrize("change", ["weights", "default"])
def test_a_head_that_was_trained_or_tuned_on_in_its_place_is_another_run(change: str, tmp_path: Path) -> None:
    head = make_head("eagle3", tiny_model("llama"))
    head.save_pretrained(tmp_path / "head")
    described = [describe_model(load_head(tmp_path / "head"), "head") for _ in range(2)]
    assert described[0] == described[1]
    run = results(models=[described[0]])
    save(run, tmp_path / "results.json")
    assert run.same_run(load(tmp_path / "results.json"))
    if change == "weights":
        with torch.no_grad():
            head.fc.weight[0, 0] += 1
    else:
        head.config.confidence_threshold = 0.2
    head.save_pretrained(tmp_path / "head")
    assert not run.same_run(results(models=[describe_model(load_head(tmp_path / "head"), "head")]))


def test_which_prompts_are_measured() -> None:
    run = results()
    assert run.measured(0, ["a"])
    assert not run.measured(0, ["b"])
    assert not run.measured(1, ["a"])
    assert not results(records=[record()]).measured(0, ["a"])


def test_a_run_continues_only_one_like_it() -> None:
    run = results()
    assert run.same_run(replace(run, created="later", command=["x"], records=[], cells=[], complete=True))
    assert not run.same_run(replace(run, loads=[Load(32)]))
    assert not run.same_run(replace(run, methods={"plain": {}}))


def test_a_file_without_digests_is_of_an_earlier_version(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({name: value for name, value in asdict(results()).items() if name != "digests"}))
    with pytest.raises(ValueError, match=r"an earlier version wrote it, without digests .*; measure again"):
        load(path)


def test_a_place_without_steps_reads_back(tmp_path: Path) -> None:
    whole = results(cells=[replace(results().cells[0], acceptance_length_by_position=[2.0, None])])
    save(whole, tmp_path / "results.json")
    assert load(tmp_path / "results.json") == whole
