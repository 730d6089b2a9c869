"""Fill in the tables of figures of README.md and docs/ from results files. No figure in them is typed by hand.

python scripts/render_readme.py

A page says which file it shows: <!-- results: docs/results/name.json --> ... <!-- /results -->. In the place of
"results" may stand "acceptance" (the acceptance length by group), "verdict" (what the file says to do), "certificate"
(of a file of `spechead verify`) or "forwards" (the target's forward by nodes, of a file of scripts/measure_steps.py).
"""

import json
import re
import sys
from pathlib import Path

from spechead.bench import results as results_file
from spechead.bench.certificate import load as load_certificate
from spechead.bench.results import Cell, Results
from spechead.bench.run import check_figures
from spechead.bench.steps import milliseconds
from spechead.bench.timing import MEAN, PLAIN
from spechead.bench.verdict import best, describe, verdicts
from spechead.cli.tables import agreement, by_position, describe_load, place, ratio
from spechead.stats import POSITION_BUCKET

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("results", "acceptance", "verdict", "certificate", "forwards")
BLOCK = re.compile(rf"(<!-- (?P<kind>{'|'.join(KINDS)}): (?P<file>\S+) -->\n).*?(<!-- /(?P=kind) -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return the pages that may show figures."""
    return [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def render(text: str, root: Path = ROOT) -> str:
    """Return a page with every block of figures made anew.

    Args:
        text: the page.
        root: where the results files that it names are looked for.

    Raises:
        ValueError: if a results file is unfinished, or its figures do not follow from its records.
    """
    makers = (block, acceptance_block, verdict_block, certificate_block, forwards_block)
    kinds = dict(zip(KINDS, makers, strict=True))
    return BLOCK.sub(
        lambda match: match[1] + kinds[match["kind"]](root / match["file"], match["file"]) + match[4], text
    )


def block(path: Path, name: str) -> str:
    """Return the text between the markers of one results file."""
    if not path.exists():
        return f"No figures yet: `spechead bench --output {name}` measures them, `make cards` shows them here.\n"
    results = read_results(path, name)
    return introduction(results) + "\n" + "\n".join(table(results, load) for load in range(len(results.loads)))


def read_results(path: Path, name: str) -> Results:
    """Read a results file that may be shown.

    Raises:
        ValueError: if it is unfinished, or its figures do not follow from its records.
    """
    results = results_file.load(path)
    if not results.complete:
        raise ValueError(f"{name} is of an interrupted run; run its command again to finish it.")
    check_figures(results)
    return results


def groups_and_mean(results: Results) -> list[str]:
    """Return the groups of a run, then their mean where there are several: what its tables have columns of."""
    return [*results.prompts, *([MEAN] if len(results.prompts) > 1 else [])]


def acceptance_block(path: Path, name: str) -> str:
    """Return the acceptance length by group, load by load, a row a method."""
    if not path.exists():
        return f"No figures yet: they follow from `{name}`.\n"
    results = read_results(path, name)
    columns, lines = groups_and_mean(results), []
    for index, load in enumerate(results.loads):
        cells = {(cell.group, cell.method): cell.acceptance_length for cell in results.cells if cell.load == index}
        lines += [describe_load(load) + "; acceptance length:", "", *_head(["method", *columns])]
        for method in results.methods:
            lengths = [cells[group, method] for group in columns]
            if None not in lengths:
                lines.append(_row([method, *map(place, lengths)]))
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def verdict_block(path: Path, name: str) -> str:
    """Return what a results file says to do, load by load."""
    if not path.exists():
        return f"No verdict yet: it follows from `{name}`.\n"
    results = read_results(path, name)
    found = verdicts(results)
    lines = []
    for index, load in enumerate(results.loads):
        lines.append(f"- {describe_load(load)}: **{best(found, index)}**")
        lines += [f"  - {describe(verdict)}" for verdict in found if verdict.load == index]
    return "\n".join(lines) + "\n"


def certificate_block(path: Path, name: str) -> str:
    """Return what a certificate says, method by method."""
    if not path.exists():
        return f"No certificate yet: `spechead verify --output {name}` writes it, `make cards` shows it here.\n"
    certificate = load_certificate(path)
    lines = []
    for method in certificate.methods:
        word = {True: "passed", False: "FAILED", None: "lossy"}[method.passed]
        text = f"- **{method.method}: {word}.**"
        for check in method.greedy:
            text += f" Batch {check.batch_size}: {check.identical} of {check.rows} greedy answers identical"
            text += f", {check.ties} parted at a tie." if check.ties else "."
        if (law := method.law) is not None:
            text += f" {law.samples} samples, {law.degrees} degrees of freedom: p = {law.p_value:.3g}; a law off by "
            text += f"w = {law.effect_size:g} fails with probability {law.power:.2f}."
        if (distance := method.distance) is not None:
            text += f" Total variation in [{distance.low:.3f}, {distance.high:.3f}]."
        lines += [text, *(f"  - {fault.name}: {fault.evidence}" for fault in method.faults)]
    return "\n".join(lines) + f"\n\nRepeat it: `{' '.join(certificate.command)}`.\n"


def forwards_block(path: Path, name: str) -> str:
    """Return what a forward of the target costs by the nodes it is fed, as medians in milliseconds."""
    if not path.exists():
        return f"No figures yet: `python scripts/measure_steps.py --results {name}` measures them.\n"
    costs = json.loads(path.read_text(encoding="utf-8"))
    target, settings, hardware = costs["target"], costs["settings"], costs["hardware"]
    nodes, medians = list(costs["target_forward"]), [row["median"] for row in costs["target_forward"].values()]
    lines = [
        *_head(["nodes", *nodes]),
        _row(["a forward", *map(milliseconds, medians)]),
        _row(["of one node's", *(f"{each / medians[0]:.2f}" for each in medians)]),
    ]
    return (
        f"{target['name']}, {target['dtype']}, on {hardware['device']} ({settings['threads']} threads), behind "
        f"{settings['prompt_tokens']} cached tokens, medians of {settings['repeats']} in milliseconds:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def introduction(results: Results) -> str:
    """Say what was measured, on what."""
    target, *others = results.models
    drafts = f" with {' and '.join(model.name for model in others)}" if others else ""
    versions, hardware = results.versions, results.hardware
    return (
        f"{target.name}{drafts}, {target.dtype}, on {hardware.device} ({hardware.count} "
        f"{'threads' if hardware.device != 'cuda' else 'devices'}), torch {versions.torch}, transformers "
        f"{versions.transformers}, {results.created[:10]}. Repeat it: `{' '.join(results.command)}`.\n"
    )


def table(results: Results, load: int) -> str:
    """Return the figures of one load: a row a method, the ratio to plain for each group, then the means."""
    cells = {(cell.group, cell.method): cell for cell in results.cells if cell.load == load}
    columns = groups_and_mean(results)
    head = ["method", *columns, "acceptance length", "acceptance rate", "steps with a draft", "same as plain"]
    lines = [describe_load(results.loads[load]) + "; speed against plain:", "", *_head(head)]
    for method in results.methods:
        if method != PLAIN:
            whole = cells[columns[-1], method]
            ratios = [ratio(cells[group, method]) for group in columns]
            name = method + (" (lossy)" if whole.lossy else "")
            lines.append(
                _row([name, *ratios, *_acceptance(whole), _drafting_steps(results, load, method), agreement(whole)])
            )
    return "\n".join(lines) + "\n" + positions(results, load)


def positions(results: Results, load: int) -> str:
    """Return the acceptance length by place in the answer, the mean over the groups, a row a method."""
    mine = [cell for cell in results.cells if cell.load == load]
    places = {method: by_position([cell for cell in mine if cell.method == method]) for method in results.methods}
    longest = max(map(len, places.values()))
    if longest < 2:
        return ""
    starts = ["first", *(f"from {number * POSITION_BUCKET}" for number in range(1, longest))]
    lines = ["", f"Acceptance length by new tokens before the step, {POSITION_BUCKET} to a column:", ""]
    lines += _head(["method", *starts])
    lines += [_row([method, *map(place, found)]) for method, found in places.items() if found]
    return "\n".join(lines) + "\n"


def _acceptance(cell: Cell) -> list[str]:
    length = "" if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}"
    return [length, "" if cell.acceptance_rate is None else f"{cell.acceptance_rate:.0%}"]


def _drafting_steps(results: Results, load: int, method: str) -> str:
    """Return the share of all steps in which some row had a drafted token.

    What transformers' own methods draft is counted from outside, where the steps with a draft cannot be told.
    """
    mine = [record.stats for record in results.records if (record.load, record.method) == (load, method)]
    names = ("steps", "speculating_steps", "drafted_tokens")
    steps, drafting, drafted = (sum(stats[name] for stats in mine if stats) for name in names)
    return "" if not steps or (drafted and not drafting) else f"{drafting / steps:.0%}"


def _head(cells: list[str]) -> list[str]:
    return [_row(cells), _row(["---"] * len(cells))]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Rewrite the pages; return the exit code."""
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = render(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"rendered {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
