"""A whole benchmark run: which methods, which prompts, and the results file that grows with every batch.

Called by `spechead bench` and by recipes. A run that was interrupted goes on where its file ends, if the file is of
the same run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from itertools import zip_longest
from math import isclose
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attach import SUPPORT_KEY
from ..heads.fingerprint import fingerprint, head_identity, prompt_digest
from . import results as results_file
from .differences import Judge
from .extras import Peak, Sample
from .figures import summarise
from .hardware import describe_hardware, describe_versions
from .measure import Method, Timed, run_once
from .memory import PeakMemory
from .pieces import TextPieces, drafted_flags
from .prompts import Prompt, encode, select
from .results import Load, Model, Record, Results
from .timing import batched, compare

PerGroup = Callable[[Load], int | None]
Progress = Callable[[list[Record], dict[str, list[Timed]]], None]


def describe_model(model: PreTrainedModel, role: str, name: str | None = None, revision: str | None = None) -> Model:
    """Describe a target, head or draft for the results file.

    Args:
        model: the loaded model.
        role: "target", "head" or "draft".
        name: of the model; None takes what it was loaded as. Of a local path only the last part is kept.
        revision: of its repo.
    """
    name = name or model.config.name_or_path or type(model).__name__
    if Path(name).exists():
        name = Path(name).resolve().name
    return Model(
        name=name,
        role=role,
        kind=str(model.config.model_type),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=getattr(model.config, "_attn_implementation", None),
        revision=revision,
        fingerprint=head_identity(model) if role == "head" else fingerprint(model),
    )


def begin(
    methods: Sequence[Method],
    models: Sequence[Model],
    prompts: Sequence[Prompt],
    loads: Sequence[Load],
    *,
    source: str,
    command: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any] | None = None,
) -> Results:
    """Return the results file of a run in which nothing has been measured yet.

    Args:
        methods: plain first.
        models: the target first.
        prompts: in the order to ask.
        loads: the ways of asking.
        source: where the prompts come from.
        command: what repeats the run.
        tokenizer: the target's.
        template: keyword arguments for the chat template.
    """
    groups: dict[str, list[str]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.group, []).append(prompt.id)
    return Results(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=list(command),
        versions=describe_versions(),
        hardware=describe_hardware(methods[0].model.device),
        models=list(models),
        methods={method.name: dict(method.described) for method in methods},
        loads=list(loads),
        source=source,
        prompts=groups,
        digests={prompt.id: prompt_digest(encode(tokenizer, prompt.messages, template)) for prompt in prompts},
        template=None if template is None else dict(template),
    )


def resume(fresh: Results, path: Path) -> Results:
    """Return the run that `path` holds where it continues `fresh`, else `fresh`.

    Raises:
        ValueError: if the file is of another run, which would be overwritten.
    """
    if not path.exists():
        return fresh
    found = results_file.load(path)
    if not fresh.same_run(found):
        raise ValueError(
            f"{path} holds another run (other models, methods, prompts or loads); choose another --output."
        )
    complete = found.complete and found.prompts == fresh.prompts
    return replace(found, command=fresh.command, prompts=fresh.prompts, digests=fresh.digests, complete=complete)


def run(
    results: Results,
    path: Path | None,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    judge: bool = True,
    peaks: bool = False,
    per_group: PerGroup = lambda load: None,
    progress: Progress = lambda records, outputs: None,
) -> Results:
    """Measure what is missing, saving after every batch.

    Args:
        results: from `begin` or `resume`.
        path: the results file; None keeps the run in memory.
        methods: plain first.
        prompts: in the order to ask.
        tokenizer: the target's.
        judge: say tie or bug where greedy outputs part (needs the target in float32 once).
        per_group: how many prompts of each group a load asks; None is all of them.
        peaks: measure each method's peak memory under each load, in a run that is not timed.
        progress: called after each batch.

    Returns:
        The complete results, figures included.
    """
    names = [method.name for method in methods]
    referee = Judge(methods[0].model) if judge else None

    def keep(records: list[Record], outputs: dict[str, list[Timed]]) -> None:
        results.records += records
        if not any(sample.load == records[0].load for sample in results.samples):
            results.samples += answers(records, outputs, tokenizer)
        results.cells = summarise(results.records, names, results.loads)
        if path is not None:
            results_file.save(results, path)
        progress(records, outputs)

    for index, load in enumerate(results.loads):
        asked = select(prompts, None, per_group(load))
        compare(
            methods,
            asked,
            load,
            tokenizer,
            keep,
            load_index=index,
            template=results.template,
            judge=referee,
            skip=lambda ids, index=index: results.measured(index, ids),  # type: ignore[misc]  # a default binds index
        )
        if peaks:
            measure_peaks(results, index, methods, asked, tokenizer)
    results.complete = True
    if path is not None:
        results_file.save(results, path)
    return results


def answers(
    records: Sequence[Record], outputs: Mapping[str, Sequence[Timed]], tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Return each method's first answer, piece by piece; plain and counted methods have no drafted tokens to show."""
    found = []
    for name, timed in outputs.items():
        stats, tokens = timed[0].stats, timed[0].tokens[0]
        flags = drafted_flags(stats.emitted_per_step[0]) if stats is not None else []
        if len(flags) != len(tokens):
            continue
        pieces = TextPieces(tokenizer)
        texts = [pieces.add(token) for token in tokens]
        found.append(Sample(records[0].load, name, records[0].prompts[0], [*texts, pieces.rest()], [*flags, False]))
    return found


def measure_peaks(
    results: Results,
    index: int,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Measure each method's peak memory on the first batch of a load, where that has not been done."""
    load = results.loads[index]
    batch = next(batched(prompts, load.batch_size))
    rows = [encode(tokenizer, prompt.messages, results.template) for prompt in batch]
    for method in methods:
        if any((peak.load, peak.method) == (index, method.name) for peak in results.peaks):
            continue
        with PeakMemory(methods[0].model.device, loaded(methods)) as memory:
            run_once(method, rows, load, load.seed)
        results.peaks.append(Peak(index, method.name, memory.peak))


def loaded(methods: Sequence[Method]) -> list[Any]:
    """Return every model that a run holds: target, heads, drafts."""
    found: list[Any] = []
    for method in methods:
        found.append(method.model)
        attached = method.model.__dict__.get(SUPPORT_KEY)
        if attached is not None:
            found += attached.heads
            found += [attached.draft.model] if attached.draft is not None else []
        if method.arguments.get("assistant_model") is not None:
            found.append(method.arguments["assistant_model"])
    return found


def check_figures(results: Results) -> None:
    """Make a file's figures anew from its records and compare: a figure edited by hand, or of other code, is refused.

    Raises:
        ValueError: naming the first cell that differs.
    """
    made = summarise(results.records, list(results.methods), results.loads)
    for found, right in zip_longest(results.cells, made):
        same = (
            found is not None
            and right is not None
            and all(_close(value, asdict(right)[name]) for name, value in asdict(found).items())
        )
        if not same:
            raise ValueError(f"the figures do not follow from the records: {found} should be {right}; measure again.")


def _close(found: Any, right: Any) -> bool:
    if isinstance(found, list) and isinstance(right, list):
        return len(found) == len(right) and all(map(_close, found, right))
    if isinstance(found, float) and isinstance(right, float):
        return isclose(found, right, rel_tol=1e-6)
    return bool(found == right)


def batches_left(results: Results, prompts: Sequence[Prompt], per_group: PerGroup = lambda load: None) -> int:
    """Return how many batches a run has still to measure."""
    return sum(
        not results.measured(index, [prompt.id for prompt in batch])
        for index, load in enumerate(results.loads)
        for batch in batched(select(prompts, None, per_group(load)), load.batch_size)
    )
