"""`spechead plan`: will it fit and what to try, from configs and tokenizers alone; exit code 1 for a pair that cannot.

Nothing heavy is loaded: models are built on the meta device. What acceptance is worth follows from --acceptance.
"""

import json
import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from ..bench.advice import Advice, Expected, advise, moe_warning, table
from ..bench.advice import draft_cost as cost_of
from ..bench.footprint import Footprint, footprint, head_footprint
from ..bench.hardware import describe_hardware
from ..bench.plan import Draft, Plan, Workload, eagle, lookup, medusa, plain, speculative
from ..bench.plan import draft_model as sized_draft
from ..demo_target import resolve_target
from ..heads.base import check_pair
from ..heads.config import MedusaConfig
from ..heads.fingerprint import describe_mismatch
from ..proposers.growth import TREE_SIZE
from ..proposers.vocabulary import shared_vocabulary
from . import loading

UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


class Mismatch(Exception):
    """A pair that cannot work: other tokenizers, or a head of another target."""


TokensOption = Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")]
RowsOption = Annotated[int, typer.Option(min=1, help="Rows at once.")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="Above 0 the drafted laws are kept.")]
OverlapOption = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Share of the answer that repeats the prompt.")
]
MemoryOption = Annotated[
    str | None, typer.Option(help="Memory of the device, such as 24G or 80GiB; default: this machine's.")
]
AcceptanceOption = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Chance that a drafted token is kept if those before it were.")
]
DraftCostOption = Annotated[
    float | None, typer.Option(min=0.0, help="Of a drafted token against a plain step; default: from parameters.")
]
StepCostOption = Annotated[float, typer.Option(min=0.01, help="Of a step over all nodes against a plain step.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")]


def plan(
    target: loading.TargetOption = None,
    head: loading.HeadOption = None,
    draft_model: loading.DraftModelOption = None,
    prompt_tokens: TokensOption = 512,
    max_new_tokens: loading.MaxNewTokensOption = 256,
    batch_size: RowsOption = 1,
    temperature: TemperatureOption = 0.0,
    overlap: OverlapOption = None,
    memory: MemoryOption = None,
    acceptance: AcceptanceOption = None,
    draft_cost: DraftCostOption = None,
    step_cost: StepCostOption = 1.0,
    dtype: loading.DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Say whether it fits, whether the pair fits, and what to try, before anything is loaded."""
    load = Workload(prompt_tokens, max_new_tokens, batch_size, temperature > 0, overlap)
    console = Console(stderr=True)
    target = loading.target_for(target, head, console)
    place = resolve_target(target, console)
    config = AutoConfig.from_pretrained(place)
    kind = None if dtype == "auto" else getattr(torch, dtype)
    sizes = footprint(config, target, kind)
    try:
        drafts, notes = pairs(place, config, sizes, head or [], draft_model, kind)
    except Mismatch as error:
        Console().print(Text(f"refused: {error}", "bold red"), soft_wrap=True)
        raise typer.Exit(code=1) from error
    plans = [plain(sizes, load), *(speculative(sizes, draft, load) for draft in drafts)]
    available = bytes_of(memory) if memory else describe_hardware(torch.device(loading.default_device())).memory
    chances = {
        draft.method: table(acceptance, cost_of(sizes, draft) if draft_cost is None else draft_cost, step_cost)
        for draft in drafts
        if acceptance is not None
    }
    command = bench_command(target, head or [], draft_model, load)
    tips = advise(sizes, drafts, plans[1:], load, available, command)
    found = Found(sizes, plans, available, notes, chances, tips)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        show(Console(), found, acceptance or 0.0)


@dataclass(frozen=True)
class Found:
    """What a plan says."""

    target: Footprint
    plans: list[Plan]
    memory: int
    notes: list[str]
    expected: dict[str, list[Expected]]
    advice: list[Advice]

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON, peaks included."""
        content = asdict(self)
        for plan, part in zip(self.plans, content["plans"], strict=True):
            part["peak"] = plan.peak
        return content


def pairs(
    place: str,
    config: PreTrainedConfig,
    target: Footprint,
    heads: list[str],
    draft: str | None,
    dtype: torch.dtype | None,
) -> tuple[list[Draft], list[str]]:
    """Return what could draft, and what was found out about the pairs.

    Raises:
        Mismatch: if the draft's tokenizer or a head's target is another one.
    """
    drafts, notes = [lookup()], []
    for path in heads:
        head = loading.head_config(path, config)
        try:
            check_pair(head, config)
        except ValueError as error:
            raise Mismatch(str(error)) from error
        doubt = describe_mismatch(head, config)
        notes.append(f"{path}: " + (doubt or "fits this target's config"))
        sizes = head_footprint(head, target)
        if isinstance(head, MedusaConfig):
            own = len(head.tree) if isinstance(head.tree, list) else TREE_SIZE if head.tree == "dynamic" else None
            nodes = head.tree_size or own
            drafts.append(medusa(sizes, head.num_draft_tokens or head.num_heads, nodes))
        else:
            taps = head.taps_per_position
            drafts.append(eagle(sizes, taps, head.tree_size, head.num_draft_tokens))
    if draft is not None:
        small = AutoConfig.from_pretrained(draft)
        sizes = footprint(small, draft, dtype or config.dtype)
        tokenizers = [AutoTokenizer.from_pretrained(name) for name in (place, draft)]
        try:
            shared = shared_vocabulary(target.vocabulary, sizes.vocabulary, *tokenizers)
        except ValueError as error:
            raise Mismatch(f"{draft} cannot draft for {target.name}: {error}") from error
        notes.append(f"{draft}: the tokenizers agree on all {shared} shared ids")
        drafts.append(sized_draft(sizes))
    return drafts, notes


def bytes_of(text: str) -> int:
    """Read an amount of memory.

    Raises:
        ValueError: if it is none.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or match.group(1).count(".") > 1 or match.group(1) == ".":
        raise ValueError(f"--memory {text!r} is no amount of memory; write 24G, 80GiB or a number of bytes.")
    number, unit, binary = match.groups()
    power = list(UNITS).index(unit.upper())
    return int(float(number) * (1024**power if binary else UNITS[unit.upper()]))


def bench_command(target: str, heads: list[str], draft: str | None, load: Workload) -> str:
    """Return the command that measures, without a method."""
    parts: list[Any] = ["spechead bench --target", target]
    parts += [part for path in heads for part in ("--head", path)]
    parts += ["--draft-model", draft] if draft else []
    parts += ["--batch-size", load.batch_size, "--max-new-tokens", load.max_new_tokens]
    return " ".join(str(part) for part in parts)


def show(console: Console, found: Found, acceptance: float) -> None:
    """Print memory by part, what was found out about the pairs, what acceptance is worth, and advice."""
    target = found.target
    rows = Table(title=f"peak memory, {target.name} in {target.bytes}-byte numbers", title_justify="left")
    rows.add_column("method")
    rows.add_column("part", overflow="fold")
    rows.add_column("MB", justify="right")
    for each in found.plans:
        moment = max((part for part in each.parts if not part.stays), key=lambda part: part.bytes)
        for part in each.parts:
            if part.stays or part is moment:
                what = part.what if part.stays else f"{part.what} (its widest moment)"
                rows.add_row("", what, f"{part.bytes / 1e6:,.1f}")
        fits = "fits" if each.peak <= found.memory else "DOES NOT FIT"
        rows.add_row(each.method, f"peak; {fits} {found.memory / 1e9:.1f} GB", f"{each.peak / 1e6:,.1f}", style="bold")
        rows.add_section()
    console.print(rows)
    for note in found.notes:
        console.print(Text(note), soft_wrap=True)
    if target.is_sparse:
        console.print(Text(f"warning: {moe_warning(target)}.", "yellow"), soft_wrap=True)
    for method, chances in found.expected.items():
        console.print(worth(method, chances, acceptance))
    for tip in found.advice:
        line = Text.assemble((f"{tip.method}: {tip.worth}", "bold"), f" ({tip.reason}).\n  {tip.command}")
        console.print(line, soft_wrap=True)


def worth(method: str, rows: list[Expected], acceptance: float) -> Table:
    """Return what each number of drafted tokens is worth; the best one is marked."""
    best = max(rows, key=lambda row: row.speed_up)
    title = f"{method} if a drafted token is kept with {acceptance:.0%}"
    shown = Table(title=title, title_justify="left")
    for column in ("drafted", "tokens a step", "best step", "worst step", "speed-up", "if none is kept"):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(
            str(row.depth),
            f"{row.tokens:.2f}",
            str(row.best),
            str(row.worst),
            f"{row.speed_up:.2f}x",
            f"{row.slowest:.2f}x",
            style="bold" if row is best else "",
        )
    return shown
