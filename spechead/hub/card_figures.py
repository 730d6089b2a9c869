"""The figures of a model card: tables and sentences made of results.json alone.

Called by card.py. Every group is shown, the ones that lost too; a figure that was not measured is a dash.
"""

from collections.abc import Sequence

from huggingface_hub import EvalResult

from ..bench.results import Cell, Load, Results
from ..bench.timing import MEAN, PLAIN

DASH = "–"


def method_of_kind(kind: str) -> str:
    """Return the method that drafts with a head of this kind (a `model_type`)."""
    return "medusa" if "medusa" in kind else "eagle"


def head_methods(results: Results, kind: str) -> list[str]:
    """Return the names of the methods that drafted with the head of this kind.

    Where a run has several heads of one method (EAGLE-1 and EAGLE-3), each method says which it drafted with, and
    those of the first head come first.

    Args:
        results: The results; no two of their heads may be of this kind.
        kind: The head's `model_type`.
    """
    method = method_of_kind(kind)
    drafted: dict[str, str | None] = {}  # method -> which head it says
    for name, arguments in results.methods.items():
        given = arguments.get("speculative")
        said = given if isinstance(given, dict) else {"method": given}
        if said.get("method") == method:
            drafted[name] = said.get("head")
    called = dict.fromkeys(head for head in drafted.values() if head is not None)
    if not called:
        return list(drafted)
    heads = [model for model in results.models if model.role == "head" and method_of_kind(model.kind) == method]
    own = {head for head, model in zip(called, heads, strict=False) if model.kind == kind}
    return [name for name, head in drafted.items() if head in own]


def describe_load(load: Load) -> str:
    """Return a load in words."""
    how = "greedy" if load.temperature == 0 else f"temperature {load.temperature:g}"
    return f"{how}, batch {load.batch_size}, up to {load.max_new_tokens} new tokens"


def describe_hardware(results: Results) -> str:
    """Return what was measured on, and with."""
    hardware, versions, target = results.hardware, results.versions, results.models[0]
    memory = f"{hardware.memory / 2**30:.0f} GiB"
    return (
        f"{hardware.device} ({hardware.architecture}, {hardware.count} threads or devices, {memory}); target "
        f"{target.name} in {target.dtype}, attention {target.attention or 'default'}; torch {versions.torch}, "
        f"transformers {versions.transformers}, spechead {versions.spechead}, Python {versions.python}"
    )


def group_table(results: Results, load: int, method: str) -> str:
    """Return a Markdown table of one method under one load, a row a group, the mean last."""
    cells = {cell.group: cell for cell in results.cells if cell.load == load and cell.method == method}
    groups = [*[group for group in cells if group != MEAN], *([MEAN] if MEAN in cells else [])]
    header = (
        "group",
        "runs",
        "speed against plain",
        "tokens/s",
        "acceptance length",
        "acceptance rate",
        "same as plain",
    )
    return table(header, [group_row(cells[group]) for group in groups])


def group_row(cell: Cell) -> list[str]:
    """Return a group's figures as text."""
    return [
        f"**{cell.group}**" if cell.group == MEAN else cell.group,
        str(cell.rows),
        ratio(cell),
        f"{cell.tokens_per_second:.1f}",
        DASH if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}",
        DASH if cell.acceptance_rate is None else f"{cell.acceptance_rate:.0%}",
        agreement(cell),
    ]


def agreement(cell: Cell) -> str:
    """Return how many outputs equal plain's, and how many of the others only fell the other way in a tie."""
    if cell.identical is None:
        return DASH
    ties = f" ({cell.ties} tie{'s' if cell.ties > 1 else ''})" if cell.ties else ""
    return f"{cell.identical:.0%}{ties}"


def method_table(results: Results, load: int) -> str:
    """Return a Markdown table of all methods under one load: their ratio to plain by group."""
    groups = list(dict.fromkeys(cell.group for cell in results.cells if cell.load == load and cell.group != MEAN))
    if any(cell.group == MEAN for cell in results.cells if cell.load == load):
        groups.append(MEAN)
    by_place = {(cell.method, cell.group): cell for cell in results.cells if cell.load == load}
    rows = []
    for name in results.methods:
        if name == PLAIN:
            continue
        cells = [by_place.get((name, group)) for group in groups]
        rows.append([name, *[DASH if cell is None else f"{cell.ratio:.2f}x" for cell in cells]])
    return table(("method", *groups), rows)


def losing_groups(results: Results, load: int, method: str) -> list[str]:
    """Return the groups on which a method is not faster than plain, with their ratios."""
    return [
        f"{cell.group} ({cell.ratio:.2f}x)"
        for cell in results.cells
        if cell.load == load and cell.method == method and cell.group != MEAN and cell.ratio < 1.0
    ]


def ratio(cell: Cell) -> str:
    """Return the ratio to plain with its interval."""
    if cell.ratio_low is None or cell.ratio_high is None:
        return f"{cell.ratio:.2f}x"
    return f"{cell.ratio:.2f}x ({cell.ratio_low:.2f}–{cell.ratio_high:.2f})"


def eval_results(results: Results, kind: str) -> list[EvalResult]:
    """Return the figures for the card's metadata: acceptance length and ratio of each group under the first load.

    Args:
        results: The results.
        kind: The head's `model_type`.
    """
    names = head_methods(results, kind)
    source = f"{results.source}: {describe_load(results.loads[0])}"
    found = []
    for cell in results.cells:
        if cell.load != 0 or cell.method not in names or cell.acceptance_length is None:
            continue
        figures = {"acceptance_length": cell.acceptance_length, "speed_against_plain": cell.ratio}
        for metric, value in figures.items():
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=slug(results.source),
                    dataset_name=source,
                    dataset_config=f"{cell.method}: {cell.group}",
                    metric_type=metric,
                    metric_value=round(value, 2),
                )
            )
    return found


def slug(text: str) -> str:
    """Return a source's name as an identifier."""
    return "".join(letter if letter.isalnum() or letter in "-_./" else "-" for letter in text.lower())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column to the left, figures to the right."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join([":--", *["--:"] * (len(header) - 1)]) + "|"]
    return "\n".join([*lines, *["| " + " | ".join(row) + " |" for row in rows]])
