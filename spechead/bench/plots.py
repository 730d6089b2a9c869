"""The plots of a report, as PNG bytes: speed-up by batch size, acceptance by depth."""

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .results import Cell, Results
from .timing import PLAIN
from .verdict import overall

SIZE, DOTS = (7.2, 4.0), 110


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
    sizes = sorted({size for points in lines.values() for size, _ in points})
    for method, points in lines.items():
        points = sorted(points, key=lambda point: point[0])
        ratios = [cell.ratio for _, cell in points]
        low = [cell.ratio - (cell.ratio_low if cell.ratio_low is not None else cell.ratio) for _, cell in points]
        high = [(cell.ratio_high if cell.ratio_high is not None else cell.ratio) - cell.ratio for _, cell in points]
        spread = [[max(0.0, each) for each in side] for side in (low, high)]
        places = [sizes.index(size) for size, _ in points]
        axes.errorbar(places, ratios, yerr=spread, marker="o", capsize=3, label=method)
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1, label="break-even")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return _png(figure)


def acceptance_by_depth(cells: Sequence[Cell]) -> bytes | None:
    """Plot the share of tries that were kept to each depth.

    Args:
        cells: of one load.

    Returns:
        A PNG, or None where nothing was drafted.
    """
    by_method: dict[str, list[list[float]]] = {}
    for cell in cells:
        if cell.acceptance_rate_by_depth:
            by_method.setdefault(cell.method, []).append(cell.acceptance_rate_by_depth)
    if not by_method:
        return None
    figure, axes = _figure("drafted depth", "kept")
    for method, groups in by_method.items():
        deepest = max(len(rates) for rates in groups)
        means = []
        for depth in range(deepest):
            rates = [each[depth] for each in groups if depth < len(each)]
            means.append(sum(rates) / len(rates))
        axes.plot(range(1, deepest + 1), means, marker="o", label=method)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, 1 + max(len(rates) for groups in by_method.values() for rates in groups)))
    axes.legend(fontsize=8)
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
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
