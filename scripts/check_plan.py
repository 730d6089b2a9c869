"""Compare `spechead plan` with measured peak tensor bytes.

python scripts/check_plan.py [--target DIR] [--head DIR ...]

Every method that can run is planned from configs and then run once on random prompts at two batch sizes. A plan holds
when it is within 10 % or 50 MB of the peak. Exit code 1 if one is not.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from spechead import SpeculativeConfig, enable_speculation
from spechead.attach import Speculation
from spechead.bench.footprint import footprint, head_footprint
from spechead.bench.measure import Method, run_once, twin
from spechead.bench.memory import PeakMemory
from spechead.bench.plan import Draft, Plan, Workload, draft_model, eagle, lookup, medusa, plain, speculative
from spechead.bench.results import Load
from spechead.cli import loading
from spechead.cli.methods import available
from spechead.heads.medusa import MedusaHeads

SHARE, BYTES = 0.10, 50_000_000


@dataclass(frozen=True)
class Compared:
    """A plan and what was measured."""

    plan: Plan
    load: Workload
    measured: int

    @property
    def holds(self) -> bool:
        """Whether the plan is close enough."""
        return abs(self.plan.peak - self.measured) <= max(SHARE * self.measured, BYTES)

    @property
    def close(self) -> bool:
        """Whether it is within the share alone, which a tiny model must keep too."""
        return abs(self.plan.peak - self.measured) <= SHARE * self.measured


def compare(model: PreTrainedModel, enabled: Any, methods: list[str], loads: list[Workload]) -> list[Compared]:
    """Plan and measure plain generation and every method under every load.

    Args:
        model: the untouched target.
        enabled: its twin with heads and draft.
        methods: to run.
        loads: to run them under.
    """
    state = Speculation.of(enabled)
    target = footprint(model.config, "target", model.dtype)
    found = []
    for load in loads:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(1, target.vocabulary, (load.batch_size, load.prompt_tokens), generator=generator).tolist()
        for name in ["plain", *methods]:
            modules: list[Any] = [model]
            if name == "plain":
                plan, run = plain(target, load), Method("plain", model)
            else:
                draft, module = draft_of(name, state)
                modules += module
                plan = speculative(target, draft, load)
                run = Method(name, enabled, {"speculative": SpeculativeConfig(method=name)})  # type: ignore[arg-type]
            timed = Load(load.max_new_tokens, load.batch_size, 1.0 if load.sampled else 0.0)
            with PeakMemory(model.device, modules) as memory:
                run_once(run, rows, timed, 0)
            found.append(Compared(plan, load, memory.peak))
    return found


def draft_of(name: str, state: Speculation) -> tuple[Draft, list[Any]]:
    """Return what drafts, sized from its config, and its modules."""
    target = footprint(state.target.model.config, "target", state.target.dtype)
    if name == "prompt_lookup":
        return lookup(), []
    if name == "draft_model":
        if state.draft is None:
            raise ValueError("draft_model needs --draft-model.")
        draft = state.draft.model
        return draft_model(footprint(draft.config, "draft", draft.dtype)), [draft]
    head = next(head for head in state.heads if isinstance(head, MedusaHeads) == (name == "medusa"))
    sizes = head_footprint(head.config, target)
    proposer = state.proposer(name)[0]
    nodes = proposer.nodes(proposer.num_draft_tokens)  # type: ignore[attr-defined]  # of both
    if name == "medusa":
        return medusa(sizes, head.config.num_heads, nodes), [head]
    return eagle(sizes, len(head.taps), nodes, proposer.num_draft_tokens), [head]  # type: ignore[attr-defined]


def show(found: list[Compared], console: Console) -> None:
    """Print plans beside what was measured."""
    table = Table(title="plan against measured peak tensor bytes", title_justify="left")
    for column in ("method", "batch", "prompt", "sampled", "planned MB", "measured MB", "off"):
        table.add_column(column, justify="right")
    for each in found:
        off = each.plan.peak / each.measured - 1
        table.add_row(
            each.plan.method,
            str(each.load.batch_size),
            str(each.load.prompt_tokens),
            "yes" if each.load.sampled else "no",
            f"{each.plan.peak / 1e6:.1f}",
            f"{each.measured / 1e6:.1f}",
            f"{off:+.1%}" + ("" if each.holds else "  WRONG"),
        )
    console.print(table)


def main(
    target: loading.TargetOption = None,
    head: loading.HeadOption = None,
    draft: Annotated[str | None, typer.Option("--draft-model", help="Draft model.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Batch sizes; default 1 and 8.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 256,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens.")] = 24,
    dtype: loading.DtypeOption = "auto",
    device: loading.DeviceOption = None,
) -> None:
    """Compare plans with measured peaks."""
    console = Console(stderr=True)
    target = loading.target_for(target, head, console)
    model, tokenizer = loading.load_target(target, console, dtype=dtype, device=device)
    heads: list[str | Path] = list(head or [])
    enabled = enable_speculation(twin(model), head=heads or None, draft_model=draft, tokenizer=tokenizer)
    loads = [
        Workload(prompt_tokens, max_new_tokens, size, sampled)
        for size in batch_size or (1, 8)
        for sampled in (False, True)
    ]
    found = compare(model, enabled, available(Speculation.of(enabled)), loads)
    show(found, Console())
    if not all(each.holds for each in found):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
