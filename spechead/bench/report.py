"""One self-contained HTML page of a results file: verdicts first, then figures, plots, a text by who wrote it.

Called by `spechead bench`. Everything is in the page: style, plots (as PNG) and the settings that repeat the run.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .figures import means_by_method
from .plots import acceptance_by_depth, acceptance_by_position, colours_of, speed_up_by_batch
from .results import Cell, Load, Results
from .timing import MEAN, PLAIN
from .verdict import best, describe, verdicts

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; font-size: .85rem; }
th, td { padding: .25rem .55rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } caption { text-align: left; font-weight: 600; padding: .4rem 0;
  white-space: nowrap; }
tr.slow td.ratio { color: #a40000; } tr.fast td.ratio { color: #006b2d; }
.verdict { border-left: 4px solid #006b2d; padding: .3rem .8rem; background: #f2f8f4; margin: .4rem 0; }
.verdict.plain { border-color: #8a6d00; background: #fbf7ea; }
.sample { white-space: pre-wrap; background: #f7f7f7; padding: .8rem; border-radius: 4px; }
.drafted { background: #bfe8cc; } code { background: #f2f2f2; padding: 0 .2rem; }
summary { cursor: pointer; margin: .6rem 0; } li { overflow-wrap: anywhere; }
img { max-width: 100%; } .note { color: #555; font-size: .88rem; }
"""
COLUMNS = (
    "method",
    "tokens/s",
    "against plain",
    "latency",
    "first token",
    "tokens a step",
    "acceptance",
    "drafting",
    "verifying",
    "other",
    "peak",
    "as plain",
)


def render(results: Results) -> str:
    """Return the page.

    Args:
        results: a results file; of an unfinished run the page says so.
    """
    found = verdicts(results)
    target, *others = results.models
    parts = [f"<h1>{escape(target.name)}: speculative decoding, measured</h1>", setting(results)]
    if not results.complete:
        parts.append('<p class="verdict plain">This run was interrupted: what follows is what had been measured.</p>')
    parts.append("<h2>Verdicts</h2>")
    for index, load in enumerate(results.loads):
        answer = best(found, index)
        kept = "" if answer.startswith("keep ") and "plain generation" not in answer else " plain"
        parts.append(f'<div class="verdict{kept}"><b>{escape(name_of(load))}</b>: {escape(answer)}</div>')
        mine = [verdict for verdict in found if verdict.load == index]
        parts.append(bullets(describe(verdict) for verdict in mine))
        for verdict in mine:
            if verdict.causes:
                title = f"{verdict.method} keeps little of what it drafts. Likely causes, the first ones first:"
                parts.append(f"<p>{escape(title)}</p>" + bullets(verdict.causes, ordered=True))
    for temperature in dict.fromkeys(load.temperature for load in results.loads):
        sizes = {load.batch_size for load in results.loads if load.temperature == temperature}
        png = speed_up_by_batch(results, temperature)
        if png is not None and len(sizes) > 1:
            parts.append(f"<h2>Speed by batch size, {law_of(temperature)}</h2>" + image(png, "speed by batch size"))
    for index, load in enumerate(results.loads):
        parts.append(section(results, index, load))
    parts.append(settings(results))
    title = escape(f"{target.name}: {', '.join(model.name for model in others) or 'speculation'}")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def setting(results: Results) -> str:
    """Say what was measured on what."""
    models = [f"{model.role} {model.name} ({model.dtype})" for model in results.models]
    hardware = results.hardware
    text = f"{'; '.join(models)}. {hardware.device}, {hardware.count}, {results.created}. Prompts: {results.source}."
    return f'<p class="note">{escape(text)}</p>'


def section(results: Results, index: int, load: Load) -> str:
    """Return the figures, the plots and a sample of one load."""
    cells = [cell for cell in results.cells if cell.load == index]
    peaks = {peak.method: peak.bytes for peak in results.peaks if peak.load == index}
    groups = list(dict.fromkeys(cell.group for cell in cells if cell.group != MEAN))
    tables = {name: table(name, [c for c in cells if c.group == name], peaks) for name in [*groups, MEAN]}
    parts = [f"<h2>{escape(name_of(load))}</h2>"]
    if len(groups) > 1:
        by_group = "".join(tables[name] for name in groups)
        parts += [tables[MEAN], f"<details><summary>Each of the {len(groups)} groups</summary>{by_group}</details>"]
    else:
        parts += [tables[name] for name in groups]
    own = [cell for cell in cells if cell.group != MEAN]
    colours = colours_of(results)
    png = acceptance_by_depth(own, colours)
    if png is not None:
        parts.append("<h3>Kept by depth, mean over the groups</h3>" + image(png, "acceptance by depth"))
        parts.append(depths(own))
    png = acceptance_by_position(own, colours)
    if png is not None:
        parts.append("<h3>Acceptance length by place in the answer</h3>" + image(png, "acceptance length by position"))
    for sample in results.samples:
        if sample.load == index:
            note = f"{sample.method} on {sample.prompt}: marked tokens were drafted, the others are the target's own"
            parts.append(f"<h3>{escape(note)}</h3>" + coloured(sample.pieces, sample.drafted))
    return "\n".join(parts)


def table(caption: str, cells: Sequence[Cell], peaks: dict[str, int]) -> str:
    """Return the cells of one group of a load as a table."""
    rows = [row(cell, peaks.get(cell.method)) for cell in cells]
    return framed(caption, COLUMNS, rows)


def depths(cells: Sequence[Cell]) -> str:
    """Return the share of tries that were kept to each depth, the mean over the groups, as a table."""
    means = means_by_method((cell.method, cell.acceptance_rate_by_depth) for cell in cells)
    deepest = max(map(len, means.values()), default=0)
    rows = []
    for method, rates in means.items():
        texts = ["" if rate is None else f"{rate:.2f}" for rate in rates] + [""] * (deepest - len(rates))
        rows.append("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in (method, *texts)) + "</tr>")
    return framed("drafted depth", ("method", *map(str, range(1, deepest + 1))), rows)


def framed(caption: str, columns: Sequence[str], rows: Sequence[str]) -> str:
    """Return a table that scrolls where the page is too narrow for it."""
    head = "<tr>" + "".join(f"<th>{escape(column)}</th>" for column in columns) + "</tr>"
    title = f"<caption>{escape(caption)}</caption>"
    return f'<div class="wide"><table>{title}{head}' + "\n".join(rows) + "</table></div>"


def row(cell: Cell, peak: int | None) -> str:
    """Return one line of a table."""
    ratio = "" if cell.method == PLAIN else f"{cell.ratio:.2f}x"
    if ratio and cell.ratio_low is not None and cell.ratio_high is not None:
        ratio += f" [{cell.ratio_low:.2f}, {cell.ratio_high:.2f}]"
    speed = "" if cell.method == PLAIN else "fast" if cell.ratio >= 1 else "slow"
    same = "" if cell.identical is None else f"{cell.identical:.0%}"
    same += f", {cell.ties} ties" if cell.ties else ""
    same += f", {cell.bugs} BUGS" if cell.bugs else ""
    values = [
        (cell.method + (" (lossy)" if cell.lossy else ""), ""),
        (f"{cell.tokens_per_second:.1f}", ""),
        (ratio, "ratio"),
        ("" if cell.seconds is None else f"{cell.seconds:.2f} s", ""),
        (f"{cell.seconds_to_first_token * 1000:.0f} ms", ""),
        ("" if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}", ""),
        (share(cell.acceptance_rate), ""),
        (share(cell.drafting), ""),
        (share(cell.verifying), ""),
        (share(cell.other), ""),
        ("" if peak is None else f"{peak / 1e6:,.0f} MB", ""),
        (same, ""),
    ]
    inside = "".join(
        f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>" for text, kind in values
    )
    return f'<tr class="{speed}">{inside}</tr>' if speed else f"<tr>{inside}</tr>"


def coloured(pieces: Sequence[str], drafted: Sequence[bool]) -> str:
    """Return a text whose drafted tokens are marked."""
    spans = [
        f'<span class="drafted">{escape(piece)}</span>' if mark else escape(piece)
        for piece, mark in zip(pieces, drafted, strict=True)
    ]
    return f'<div class="sample">{"".join(spans)}</div>'


def settings(results: Results) -> str:
    """Return what repeats the run: command, versions, methods, fingerprints, prompts."""
    versions = results.versions
    lines = [
        f"command: {' '.join(results.command)}",
        f"python {versions.python}, torch {versions.torch}, transformers {versions.transformers}, "
        f"spechead {versions.spechead}",
        *(f"{name}: {stated(arguments)}" for name, arguments in results.methods.items() if arguments),
        *(
            f"{model.name}: {model.parameters:,} parameters, fingerprint {stated(model.fingerprint)}"
            for model in results.models
        ),
        *(f"prompts of {group}: {', '.join(ids)}" for group, ids in results.prompts.items()),
    ]
    return "<h2>Settings</h2>" + bullets(lines)


def bullets(lines: Iterable[str], ordered: bool = False) -> str:
    """Return a list."""
    kind = "ol" if ordered else "ul"
    items = (re.sub("`([^`]+)`", r"<code>\1</code>", escape(line)) for line in lines)
    return f"<{kind}>" + "".join(f"<li>{item}</li>" for item in items) + f"</{kind}>"


def stated(values: dict[str, Any]) -> str:
    """Return what is set of some arguments, nested ones in brackets."""
    texts = (
        f"{name} ({stated(value)})" if isinstance(value, dict) else f"{name} {value}"
        for name, value in values.items()
        if value is not None
    )
    return ", ".join(texts)


def image(png: bytes, text: str) -> str:
    """Return a PNG as part of the page."""
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def share(value: float | None) -> str:
    """Return a share as text."""
    return "" if value is None else f"{value:.0%}"


def law_of(temperature: float) -> str:
    """Name a temperature."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def name_of(load: Load) -> str:
    """Name a load."""
    return f"batch {load.batch_size}, {law_of(load.temperature)}, {load.max_new_tokens} new tokens"
