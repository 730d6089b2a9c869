"""Pages that are made by scripts: docs/cli.md equals --help, figures equal the results files."""

from dataclasses import replace
from pathlib import Path

import pytest

from scripts import render_cli_docs, render_readme
from spechead.bench import results as results_file
from spechead.bench.figures import summarise
from spechead.bench.results import Hardware, Load, Model, Record, Results, Versions
from spechead.bench.run import check_figures

MARKED = "before\n<!-- results: out/x.json -->\nold 9.99x\n<!-- /results -->\nafter\n"


def test_docs_cli_equals_help() -> None:
    assert render_cli_docs.PAGE.read_text(encoding="utf-8") == render_cli_docs.render(), "run `make cards`"


def test_pages_show_what_the_results_files_say() -> None:
    pages = render_readme.pages()
    assert any("<!-- results:" in page.read_text(encoding="utf-8") for page in pages)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert render_readme.render(text) == text, f"{page.name} differs from its results; run `make cards`"


def results(complete: bool = True) -> Results:
    records = [
        Record(0, method, [prompt], group, 0, seconds, 0.1, 10, differences=differences)
        for prompt, group in (("a", "chat"), ("b", "code"))
        for method, seconds, differences in (("plain", 2.0, None), ("prompt_lookup", 1.0, []))
    ]
    methods, loads = {"plain": {}, "prompt_lookup": {}}, [Load(16)]
    return Results(
        created="2026-01-02T00:00:00+00:00",
        command=["spechead", "bench", "--x"],
        versions=Versions("3.11", "2.13", "5.24", "0.1"),
        hardware=Hardware("Fast 1", 1, 2, "x86_64"),
        models=[Model("tiny", "target", "llama", 10, "float32")],
        methods=methods,
        loads=loads,
        source="builtin",
        prompts={"chat": ["a"], "code": ["b"]},
        records=records,
        cells=summarise(records, list(methods), loads),
        complete=complete,
    )


def test_a_block_is_made_of_its_file(tmp_path: Path) -> None:
    results_file.save(results(), tmp_path / "out" / "x.json")
    page = render_readme.render(MARKED, tmp_path)
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "9.99" not in page
    assert "| prompt_lookup | 2.00x | 2.00x | 2.00x |" in page
    assert "`spechead bench --x`" in page
    assert render_readme.render(page, tmp_path) == page


def test_a_missing_file_is_said_with_the_command(tmp_path: Path) -> None:
    page = render_readme.render(MARKED, tmp_path)
    assert "9.99" not in page
    assert "spechead bench --output out/x.json" in page


def test_unfinished_and_edited_files_are_refused(tmp_path: Path) -> None:
    results_file.save(results(complete=False), tmp_path / "out" / "x.json")
    with pytest.raises(ValueError, match="interrupted run"):
        render_readme.render(MARKED, tmp_path)
    run = results()
    check_figures(run)
    for cells in ([replace(run.cells[0], ratio=9.9), *run.cells[1:]], run.cells[:-1]):
        edited = replace(run, cells=cells)
        with pytest.raises(ValueError, match="do not follow from the records"):
            check_figures(edited)
