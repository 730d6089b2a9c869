"""Certificates as a person reads them."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..bench.certificate import Certificate, GreedyCheck, MethodCheck


def show(certificate: Certificate, console: Console) -> None:
    """Print a certificate: one table a method, and its verdict."""
    for model in certificate.models:
        mark = model.fingerprint.get("config")
        text = f"{model.role}: {model.name} ({model.kind}, {model.dtype}, {model.parameters:,} parameters)"
        console.print(Text(text + (f", config {mark}" if mark else "")), soft_wrap=True)
    for method in certificate.methods:
        console.print(table_of(method))
        for fault in method.faults:
            line = Text.assemble(("FAULT ", "bold red"), (fault.name, "red"), f": {fault.evidence}")
            console.print(line, soft_wrap=True)
        console.print(verdict(method), soft_wrap=True)


def table_of(method: MethodCheck) -> Table:
    """Return what was checked, one line a check."""
    table = Table(title=method.method + (" (lossy)" if method.lossy else ""), title_justify="left")
    for column in ("check", "what", "found"):
        table.add_column(column, overflow="fold")
    for check in method.greedy:
        what = f"{check.rows} rows, {check.tokens} tokens, {check.drafted_tokens} drafted, {check.kept_tokens} kept"
        table.add_row(f"greedy, batch {check.batch_size}", what, greedy_found(check, method.lossy))
    if (trees := method.trees) is not None:
        what = f"{trees.nodes} nodes of {trees.steps} steps against plain forwards"
        table.add_row("logits", what, f"largest difference {trees.worst:.2g}, bound {trees.bound:.2g}")
        what = f"{trees.changed} nodes changed"
        table.add_row("mask", what, f"others move {trees.moved:.2g}, bound {trees.moved_bound:.2g}")
        table.add_row("laws", f"{trees.laws} laws of nodes", "against the processors over the same logits")
    if (law := method.law) is not None:
        what = (
            f"{law.samples} samples, {law.cells} cells of the first {law.tokens} tokens, {law.drafted_tokens} drafted "
            f"tokens; finds w = {law.effect_size:g} with power {law.power:.3f}"
        )
        text = f"chi-square {law.statistic:.1f}, {law.degrees} degrees of freedom, p = {law.p_value:.3g}"
        table.add_row("sampling", what, text)
    for draw in method.draws:
        found = f"p = {draw.p_value:.3g}" if draw.tokens else "none"
        table.add_row("draws", f"{draw.tokens} {draw.what}", found)
    if (distance := method.distance) is not None:
        what = f"{distance.samples} samples of the first {distance.tokens} tokens"
        text = (
            f"total variation {distance.total_variation:.3f}, true value in [{distance.low:.3f}, {distance.high:.3f}] "
            f"at {distance.confidence:.0%}; an exact sampler shows {distance.exact:.3f}"
        )
        table.add_row("distance", what, text)
    return table


def greedy_found(check: GreedyCheck, lossy: bool) -> str:
    """Say how often the tokens equal plain's, and what the others are."""
    text = f"{check.identical} identical, {check.near_ties} near ties (bound {check.bound:.2g})"
    if check.ties:
        text += f", {check.ties} parted at a tie"
    if check.bugs:
        text += f", {check.bugs} {'parted' if lossy else 'BUGS'}"
    for difference in check.differences[:3]:
        gap = "ended" if difference.gap is None else f"gap {difference.gap:.2g}, bound {difference.tolerance:.2g}"
        text += f"\ntoken {difference.position}: {difference.token} / plain {difference.plain_token} ({gap})"
    return text


def verdict(method: MethodCheck) -> Text:
    """Say in one line whether the method passed."""
    if method.passed is None and method.distance is not None:
        low, high = method.distance.low, method.distance.high
        return Text(f"{method.method}: lossy by its rule; its distance lies in [{low:.3f}, {high:.3f}]", "bold yellow")
    if method.passed:
        return Text(f"{method.method}: passed", "bold green")
    return Text(f"{method.method}: FAILED", "bold red")
