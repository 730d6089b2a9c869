"""What `--dry-run` shows before anything is trained: supervised spans as text, tokens, hours, disk and peak memory.

Hours and memory are measured: two micro-batches, the longest and a median one, run forward and backward.
"""

from __future__ import annotations

import math
import resource
import time
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .batch import collate, supervised_entries
from .batching import LengthBatches
from .recipe import DataArguments
from .rows import Rows
from .sources import Sources
from .store import store_bytes
from .trainer import HeadTrainer

SPANS_SHOWN, TOKENS_BEFORE, SPAN_CHARACTERS = 3, 16, 300


def peak_memory() -> int:
    """Return this process's peak memory in bytes: the device's if there is one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def dry_run(
    trainer: HeadTrainer, rows: Rows, tokenizer: PreTrainedTokenizerBase, sources: Sources, data: DataArguments
) -> list[str]:
    """Return the lines that `--dry-run` prints."""
    args, dataset = trainer.args, trainer.train_dataset
    lines = [
        f"Target {data.target}, {len(rows)} rows ({len(dataset)} to train on), {rows.report['tokens']:,} tokens, "
        f"{rows.report['answer_tokens']:,} of them answers."
    ]
    lines += [f"  skipped {count}: {reason}" for reason, count in rows.report["skipped"].items()]
    for number in dataset.numbers[:SPANS_SHOWN]:
        row = rows[number]
        for start, stop in row["spans"]:
            before = tokenizer.decode(row["input_ids"][max(0, start - TOKENS_BEFORE) : start])
            text = tokenizer.decode(row["input_ids"][start:stop])
            lines.append(f"  row {row['row_id']}: ...{before!r} -> supervised {text[:SPAN_CHARACTERS]!r}")
    seconds, entries = timed_batches(trainer)
    steps, total = planned(trainer, rows)
    speed = entries / seconds
    hours = total / speed / args.world_size / 3600
    lines.append(
        f"{steps:,} steps, {total:,} supervised tokens at {speed:.0f} a second and process: "
        f"{hours:.2f} hours without evaluation."
    )
    head = sum(weight.numel() for weight in trainer.model.head.parameters())
    disk = 12 * head * (1 + (args.save_total_limit or 1)) + 2 * head
    store = sources.planned_bytes
    if sources.store is not None:
        store = store_bytes(rows.lengths(), sources.store.index)
    if sources.planned_bytes:
        lines.append(
            f"Feature store: {store / 1e9:.2f} GB, not written yet; the target's forwards are part of the times above."
        )
    lines.append(f"Disk: {(disk + store) / 1e9:.2f} GB (checkpoints, head, feature store if any).")
    lines.append(f"Peak memory so far: {peak_memory() / 2**30:.2f} GB.")
    return lines


def planned(trainer: HeadTrainer, rows: Rows) -> tuple[int, int]:
    """Return the optimiser steps of the run, and the supervised tokens that they read."""
    args, dataset = trainer.args, trainer.train_dataset
    batches = len(_batches(trainer, args.world_size * args.gradient_accumulation_steps))
    epoch = max(batches // (args.world_size * args.gradient_accumulation_steps), 1)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * epoch)
    answers = len(dataset) / max(len(rows), 1) * rows.report["answer_tokens"]
    return steps, int(steps / epoch * answers)


def _batches(trainer: HeadTrainer, multiple: int = 1) -> list[list[int]]:
    lengths, rows = trainer.train_dataset.lengths, trainer.rows_per_batch
    return list(LengthBatches(lengths, trainer.tokens_per_batch, 0, multiple, shuffle=False, rows_per_batch=rows))


def timed_batches(trainer: HeadTrainer) -> tuple[float, int]:
    """Return seconds and supervised entries of a forward and backward over the longest and a median batch."""
    batches = _batches(trainer)
    seconds, entries = 0.0, 0
    for batch in (batches[-1], batches[len(batches) // 2]):
        inputs = collate([trainer.train_dataset[place] for place in batch])
        count = int(supervised_entries(inputs["supervised"]))
        start = time.perf_counter()
        inputs = trainer._prepare_inputs(inputs)
        with trainer.accelerator.autocast():
            loss: Any = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=torch.tensor(max(count, 1)))
        loss.backward()
        seconds, entries = seconds + time.perf_counter() - start, entries + count
    trainer.model.zero_grad()
    return seconds, max(entries, 1)
