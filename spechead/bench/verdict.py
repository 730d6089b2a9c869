"""What a results file says to do: keep, drop or try something else, for each load, with the reason.

Called by `spechead bench`, the HTML report and the docs. A verdict rests on intervals where there are any: a method is
kept when the whole interval of its ratio to plain lies above 1, dropped when it lies below.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..decoding import LIKELY_CAUSES, TRAINED
from .results import Cell, Load, Results
from .timing import MEAN, PLAIN

LOW_ACCEPTANCE = 0.3
WORTHWHILE = 1.03  # a ratio without an interval must promise this much
DEAR_DRAFTING = 0.4  # share of the steps' time
LARGE_BATCH = 4


@dataclass(frozen=True)
class Verdict:
    """What to do with one method under one load.

    Attributes:
        load: index of the load.
        method: of whom.
        decision: "keep", "drop" or "try ...".
        reason: why, with the figures it rests on.
        causes: what may be behind a low acceptance, the likeliest first.
    """

    load: int
    method: str
    decision: str
    reason: str
    causes: list[str] = field(default_factory=list)


def verdicts(results: Results) -> list[Verdict]:
    """Judge every method under every load; the best method of a load comes first."""
    found = []
    for index, load in enumerate(results.loads):
        cells = [cell for cell in results.cells if cell.load == index and cell.method != PLAIN]
        whole = sorted(overall(cells), key=lambda cell: -cell.ratio)
        found += [judge(cell, load, [part for part in cells if part.method == cell.method]) for cell in whole]
    return found


def overall(cells: Sequence[Cell]) -> list[Cell]:
    """Return each method's mean over groups, or its only group."""
    groups = {cell.group for cell in cells}
    return [cell for cell in cells if cell.group == MEAN or len(groups) == 1]


def judge(cell: Cell, load: Load, parts: Sequence[Cell]) -> Verdict:
    """Judge one method.

    Args:
        cell: its figures over all groups.
        load: how was asked.
        parts: its figures by group.
    """
    causes = likely_causes(cell, parts)
    if cell.bugs:
        reason = f"{cell.bugs} outputs differ from plain's by more than rounding explains: run `spechead verify`"
        return Verdict(cell.load, cell.method, "drop", reason, causes)
    figures = f"{cell.ratio:.2f}x plain"
    sure = cell.ratio_low is not None and cell.ratio_high is not None
    if sure:
        figures += f", interval [{cell.ratio_low:.2f}, {cell.ratio_high:.2f}]"
    faster = cell.ratio_low > 1 if cell.ratio_low is not None else cell.ratio >= WORTHWHILE
    slower = cell.ratio_high < 1 if cell.ratio_high is not None else cell.ratio < 1
    if faster:
        losing = [part.group for part in parts if part.group != MEAN and part.ratio < 1]
        instead = "" if cell.method == "auto" else ", where auto would step back"
        note = f"; slower on {', '.join(losing)}{instead}" if losing else ""
        hint = "" if sure else "; no interval from fewer than three prompts of a group"
        return Verdict(cell.load, cell.method, "keep", figures + note + hint, causes)
    what, why = alternative(cell, load, parts)
    otherwise = "drop" if slower else "try more prompts"
    figures += "" if slower else ", no difference shown"
    return Verdict(cell.load, cell.method, what or otherwise, f"{figures}: {why}", causes)


def alternative(cell: Cell, load: Load, parts: Sequence[Cell]) -> tuple[str | None, str]:
    """Return what to try instead of a method that does not pay, or None, and why."""
    winning = [part.group for part in parts if part.group != MEAN and part.ratio >= WORTHWHILE]
    if winning and cell.method != "auto":
        return "try auto", f"it pays on {', '.join(winning)} alone, and auto drafts only where it pays"
    if cell.acceptance_rate is not None and cell.acceptance_rate < LOW_ACCEPTANCE:
        if kind_of(cell.method) in TRAINED:
            return None, f"{cell.acceptance_rate:.0%} of the drafted depth is kept"
        return None, f"{cell.acceptance_rate:.0%} of the drafted depth is kept: answers do not repeat what came before"
    if cell.drafting is not None and cell.drafting > DEAR_DRAFTING:
        return "try fewer drafted tokens", f"{cell.drafting:.0%} of the steps' time goes into drafting"
    if load.batch_size > LARGE_BATCH:
        return "try smaller batches", f"{load.batch_size} rows fill the device: drafted tokens are no longer free"
    if cell.acceptance_length is not None and cell.acceptance_length > 1.5:
        length = cell.acceptance_length
        return "try fewer drafted tokens", f"{length:.2f} tokens a step do not pay for the wider forward"
    return None, "what it saves in steps it costs in work"


def likely_causes(cell: Cell, parts: Sequence[Cell]) -> list[str]:
    """Return what may be behind a low acceptance of something trained, the likeliest first; else nothing."""
    rate = cell.acceptance_rate
    if rate is None or rate >= LOW_ACCEPTANCE or kind_of(cell.method) not in TRAINED:
        return []
    causes = list(LIKELY_CAUSES)
    by_group = {part.group: part.acceptance_rate for part in parts if part.group != MEAN}
    known = {group: share for group, share in by_group.items() if share is not None}
    if len(known) > 1:
        low, high = (pick(known, key=lambda group: known[group]) for pick in (min, max))
        causes[-1] += f" (here {high} keeps {known[high]:.0%}, {low} {known[low]:.0%})"
    return causes


def kind_of(method: str) -> str:
    """Return the method of a name that says its draft length too ("eagle K=4")."""
    return method.partition(" ")[0]


def describe(verdict: Verdict) -> str:
    """Return a verdict as one line."""
    return f"{verdict.method}: {verdict.decision} ({verdict.reason})"


def best(found: Sequence[Verdict], load: int) -> str:
    """Say what to do under a load."""
    mine = [verdict for verdict in found if verdict.load == load]
    kept = [verdict for verdict in mine if verdict.decision == "keep"]
    if kept:
        return f"keep {kept[0].method}: {kept[0].reason}"
    tries = [verdict for verdict in mine if verdict.decision.startswith("try")]
    if tries:
        return f"{tries[0].decision} ({tries[0].method}: {tries[0].reason})"
    return "keep plain generation: nothing that was measured is faster"
