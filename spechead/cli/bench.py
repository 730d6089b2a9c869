"""`spechead bench`: methods against plain generation on your prompts, in one process, with a results file."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..bench.prompts import BUILTIN, Prompt, load_prompts
from ..bench.report import render
from ..bench.results import Load, Results
from ..bench.run import batches_left, begin, resume, run
from ..bench.verdict import best, describe, verdicts
from . import loading
from .methods import Comparison, assemble
from .tables import by_group, costs, describe_load, figures, table_console

MethodOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Method to compare with plain, or METHOD:TREE (eagle:chain); repeat it. no_draft: the loop alone. "
        "Default: all that can run; several heads of a kind run side by side."
    ),
]
PromptsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="builtin (default), a JSONL file (Spec-Bench's or of messages), or a datasets source; repeat it."
    ),
]
GroupOption = Annotated[list[str] | None, typer.Option(help="Group of prompts to ask; repeat it. Default: all.")]
PerGroupOption = Annotated[int | None, typer.Option(min=1, help="Prompts of each group; default: all.")]
TemperatureOption = Annotated[
    list[float] | None,
    typer.Option(min=0.0, help="0 (default) is greedy, above is sampled; repeat it for several."),
]
BatchSizeOption = Annotated[
    list[int] | None, typer.Option(min=1, help="Prompts asked at once; repeat it for several. Default: 1.")
]
BatchPromptsOption = Annotated[
    int | None, typer.Option(min=1, help="Prompts of each group in batches above 1; default: as --per-group.")
]
DraftLengthOption = Annotated[
    list[int] | None,
    typer.Option(min=1, help="Tokens drafted a step; repeat it for several. Default: the method's own."),
]
ReportOption = Annotated[Path | None, typer.Option(help="HTML report; default: beside the results file.")]
PeakOption = Annotated[bool, typer.Option(help="Measure peak memory, in runs that are not timed.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Runs of each prompt; a prompt counts with its median.")]
WithTransformersOption = Annotated[
    bool, typer.Option("--with-transformers", help="Add transformers' own speculation with the same draft length.")
]
JudgeOption = Annotated[bool, typer.Option(help="Say tie or bug where greedy outputs part (loads a float32 copy).")]
OutputOption = Annotated[
    Path,
    typer.Option(help="Results file; an interrupted run goes on in it, a whole one with more prompts beside its own."),
]


def bench(
    target: loading.TargetOption = None,
    revision: loading.RevisionOption = None,
    method: MethodOption = None,
    head: loading.HeadOption = None,
    draft_model: loading.DraftModelOption = None,
    prompts: PromptsOption = None,
    group: GroupOption = None,
    per_group: PerGroupOption = None,
    max_new_tokens: loading.MaxNewTokensOption = 128,
    temperature: TemperatureOption = None,
    batch_size: BatchSizeOption = None,
    batch_prompts: BatchPromptsOption = None,
    repeats: RepeatsOption = 1,
    num_draft_tokens: DraftLengthOption = None,
    with_transformers: WithTransformersOption = False,
    chat_template_kwargs: loading.TemplateOption = None,
    seed: loading.SeedOption = 0,
    dtype: loading.DtypeOption = "auto",
    device: loading.DeviceOption = None,
    attention: loading.AttentionOption = None,
    judge: JudgeOption = True,
    peak_memory: PeakOption = True,
    output: OutputOption = Path("results.json"),
    report: ReportOption = None,
) -> None:
    """Measure speed and acceptance of methods against plain generation."""
    console = Console(stderr=True)
    template = loading.template_arguments(chat_template_kwargs)
    sizes, sources = batch_size or [1], prompts or [BUILTIN]
    if with_transformers and max(sizes) > 1:
        raise ValueError("--with-transformers needs --batch-size 1: transformers' own speculation refuses batches.")
    loads = [Load(max_new_tokens, size, heat, repeats, seed) for heat in temperature or [0.0] for size in sizes]
    asked = load_prompts(sources, group, _most(per_group, batch_prompts if max(sizes) > 1 else None))
    target = loading.target_for(target, head, console)
    model, tokenizer = loading.load_target(
        target, console, dtype=dtype, device=device, attention=attention, revision=revision
    )
    comparison = assemble(
        model,
        tokenizer,
        name=target,
        names=method,
        heads=head,
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        with_transformers=with_transformers,
    )
    fresh = begin(
        comparison.methods,
        comparison.models,
        asked,
        loads,
        source=", ".join(Path(source).name for source in sources),
        command=["spechead", *sys.argv[1:]],
        tokenizer=tokenizer,
        template=template if tokenizer.chat_template else None,
    )
    what = Run(comparison, asked, tokenizer, judge, peak_memory, per_group, batch_prompts)
    go(resume(fresh, output), what, output, report or output.with_suffix(".html"), console)


def _most(single: int | None, batched: int | None) -> int | None:
    """Return how many prompts of each group some load asks; None is all."""
    return single if single is None else max(single, batched or 0)


@dataclass(frozen=True)
class Run:
    """What is run, besides the results file: methods, prompts, and what else to find out."""

    comparison: Comparison
    prompts: list[Prompt]
    tokenizer: Any
    judge: bool
    peaks: bool
    single_prompts: int | None
    batch_prompts: int | None

    def per_group(self, load: Load) -> int | None:
        """Return how many prompts of each group a load asks; None is all."""
        return (load.batch_size > 1 and self.batch_prompts) or self.single_prompts


def go(results: Results, what: Run, output: Path, page: Path, console: Console) -> None:
    """Measure, and conclude from what was measured, also after an interrupt."""
    try:
        measure(results, output, what, console)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on where it stopped", markup=False)
        raise
    finally:
        if results.cells and output.exists():
            conclude(results, page)
            console.print(f"Written to {output} and {page}", markup=False, highlight=False)


def measure(results: Results, output: Path | None, what: Run, console: Console) -> None:
    """Run the comparison under a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("measuring", total=batches_left(results, what.prompts, what.per_group))
        run(
            results,
            output,
            what.comparison.methods,
            what.prompts,
            what.tokenizer,
            judge=what.judge,
            peaks=what.peaks,
            per_group=what.per_group,
            progress=lambda records, outputs: progress.advance(task),
        )


def conclude(results: Results, page: Path) -> None:
    """Print figures and a verdict for each load, and write the HTML report."""
    console = table_console()
    found = verdicts(results)
    for index, load in enumerate(results.loads):
        cells = [cell for cell in results.cells if cell.load == index]
        if not cells:
            continue
        peaks = {peak.method: peak.bytes for peak in results.peaks if peak.load == index}
        console.print(figures(by_group(cells), describe_load(load)))
        console.print(costs(cells, peaks))
        console.print(f"verdict: {best(found, index)}", style="bold", markup=False, highlight=False, soft_wrap=True)
        for verdict in (verdict for verdict in found if verdict.load == index):
            console.print(f"  {describe(verdict)}", markup=False, highlight=False, soft_wrap=True)
            for number, cause in enumerate(verdict.causes, 1):
                console.print(f"    {number}. {cause}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(results), encoding="utf-8")
