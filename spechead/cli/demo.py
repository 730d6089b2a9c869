"""`spechead demo`: the point of it all in a few minutes: plain generation and speculation side by side."""

from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bench.measure import Method, Timed
from ..bench.prompts import builtin_prompts, encode, select
from ..bench.results import Load, Record
from ..bench.run import begin, run
from ..bench.timing import MEAN, PLAIN, seconds_per_token
from ..demo_target import REPO_ID
from . import loading
from .demo_heads import demo_heads
from .methods import assemble
from .tables import by_group, describe_load, figures
from .text import marked

SHOWN = "code-edit-rename"  # the prompt whose answer is printed: much of it repeats the question
DTYPE_TOKENS = 12


def demo(
    target: loading.TargetOption = None,
    head: loading.HeadOption = None,
    max_new_tokens: loading.MaxNewTokensOption = 64,
    per_group: Annotated[int, typer.Option(min=1, help="Prompts of each of the seven kinds.")] = 1,
    dtype: Annotated[
        loading.Dtype | None, typer.Option(help="Dtype; default: the faster of float32 and bfloat16.")
    ] = None,
    device: loading.DeviceOption = None,
) -> None:
    """Show plain generation and speculation side by side."""
    console = Console(highlight=False, soft_wrap=True)
    notes = Console(stderr=True)
    target = loading.target_for(target, head, notes)
    model, tokenizer = load_faster(target, console, dtype, device)
    heads = demo_heads(notes) if head is None and target == REPO_ID else head
    comparison = assemble(model, tokenizer, name=target, heads=heads)
    prompts = select([prompt for prompt in builtin_prompts() if prompt.group != "code"], None, per_group)
    prompts += [prompt for prompt in builtin_prompts() if prompt.id == SHOWN]
    load = Load(max_new_tokens)
    names = [method.name for method in comparison.methods]
    console.print(f"\n{', '.join(names)} on {len(prompts)} prompts of the package's own, {describe_load(load)}:")
    shown: dict[str, Timed] = {}

    def report(records: list[Record], outputs: dict[str, list[Timed]]) -> None:
        console.print(describe(records))
        if records[0].prompts == [SHOWN]:
            shown.update({name: calls[0] for name, calls in outputs.items()})

    fresh = begin(
        comparison.methods,
        comparison.models,
        prompts,
        [load],
        source="builtin",
        command=["spechead", "demo"],
        tokenizer=tokenizer,
    )
    results = run(fresh, None, comparison.methods, prompts, tokenizer, progress=report)
    show_text(shown, tokenizer, console)
    cells = by_group(results.cells)
    means = [cell for cell in cells if cell.group == MEAN]
    console.print(figures(means, "mean over the kinds of prompts", groups=False), soft_wrap=False)
    if any(cell.bugs for cell in cells):
        raise RuntimeError("an output differs from plain's by more than rounding explains; please report it.")
    notes.print(
        "Next: spechead generate --target <your model> --color, and spechead bench --target <your model>.",
        soft_wrap=True,
    )


def load_faster(
    name: str, console: Console, dtype: loading.Dtype | None, device: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the target in the dtype asked for, or in the one that generates faster here, and say which."""
    notes = Console(stderr=True)
    if dtype is not None:
        return loading.load_target(name, notes, dtype=dtype, device=device)
    tried = {}
    choices: tuple[loading.Dtype, ...] = ("float32", "bfloat16")
    for each in choices:
        model, tokenizer = loading.load_target(name, notes, dtype=each, device=device)
        row = encode(tokenizer, builtin_prompts()[0].messages)
        tried[each] = seconds_per_token(Method(PLAIN, model), row, DTYPE_TOKENS), model
    faster = min(tried, key=lambda each: tried[each][0])
    timings = ", ".join(f"{each} {seconds * 1000:.0f} ms a token" for each, (seconds, _) in tried.items())
    threads = f", {torch.get_num_threads()} threads" if tried[faster][1].device.type == "cpu" else ""
    console.print(f"{name} on {tried[faster][1].device}{threads}: {timings}. Taking {faster}.")
    return tried[faster][1], tokenizer


def describe(records: list[Record]) -> str:
    """Return one line for a prompt: each method's tokens per second, and whether it said the same."""
    speeds = {record.method: record.new_tokens / record.seconds for record in records}
    parts = [f"{records[0].prompts[0]:<26} plain {speeds[PLAIN]:5.1f} tokens/s"]
    for record in records:
        if record.method == PLAIN:
            continue
        same = "same text"
        if record.differences:
            first = record.differences[0]
            gap = "" if first.gap is None else f", float32 gap {first.gap:.2g}"
            same = f"first {first.verdict} at token {first.position}{gap}"
        stats = record.stats or {}
        if stats.get("acceptance_length"):  # unlike a ratio it does not depend on what else the machine does
            same = f"{stats['acceptance_length']:.2f} tokens a step, {same}"
        ratio = speeds[record.method] / speeds[PLAIN]
        parts.append(f"{record.method} {speeds[record.method]:5.1f} ({ratio:.2f}x, {same})")
    return "   ".join(parts)


def show_text(shown: dict[str, Timed], tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Print the best method's answer to one prompt, accepted draft tokens in colour."""
    drafted = [(name, timed.tokens[0], timed.stats) for name, timed in shown.items() if timed.stats is not None]
    if not drafted:
        return
    name, tokens, stats = max(drafted, key=lambda each: each[2].acceptance_length)
    console.print(f"\n{SHOWN} by {name}; tokens that were drafted and accepted in green:")
    console.print(marked(tokenizer, tokens, stats.emitted_per_step[0]))
    console.print()
