"""The certificate file: strict fields, what reads back, what is refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from spechead.bench.certificate import (
    Certificate,
    CheckSettings,
    DrawCheck,
    Fault,
    GreedyCheck,
    LawCheck,
    MethodCheck,
    TreeCheck,
    load,
)
from spechead.bench.results import Difference, Hardware, Model, Versions
from spechead.bench.strict_json import write_json


def certificate() -> Certificate:
    greedy = GreedyCheck(1, 2, 32, 1, 1, 0, 3, 40, 20, 1e-4, "1e-4", [Difference(3, 4, 5, 1e-5, 1e-4, "tie")])
    law = LawCheck(["a"], 3, 900, 64, 63, 60.1, 0.5, 1e-3, 0.2, 0.95, 0.0, 0, 2700)
    method = MethodCheck(
        "eagle",
        {"num_draft_tokens": None},
        False,
        False,
        [greedy],
        TreeCheck(2, 10, 1e-6, 1e-4, 3, 0.0, 1e-6, 4),
        law,
        [DrawCheck("drafted tokens", 100, 0.4, 0)],
        None,
        [Fault("wrong q", "p = 0")],
    )
    return Certificate(
        created="2026-01-01T00:00:00+00:00",
        command=["spechead", "verify"],
        versions=Versions("3.11", "2.13", "5.24", "0.1"),
        hardware=Hardware("cpu", 1, 2, "x86_64"),
        models=[Model("t", "target", "llama", 10, "float32", fingerprint={"config": "ab"})],
        source="builtin",
        prompts={"chat": ["a"]},
        settings=CheckSettings(),
        methods=[method],
        passed=False,
    )


def test_a_file_reads_back_equal(tmp_path: Path) -> None:
    write_json(asdict(certificate()), tmp_path / "cert.json")
    assert load(tmp_path / "cert.json") == certificate()


def test_what_a_lossy_method_leaves_out_reads_back_too(tmp_path: Path) -> None:
    short = replace(certificate(), methods=[MethodCheck("eagle", {}, True, None)], passed=None)
    write_json(asdict(short), tmp_path / "cert.json")
    assert load(tmp_path / "cert.json") == short


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "its schema is 2, this version reads 1"),
        ({"surplus": 1}, "no field 'surplus'"),
        ({"passed": "yes"}, "passed"),
        ({"settings": {"tokens": 9}}, "outcomes"),
        ({"methods": [{"method": "eagle", "arguments": {}, "lossy": False}]}, "passed"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "cert.json"
    path.write_text(json.dumps({**asdict(certificate()), **change}))
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "checks nothing"),
        ({"batch_sizes": []}, "batch_sizes"),
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"temperature": 0.0}, "samples nothing"),
        ({"top_k": 50}, "outcomes"),
        ({"tokens": 5, "top_k": 2}, "at most 4"),
    ],
)
def test_settings_that_check_nothing_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckSettings(**change)
