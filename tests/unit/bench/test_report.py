"""The HTML report and its plots: whole in one file, true to the results, nothing unescaped."""

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from PIL import Image

from spechead.bench.extras import Peak, Sample
from spechead.bench.plots import acceptance_by_depth, colours_of, speed_up_by_batch
from spechead.bench.report import render
from spechead.bench.results import Load, Results
from spechead.bench.timing import PLAIN
from tests.unit.bench.test_verdict import cell, results

VOID = {"meta", "img"}


class Checked(HTMLParser):
    """Parses a page, and refuses tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.sources: list[str] = []
        self.drafted: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "img":
            self.sources.append(values["src"] or "")
        if tag not in VOID:
            self.open.append("drafted" if values.get("class") == "drafted" else tag)

    def handle_endtag(self, tag: str) -> None:
        last = self.open.pop()
        assert last in (tag, "drafted"), f"</{tag}> closes <{last}>"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] == "drafted":
            self.drafted.append(data)


def measured() -> Results:
    loads = [Load(16), Load(16, batch_size=4)]
    cells = [
        each
        for index in range(2)
        for group in ("chat", "code", "mean")
        for each in (
            cell("plain", group, load=index, ratio=1.0, acceptance_length=None, acceptance_rate=None, drafting=None),
            cell("eagle", group, load=index, ratio=1.5 - index, acceptance_rate_by_depth=[0.7, 0.4], seconds=1.25),
        )
    ]
    return replace(
        results(*cells, loads=loads),
        peaks=[Peak(0, "eagle", 123_000_000)],
        samples=[Sample(0, "eagle", "a", ["One ", "<two>", " three"], [False, True, False])],
        complete=True,
    )


def parsed(page: str) -> Checked:
    reader = Checked()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_the_page_holds_everything_itself() -> None:
    page = render(measured())
    reader = parsed(page)
    assert not re.search(r"(?:src|href)=[\"'](?!data:)", page)
    assert "<link" not in page
    assert "<script" not in page
    assert len(reader.sources) == 3, "one plot over batch sizes, one by depth for each load"
    for source in reader.sources:
        image = Image.open(io.BytesIO(base64.b64decode(source.removeprefix("data:image/png;base64,"))))
        assert image.format == "PNG"
        assert image.width > 400


def test_figures_verdicts_and_settings_are_there() -> None:
    texts = " ".join(parsed(render(measured())).texts)
    for text in ("1.50x", "[1.40, 1.60]", "1.25 s", "123 MB", "0.70", "0.40", "60%", "keep eagle", "spechead bench"):
        assert text in texts
    assert "batch 4, greedy, 16 new tokens" in texts
    assert "interrupted" not in texts


def test_drafted_tokens_are_marked_and_text_is_escaped() -> None:
    page = render(measured())
    assert parsed(page).drafted == ["<two>"]
    assert "<two>" not in page


def test_an_interrupted_run_is_named() -> None:
    assert "interrupted" in render(replace(measured(), complete=False))


def test_low_acceptance_lists_causes() -> None:
    page = render(results(cell(ratio=0.8, ratio_low=0.7, ratio_high=0.9, acceptance_rate=0.1)))
    assert re.search(r"<ol><li>the draft has another tokenizer.*other taps.*chat template.*domain.*</ol>", page)


def test_a_run_of_one_batch_size_has_no_plot_over_them() -> None:
    one = replace(measured(), loads=[Load(16)], cells=[each for each in measured().cells if each.load == 0])
    assert len(parsed(render(one)).sources) == 1


def test_no_plot_of_nothing() -> None:
    assert speed_up_by_batch(measured(), 0.7) is None
    assert acceptance_by_depth([cell()], {}) is None


def test_the_break_even_line_is_drawn() -> None:
    """The dashed line at 1 is black; without it no row of the plot holds so many dark pixels."""
    png = speed_up_by_batch(measured(), 0.0)
    assert png is not None
    image = Image.open(io.BytesIO(png)).convert("L")
    inside = image.crop((90, 20, image.width - 20, image.height - 60))
    rows = [sum(inside.getpixel((x, y)) < 160 for x in range(inside.width)) for y in range(inside.height)]
    assert max(rows) > inside.width // 3


@pytest.mark.parametrize("groups", [1, 3])
def test_curves_of_groups_are_averaged(groups: int) -> None:
    cells = [cell(group=str(number), acceptance_rate_by_depth=[0.5] * (1 + number)) for number in range(groups)]
    assert acceptance_by_depth(cells, {"eagle": "C0"}) is not None


def test_the_mean_stands_first_and_groups_can_be_opened() -> None:
    page = render(measured())
    mean, opened = page.index("<caption>mean</caption>"), page.index("<details><summary>Each of the 2 groups")
    assert mean < opened < page.index("<caption>chat</caption>")


def test_a_method_keeps_its_colour_where_others_are_left_out() -> None:
    every = colours_of(measured())
    assert PLAIN not in every
    several = [cell(method=name, acceptance_rate_by_depth=rates) for name, rates in (("a", [0.5]), ("b", [0.4]))]
    colours = colours_of(results(*several))
    assert len(set(colours.values())) == 2
    assert acceptance_by_depth(several[1:], colours) != acceptance_by_depth(several[1:], {"b": colours["a"]})
