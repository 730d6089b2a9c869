"""From timed records to figures: ratios to plain, their intervals, acceptance, by group and over the groups.

A ratio pairs a method's tokens per second with plain's on the same prompt; groups give medians over prompts with a
bootstrap interval, and all groups are kept, losing ones too. timing.py makes the records, results.py keeps both.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean, median
from typing import Any

import numpy as np

from .results import Cell, Load, Record
from .timing import MEAN, PLAIN

RESAMPLES, SEED = 2000, 0


def summarise(records: Sequence[Record], methods: Sequence[str], loads: Sequence[Load]) -> list[Cell]:
    """Make the figures of the records: a cell for each load, group and method, and each method's mean over groups.

    Args:
        records: whole batches, as `compare` reports them.
        methods: in the order to list them.
        loads: of the run.
    """
    cells: list[Cell] = []
    for index, load in enumerate(loads):
        mine = [record for record in records if record.load == index]
        groups = list(dict.fromkeys(record.group for record in mine))
        for method in methods:
            parts = [_cell(mine, index, load, [group], method) for group in groups]
            cells += parts
            if len(groups) > 1:
                cells.append(_mean_cell(mine, parts, groups, method))
    return cells


def paired_ratios(records: Sequence[Record], group: str, method: str) -> list[float]:
    """Return each prompt's ratio of tokens per second to plain's; repeats of a prompt give their median."""
    speeds = {
        (record.method, tuple(record.prompts), record.repeat): record.new_tokens / record.seconds
        for record in records
        if record.group == group and record.method in (method, PLAIN)
    }
    by_prompt: dict[tuple[str, ...], list[float]] = {}
    for (name, prompts, repeat), speed in speeds.items():
        if name == method:
            by_prompt.setdefault(prompts, []).append(speed / speeds[PLAIN, prompts, repeat])
    return [median(ratios) for ratios in by_prompt.values()]


def interval(samples: Sequence[Sequence[float]]) -> tuple[float, float] | tuple[None, None]:
    """Return the 95 % bootstrap interval of the mean over groups of the median within each group.

    Fewer than three prompts in a group say nothing about its spread: then there is no interval.
    """
    if min(len(ratios) for ratios in samples) < 3:
        return None, None
    generator = np.random.default_rng(SEED)
    means = np.zeros(RESAMPLES)
    for ratios in samples:
        values = np.asarray(ratios)
        drawn = generator.integers(0, len(values), (RESAMPLES, len(values)))
        means += np.median(values[drawn], axis=1) / len(samples)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def _cell(records: Sequence[Record], index: int, load: Load, groups: list[str], method: str) -> Cell:
    mine = [record for record in records if record.group in groups and record.method == method]
    ratios = paired_ratios(records, groups[0], method)
    low, high = interval([ratios])
    rows = sum(len(record.prompts) for record in mine)
    judged = [difference for record in mine for difference in record.differences or []]
    compared = method != PLAIN and load.temperature == 0
    return Cell(
        load=index,
        group=groups[0],
        method=method,
        rows=rows,
        tokens_per_second=sum(record.new_tokens for record in mine) / sum(record.seconds for record in mine),
        ratio=median(ratios),
        ratio_low=low,
        ratio_high=high,
        seconds_to_first_token=median(record.seconds_to_first_token for record in mine),
        seconds=median(record.seconds for record in mine),
        identical=1 - len(judged) / rows if compared else None,
        ties=sum(difference.verdict == "tie" for difference in judged),
        bugs=sum(difference.verdict == "bug" for difference in judged),
        **_acceptance([record.stats for record in mine if record.stats is not None]),
    )


def _acceptance(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pool figures over calls: sums of counts, then their quotients, as DecodeStats has them for one call."""
    if not stats:
        return {}
    total = {name: sum(each[name] for each in stats) for name in ("emitted_tokens", "row_steps")}
    depth = max(len(each["tried_by_depth"]) for each in stats)
    tried, kept = (
        [sum(each[name][level] for each in stats if level < len(each[name])) for level in range(depth)]
        for name in ("tried_by_depth", "kept_by_depth")
    )
    places: list[list[int]] = []
    for each in stats:
        places += [[0, 0] for _ in each["by_position"][len(places) :]]
        for bucket, (steps, tokens) in zip(places, each["by_position"], strict=False):
            bucket[0] += steps
            bucket[1] += tokens
    seconds = {name: sum(each[f"seconds_{name}"] for each in stats) for name in ("drafting", "verifying", "other")}
    whole = sum(seconds.values())
    return {
        "acceptance_length": total["emitted_tokens"] / total["row_steps"] if total["row_steps"] else 0.0,
        "acceptance_rate": sum(kept) / sum(tried) if sum(tried) else 0.0,
        "acceptance_rate_by_depth": [part / of if of else 0.0 for part, of in zip(kept, tried, strict=True)],
        "acceptance_length_by_position": [tokens / steps if steps else None for steps, tokens in places],
        "lossy": any(each["lossy"] for each in stats),
        **({name: span / whole for name, span in seconds.items()} if whole else {}),
    }


def _mean_cell(records: Sequence[Record], parts: Sequence[Cell], groups: Sequence[str], method: str) -> Cell:
    low, high = interval([paired_ratios(records, group, method) for group in groups])

    def mean(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if None in values else fmean(values)

    means = (
        "tokens_per_second",
        "ratio",
        "seconds_to_first_token",
        "seconds",
        "acceptance_length",
        "acceptance_rate",
        "identical",
    )
    shares = ("drafting", "verifying", "other")
    return Cell(
        load=parts[0].load,
        group=MEAN,
        method=method,
        rows=sum(part.rows for part in parts),
        ratio_low=low,
        ratio_high=high,
        ties=sum(part.ties for part in parts),
        bugs=sum(part.bugs for part in parts),
        lossy=any(part.lossy for part in parts),
        **{name: mean(name) for name in (*means, *shares)},
    )


def mean_by_place(lists: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the mean at each place over the lists that have a figure there, None where none has."""
    places = zip_longest(*lists)
    found = [[figure for figure in figures if figure is not None] for figures in places]
    return [fmean(figures) if figures else None for figures in found]


def means_by_method(lists: Iterable[tuple[str, Sequence[float | None]]]) -> dict[str, list[float | None]]:
    """Return each method's mean at each place over its lists (one a group); methods without figures are left out."""
    by_method: dict[str, list[Sequence[float | None]]] = {}
    for method, figures in lists:
        if figures:
            by_method.setdefault(method, []).append(figures)
    return {method: mean_by_place(groups) for method, groups in by_method.items()}
