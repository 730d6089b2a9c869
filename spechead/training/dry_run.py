"""What `--dry-run` shows before anything is trained: supervised spans as text, tokens, hours, disk and peak memory.

Hours and memory are measured: two micro-batches, the longest and a median one, run forward and backward.
"""

from __future__ import annotations

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
    total = int(args.num_train_epochs * len(dataset) / max(len(rows), 1) * rows.report["answer_tokens"])
    speed = entries / seconds
    hours = total / speed / args.world_size / 3600
    lines.append(
        f"{total:,} supervised tokens in {args.num_train_epochs} epochs at {speed:.0f} a second and process: "
        f"{hours:.2f} hours without evaluation."
    )
    head = sum(weight.numel() for weight in trainer.model.head.parameters())
    disk = 12 * head * (1 + (args.save_total_limit or 1)) + 2 * head
    if sources.store is not None:
        disk += store_bytes(rows.lengths(), sources.store.index)
    lines.append(f"Disk: {disk / 1e9:.2f} GB (checkpoints, head, feature store if any).")
    lines.append(f"Peak memory so far: {peak_memory() / 2**30:.2f} GB.")
    return lines


def timed_batches(trainer: HeadTrainer) -> tuple[float, int]:
    """Return seconds and supervised entries of a forward and backward over the longest and a median batch."""
    batches = list(LengthBatches(trainer.train_dataset.lengths, trainer.tokens_per_batch, seed=0, shuffle=False))
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
