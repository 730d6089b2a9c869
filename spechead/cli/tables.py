"""Tables of figures: results cells as a person reads them."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from ..bench.figures import mean_by_place
from ..bench.results import Cell, Load
from ..bench.timing import MEAN, PLAIN

TABLE_WIDTH = 160


def figures(cells: Sequence[Cell], title: str | None = None, groups: bool = True) -> Table:
    """Return one line a group and method: speed, ratio to plain, acceptance, agreement.

    Args:
        cells: in the order to show.
        title: of the table.
        groups: show the group, and the time to the first token; without them the table fits 80 columns.
    """
    table = Table(title=title, title_justify="left")
    names = ["group", "method"] if groups else ["method"]
    for column in names:
        table.add_column(column, no_wrap=True)
    times = ["first token"] if groups else []
    for column in ("tokens/s", "ratio to plain", *times, "acceptance length", "acceptance rate", "same as plain"):
        table.add_column(column, justify="right", overflow="fold")
    last = None
    for cell in cells:
        if last is not None and cell.group != last:
            table.add_section()
        line = [
            *(["" if cell.group == last else cell.group] if groups else []),
            cell.method + (" (lossy)" if cell.lossy else ""),
            f"{cell.tokens_per_second:.1f}",
            ratio(cell),
            *([f"{cell.seconds_to_first_token * 1000:.0f} ms"] if groups else []),
            "" if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}",
            "" if cell.acceptance_rate is None else f"{cell.acceptance_rate:.0%}",
            agreement(cell),
        ]
        table.add_row(*line)
        last = cell.group
    return table


def table_console() -> Console:
    """Return standard output, wide enough for a table where it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, TABLE_WIDTH))


def costs(cells: Sequence[Cell], peaks: Mapping[str, int]) -> Table:
    """Return one line a method: latency, where a step's time goes, acceptance by depth, peak memory.

    Args:
        cells: of one load; the mean over groups is shown, or the only group.
        peaks: method -> bytes.
    """
    table = Table(title="means: time and memory", title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in (
        "latency",
        "first token",
        "drafting",
        "verifying",
        "other",
        "kept by depth",
        "length by position",
        "peak memory",
    ):
        table.add_column(column, justify="right", overflow="fold")
    for cell in cells:
        if cell.group == MEAN or len({each.group for each in cells}) == 1:
            shares = ["" if part is None else f"{part:.0%}" for part in (cell.drafting, cell.verifying, cell.other)]
            mine = [each for each in cells if each.method == cell.method]
            depths, places = by_depth(mine), by_position(mine)
            peak = f"{peaks[cell.method] / 1e6:,.0f} MB" if cell.method in peaks else ""
            latency = "" if cell.seconds is None else f"{cell.seconds:.2f} s"
            first = f"{cell.seconds_to_first_token * 1000:.0f} ms"
            lists = (" ".join(map(place, each)) for each in (depths, places))
            table.add_row(cell.method, latency, first, *shares, *lists, peak)
    return table


def place(figure: float | None) -> str:
    """Return a figure of a list, a dash where nothing was measured."""
    return "-" if figure is None else f"{figure:.2f}"


def by_depth(cells: Sequence[Cell]) -> list[float | None]:
    """Return one method's acceptance by depth, the mean over the groups that went so deep."""
    return mean_by_place([cell.acceptance_rate_by_depth for cell in cells if cell.group != MEAN])


def by_position(cells: Sequence[Cell]) -> list[float | None]:
    """Return one method's acceptance length by place in the answer, the mean over the groups that went so far."""
    return mean_by_place([cell.acceptance_length_by_position for cell in cells if cell.group != MEAN])


def by_group(cells: Sequence[Cell]) -> list[Cell]:
    """Order cells by group, each group's methods together, the mean last."""
    groups = [*dict.fromkeys(cell.group for cell in cells if cell.group != MEAN), MEAN]
    return [cell for group in groups for cell in cells if cell.group == group]


def ratio(cell: Cell) -> str:
    """Return the ratio with its interval, as text."""
    if cell.method == PLAIN:
        return ""
    if cell.ratio_low is None or cell.ratio_high is None:
        return f"{cell.ratio:.2f}x"
    return f"{cell.ratio:.2f}x [{cell.ratio_low:.2f}, {cell.ratio_high:.2f}]"


def agreement(cell: Cell) -> str:
    """Say how often the tokens equal plain's, and what explains the others."""
    if cell.identical is None:
        return ""
    if cell.identical == 1:
        return "all"
    known = [f"{count} {name}" for count, name in ((cell.ties, "ties"), (cell.bugs, "BUGS")) if count]
    return f"{cell.identical:.0%}" + (f", {', '.join(known)}" if known else "")


def describe_load(load: Load) -> str:
    """Name a way of asking."""
    law = "greedy" if load.temperature == 0 else f"temperature {load.temperature:g}"
    runs = "" if load.repeats == 1 else f", {load.repeats} runs of each prompt"
    return f"batch {load.batch_size}, {law}, {load.max_new_tokens} new tokens{runs}"
