"""docs/support.md says what support.py does."""

from __future__ import annotations

import pytest

from scripts.render_support import PAGE, cell, render
from spechead.support import ARGUMENTS, FIELDS, Rule


def test_page_is_what_the_script_renders() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == render(page), "run `python scripts/render_support.py`"


def test_every_row_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, rule in (ARGUMENTS | FIELDS).items():
        assert f"| `{name}` | {'refused' if rule.remedy else 'honoured'}" in page


def test_cells() -> None:
    assert cell(Rule()) == "honoured"
    assert cell(Rule("leave it out", (None, False))) == "refused: leave it out"
    assert cell(Rule("leave it out", (None, False, 1, 1.0, 0.0))) == "refused unless `1` or `1.0`: leave it out"


def test_stale_page_is_found_and_missing_markers_are_an_error() -> None:
    page = PAGE.read_text(encoding="utf-8")
    stale = page.replace("| `num_beams` | refused", "| `num_beams` | honoured")
    assert stale != page
    assert render(stale) == page
    with pytest.raises(ValueError, match="0 pairs of <!-- fields -->"):
        render(page.replace("<!-- fields -->", ""))
