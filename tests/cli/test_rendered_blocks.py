"""Verdicts and certificates in pages: made of their files, and said to be missing where they are."""

from dataclasses import asdict
from pathlib import Path

import pytest

from scripts import render_readme
from spechead.bench import results as results_file
from spechead.bench.certificate import Certificate, CheckSettings, Distance, Fault, GreedyCheck, LawCheck, MethodCheck
from spechead.bench.figures import summarise
from spechead.bench.results import Hardware, Versions
from spechead.bench.strict_json import write_json
from spechead.stats import DecodeStats
from tests.cli.test_docs import results

VERDICT = "a\n<!-- verdict: out/x.json -->\nold\n<!-- /verdict -->\nb\n"
ACCEPTANCE = "a\n<!-- acceptance: out/x.json -->\nold\n<!-- /acceptance -->\nb\n"
FORWARDS = "a\n<!-- forwards: out/s.json -->\nold\n<!-- /forwards -->\nb\n"
CERTIFICATE = "a\n<!-- certificate: out/c.json -->\nold\n<!-- /certificate -->\nb\n"


def certificate(*methods: MethodCheck) -> Certificate:
    return Certificate(
        created="2026-01-01T00:00:00+00:00",
        command=["spechead", "verify", "--x"],
        versions=Versions("3.11", "2.13", "5.24", "0.1"),
        hardware=Hardware("cpu", 1, 2, "x86_64"),
        models=[],
        source="builtin",
        prompts={},
        settings=CheckSettings(),
        methods=list(methods),
        passed=True,
    )


def test_acceptance_is_shown_by_group(tmp_path: Path) -> None:
    assert "No figures yet" in render_readme.render(ACCEPTANCE, tmp_path)
    counted = DecodeStats(method="prompt_lookup").to_dict() | {"row_steps": 8}
    run = results()
    for record, emitted in zip((one for one in run.records if one.method != "plain"), (10, 20), strict=True):
        record.stats = counted | {"emitted_tokens": emitted}
    run.cells = summarise(run.records, list(run.methods), run.loads)
    results_file.save(run, tmp_path / "out" / "x.json")
    page = render_readme.render(ACCEPTANCE, tmp_path)
    assert "| method | chat | code | mean |" in page
    assert "| prompt_lookup | 1.25 | 2.50 | 1.88 |" in page
    assert "plain" not in page
    assert render_readme.render(page, tmp_path) == page


def test_forwards_are_those_of_their_file(tmp_path: Path) -> None:
    spread = {"low": 0.0, "high": 9.0}
    costs = {
        "target": {"name": "t", "dtype": "float32"},
        "settings": {"threads": 2, "prompt_tokens": 256, "repeats": 40},
        "hardware": {"device": "cpu"},
        "target_forward": {"1": spread | {"median": 0.05}, "8": spread | {"median": 0.12}},
    }
    write_json(costs, tmp_path / "out" / "s.json")
    page = render_readme.render(FORWARDS, tmp_path)
    for line in ("t, float32, on cpu (2 threads)", "| nodes | 1 | 8 |", "| a forward | 50 | 120 |"):
        assert line in page
    assert "| of one node's | 1.00 | 2.40 |" in page
    assert "old" not in page
    (tmp_path / "out" / "s.json").unlink()
    assert "No figures yet: `python scripts/measure_steps.py" in render_readme.render(page, tmp_path)


def test_a_verdict_follows_from_its_file(tmp_path: Path) -> None:
    results_file.save(results(), tmp_path / "out" / "x.json")
    page = render_readme.render(VERDICT, tmp_path)
    assert "**keep prompt_lookup: 2.00x plain" in page
    assert "old" not in page
    assert page.startswith("a\n")
    assert page.endswith("b\n")
    assert render_readme.render(page, tmp_path) == page


def test_a_certificate_shows_what_was_checked(tmp_path: Path) -> None:
    greedy = GreedyCheck(4, 7, 448, 6, 1, 0, 3, 900, 300, 1e-4, "1e-4")
    law = LawCheck(["a"], 3, 4204, 128, 126, 126.9, 0.46, 1e-3, 0.15, 0.95, 0.0, 0, 9000)
    passed = MethodCheck("eagle", {}, False, True, [greedy], None, law)
    failed = MethodCheck("medusa", {}, False, False, faults=[Fault("wrong q", "p = 0")])
    lossy = MethodCheck("draft_model", {}, True, None, distance=Distance(["a"], 3, 900, 0.25, 0.15, 0.3, 0.05))
    write_json(asdict(certificate(passed, failed, lossy)), tmp_path / "out" / "c.json")
    page = render_readme.render(CERTIFICATE, tmp_path)
    for text in (
        "**eagle: passed.** Batch 4: 6 of 7 greedy answers identical, 1 parted at a tie.",
        "4204 samples, 126 degrees of freedom: p = 0.46; a law off by w = 0.15 fails with probability 0.95.",
        "**medusa: FAILED.**",
        "  - wrong q: p = 0",
        "**draft_model: lossy.** Total variation in [0.150, 0.300].",
        "`spechead verify --x`",
    ):
        assert text in page
    assert render_readme.render(page, tmp_path) == page


@pytest.mark.parametrize(
    ("page", "text"), [(VERDICT, "No verdict yet"), (CERTIFICATE, "spechead verify --output out/c.json")]
)
def test_missing_files_are_said(page: str, text: str, tmp_path: Path) -> None:
    found = render_readme.render(page, tmp_path)
    assert text in found
    assert "old" not in found


@pytest.mark.parametrize(
    ("steps", "drafting", "drafted", "shown"),
    [(10, 4, 30, "40%"), (10, 0, 0, "0%"), (10, 0, 30, ""), (0, 0, 0, "")],
)
def test_the_share_of_steps_with_a_draft_is_blank_where_it_was_not_counted(
    steps: int, drafting: int, drafted: int, shown: str
) -> None:
    found = results()
    for record in found.records:
        record.stats = {"steps": steps, "speculating_steps": drafting, "drafted_tokens": drafted}
    assert render_readme._drafting_steps(found, 0, found.records[0].method) == shown
