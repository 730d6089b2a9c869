"""The plots of a report, as PNG bytes: speed-up by batch size, acceptance by depth and by position."""

import io
from collections.abc import Callable, Sequence
from math import nan

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..stats import POSITION_BUCKET
from .figures import means_by_method
from .results import Cell, Results
from .timing import PLAIN
from .verdict import overall

SIZE, DOTS = (9.0, 4.0), 110

Colours = dict[str, str]


def speed_up_by_batch(results: Results, temperature: float) -> bytes | None:
    """Plot each method's ratio to plain over the batch size, with the line below which it does not pay.

    Args:
        results: a results file.
        temperature: of the loads to plot.

    Returns:
        A PNG, or None where nothing was measured at that temperature.
    """
    lines: dict[str, list[tuple[int, Cell]]] = {}
    for index, load in enumerate(results.loads):
        if load.temperature != temperature:
            continue
        cells = [cell for cell in results.cells if cell.load == index and cell.method != PLAIN]
        for cell in overall(cells):
            lines.setdefault(cell.method, []).append((load.batch_size, cell))
    if not lines:
        return None
    figure, axes = _figure("batch size (rows)", "speed against plain")
    colours = colours_of(results)
    sizes = sorted({size for points in lines.values() for size, _ in points})
    for method, points in lines.items():
        points = sorted(points, key=lambda point: point[0])
        ratios = [cell.ratio for _, cell in points]
        low = [cell.ratio - (cell.ratio_low if cell.ratio_low is not None else cell.ratio) for _, cell in points]
        high = [(cell.ratio_high if cell.ratio_high is not None else cell.ratio) - cell.ratio for _, cell in points]
        spread = [[max(0.0, each) for each in side] for side in (low, high)]
        places = [sizes.index(size) for size, _ in points]
        axes.errorbar(places, ratios, yerr=spread, marker="o", capsize=3, label=method, color=colours[method])
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1, label="break-even")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    return _png(figure)


def colours_of(results: Results) -> Colours:
    """Return each method's colour, the same in all plots of a page."""
    methods = dict.fromkeys(cell.method for cell in results.cells if cell.method != PLAIN)
    return {method: f"C{number % 10}" for number, method in enumerate(methods)}


def acceptance_by_depth(cells: Sequence[Cell], colours: Colours) -> bytes | None:
    """Plot the share of tries that were kept to each depth.

    Args:
        cells: of one load.
        colours: by method.

    Returns:
        A PNG, or None where nothing was drafted.
    """
    lists = [(cell.method, cell.acceptance_rate_by_depth) for cell in cells]
    return _means(lists, colours, "drafted depth", "kept", lambda place: str(place + 1), top=1.0)


def acceptance_by_position(cells: Sequence[Cell], colours: Colours) -> bytes | None:
    """Plot the acceptance length of the steps in each part of an answer; arguments and result as above."""
    lists = [(cell.method, cell.acceptance_length_by_position) for cell in cells]
    across = f"new tokens before the step, {POSITION_BUCKET} to a point"
    return _means(lists, colours, across, "acceptance length", lambda place: f"{place * POSITION_BUCKET}+")


def _means(
    lists: Sequence[tuple[str, Sequence[float | None]]],
    colours: Colours,
    across: str,
    up: str,
    name: Callable[[int], str],
    top: float | None = None,
) -> bytes | None:
    """Plot each method's figures place by place, the mean over its lists that have one there; none leaves a gap."""
    means = means_by_method(lists)
    if not means:
        return None
    figure, axes = _figure(across, up)
    for method, values in means.items():
        points = [nan if value is None else value for value in values]
        axes.plot(range(len(values)), points, marker="o", label=method, color=colours[method])
    axes.set_ylim(0, top)
    places = range(max(map(len, means.values())))
    axes.set_xticks(places, [name(place) for place in places])
    return _png(figure)


def _figure(across: str, up: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, dpi=DOTS, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    return figure, axes


def _png(figure: Figure) -> bytes:
    figure.legend(fontsize=8, loc="outside right upper")  # inside it would hide points
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
