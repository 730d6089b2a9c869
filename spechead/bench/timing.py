"""The paired comparison: the only place in this repository that compares timings.

Every method answers every prompt in one process, in an order that rotates from prompt to prompt, after a warm-up that
is left out. Tokens are counted from ids. figures.py makes the figures of the records.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from transformers import PreTrainedTokenizerBase

from .differences import Judge, first_difference
from .measure import Method, Timed, run_once
from .prompts import Prompt, encode
from .results import Difference, Load, Record

PLAIN = "plain"
MEAN = "mean"  # the group that is the mean over the groups
WARM_UP_TOKENS = 8

OnRecords = Callable[[list[Record], dict[str, list[Timed]]], None]


def compare(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    load: Load,
    tokenizer: PreTrainedTokenizerBase,
    on_records: OnRecords,
    *,
    load_index: int = 0,
    template: Mapping[str, Any] | None = None,
    judge: Judge | None = None,
    skip: Callable[[list[str]], bool] = lambda ids: False,
) -> None:
    """Run every method on every prompt.

    Args:
        methods: plain first.
        prompts: asked in batches of `load.batch_size` prompts of one group.
        load: how to ask.
        tokenizer: the target's.
        on_records: called after each batch with its records, and with what each method gave in its last repeat; a
            batch is reported whole or not at all.
        load_index: the load's place in the results file.
        template: keyword arguments for the chat template.
        judge: says tie or bug where greedy outputs part; without it differences stay unjudged.
        skip: whether a batch, named by its prompts' ids, has been measured before.

    Raises:
        ValueError: if plain is not first, two methods share a name, or a prompt is too long for the target.
    """
    names = [method.name for method in methods]
    if names[:1] != [PLAIN] or len(set(names)) != len(names):
        raise ValueError(f"methods must have different names, 'plain' first; got {names}.")
    batches = [batch for batch in batched(prompts, load.batch_size) if not skip([prompt.id for prompt in batch])]
    if not batches:
        return
    warm = [encode(tokenizer, prompt.messages, template) for prompt in batches[0]]
    for method in methods:
        run_once(method, warm, Load(min(WARM_UP_TOKENS, load.max_new_tokens), temperature=load.temperature), load.seed)
    for number, batch in enumerate(batches):
        _measure(methods, batch, load, tokenizer, on_records, load_index, template, judge, number)


def batched(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Yield batches of prompts of one group and as many turns; the last is filled up with the first prompts."""
    kinds: dict[tuple[str, int], list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault((prompt.group, len(prompt.follow_ups)), []).append(prompt)
    for members in kinds.values():
        for start in range(0, len(members), size):
            yield [members[place % len(members)] for place in range(start, start + size)]


def _measure(
    methods: Sequence[Method],
    batch: Sequence[Prompt],
    load: Load,
    tokenizer: PreTrainedTokenizerBase,
    on_records: OnRecords,
    load_index: int,
    template: Mapping[str, Any] | None,
    judge: Judge | None,
    number: int,
) -> None:
    """Measure all turns of a batch: a follow-up is asked after plain's answer, so that all methods see one prompt."""
    records: list[Record] = []
    outputs: dict[str, list[Timed]] = {}
    chats = [list(prompt.messages) for prompt in batch]
    for turn in range(len(batch[0].follow_ups) + 1):
        rows = [encode(tokenizer, chat, template) for chat in chats]
        ids = [prompt.id if turn == 0 else f"{prompt.id}/{turn + 1}" for prompt in batch]
        for repeat in range(load.repeats):
            shift = (number + turn + repeat) % len(methods)
            order = [*methods[shift:], *methods[:shift]]
            timed = {method.name: run_once(method, rows, load, load.seed + repeat) for method in order}
            for method in methods:
                differences = _differences(timed[PLAIN], timed[method.name], rows, load, judge)
                records.append(
                    _record(load_index, method, ids, batch[0].group, repeat, timed[method.name], differences)
                )
        for name, result in timed.items():
            outputs.setdefault(name, []).append(result)
        if turn < len(batch[0].follow_ups):
            for chat, prompt, tokens in zip(chats, batch, timed[PLAIN].tokens, strict=True):
                answer = tokenizer.decode(tokens, skip_special_tokens=True).strip()
                chat.append({"role": "assistant", "content": answer})
                chat.append({"role": "user", "content": prompt.follow_ups[turn]})
    on_records(records, outputs)


def _record(
    load: int,
    method: Method,
    ids: list[str],
    group: str,
    repeat: int,
    timed: Timed,
    differences: list[Difference] | None,
) -> Record:
    return Record(
        load=load,
        method=method.name,
        prompts=ids,
        group=group,
        repeat=repeat,
        seconds=timed.seconds,
        seconds_to_first_token=timed.seconds_to_first_token,
        new_tokens=sum(len(row) for row in timed.tokens),
        stats=None if timed.stats is None else timed.stats.to_dict(),
        differences=None if method.name == PLAIN else differences,
    )


def _differences(
    plain: Timed, timed: Timed, rows: Sequence[Sequence[int]], load: Load, judge: Judge | None
) -> list[Difference] | None:
    if load.temperature > 0:
        return None
    found = []
    for prompt, ours, theirs in zip(rows, timed.tokens, plain.tokens, strict=True):
        difference = first_difference(theirs, ours)
        if difference is not None:
            found.append(difference if judge is None else judge.judge(difference, prompt, theirs))
    return found


def seconds_per_token(method: Method, row: Sequence[int], tokens: int, repeats: int = 3) -> float:
    """Return the median seconds a token of a short run: to choose between dtypes, no figure to report."""
    load = Load(max_new_tokens=tokens)
    run_once(method, [row], Load(max_new_tokens=2), 0)
    spans = []
    for _ in range(repeats):
        start = time.perf_counter()
        timed = run_once(method, [row], load, 0)
        spans.append((time.perf_counter() - start) / max(1, len(timed.tokens[0])))
    return median(spans)
