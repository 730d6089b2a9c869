"""The target's hidden states for head training: read online, once a batch, or written once to a store.

`read_states` runs the frozen target's body under `inference_mode`, keeps only the taps asked for and the state after
the final norm, and applies the LM head only where a token is supervised, in chunks, so no [B, L, V] tensor ever
exists.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..heads.fingerprint import fingerprint
from .batch import RowTable
from .ends import TargetEnds
from .store import FeatureStore, RowFeatures, StoreIndex, StoreWriter, store_bytes

logger = logging.get_logger(__name__)

LOGIT_CHUNK_BYTES = 64 * 2**20  # float32 logits of the target held at once


def final_tap(config: PreTrainedConfig) -> int:
    """Return the tap of the state after the final norm."""
    return int(config.get_text_config().num_hidden_layers)


@torch.inference_mode()
def read_states(
    target: PreTrainedModel, ends: TargetEnds, ids: Tensor, taps: Sequence[int], needed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the target's body over right-padded rows.

    Args:
        target: the frozen target.
        ends: its LM head and logit rule.
        ids: [B, L] token ids, right-padded.
        taps: hidden states to keep, the final one last.
        needed: [B, L] bool, positions whose law predicts a supervised token.

    Returns:
        states [B, L, K, H], best [B, L] int32 (-1 where not needed), mass [B, L] float32.

    Raises:
        ValueError: if a needed position has a state that is not finite.
    """
    output = target.base_model(input_ids=ids, output_hidden_states=list(taps), use_cache=False)
    states = torch.stack([output.hidden_states[tap].to(ids.device) for tap in taps], dim=2)  # [B, L, K, H]
    best = ids.new_full(ids.shape, -1, dtype=torch.int32)
    mass = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    final = states[:, :, -1][needed]  # [T, H]
    if not torch.isfinite(final).all():
        raise ValueError(
            "The target's final hidden state is not finite for some rows; check its dtype (bfloat16 or float32) and "
            "weights."
        )
    chosen, masses = law_summary(final, ends)
    best[needed], mass[needed] = chosen.int(), masses
    return states, best, mass


def law_summary(final: Tensor, ends: TargetEnds) -> tuple[Tensor, Tensor]:
    """Return the argmax [T] and the log of the summed exponentials [T] of the target's logits for states [T, H]."""
    weight = ends.lm_head.weight
    chunk = max(1, LOGIT_CHUNK_BYTES // (4 * weight.shape[0]))
    best, mass = [], []
    for part in final.split(chunk):
        logits = ends.rule(ends.lm_head(part.to(weight.device)).float())  # [C, V]
        best.append(logits.argmax(-1))
        mass.append(logits.logsumexp(-1))
    if not best:
        return final.new_zeros(0, dtype=torch.long), final.new_zeros(0, dtype=torch.float32)
    return torch.cat(best).to(final.device), torch.cat(mass).to(final.device)


def needed_positions(length: int, spans: Sequence[Sequence[int]]) -> Tensor:
    """Return [L] bool: positions whose law predicts an answer token (`spans` are half-open ranges of answer
    tokens)."""
    needed = torch.zeros(length, dtype=torch.bool)
    for start, stop in spans:
        needed[max(start - 1, 0) : stop - 1] = True
    return needed


def new_index(key: str, target: PreTrainedModel, taps: Sequence[int], rows: RowTable) -> StoreIndex:
    """Return the index of a store of these rows, of which none is written yet."""
    dtype = str(next(target.parameters()).dtype).removeprefix("torch.")
    hidden = int(target.config.get_text_config().hidden_size)
    return StoreIndex(key, tuple(taps), hidden, dtype, len(rows), fingerprint(target))


def write_store(
    directory: Path,
    key: str,
    target: PreTrainedModel,
    ends: TargetEnds,
    taps: Sequence[int],
    rows: RowTable,
    lengths: Sequence[int],
    tokens_per_forward: int = 4096,
) -> FeatureStore:
    """Write the features of all rows, or go on with an interrupted write; the size is logged before anything is
    written.

    Args:
        directory: the store's directory.
        key: names the data, taps and target; a directory with another key is refused.
        target: the frozen target.
        ends: its embedding and LM head; saved beside the features.
        taps: hidden states to keep, the final one last.
        rows: rows with `input_ids` and `spans`.
        lengths: tokens of each row.
        tokens_per_forward: padded tokens a forward of the target.

    Raises:
        ValueError: if the directory holds another store.
    """
    order = sorted(range(len(rows)), key=lambda number: (lengths[number], number))
    index = new_index(key, target, taps, rows)
    logger.warning(
        "Feature store %s: %d rows, %d tokens, %.2f GB.",
        directory,
        len(rows),
        sum(lengths),
        store_bytes(lengths, index) / 1e9,
    )
    writer = StoreWriter(directory, index)
    ends.save(directory)
    done, start = 0, time.monotonic()
    total = sum(lengths[number] for number in order[writer.written :])
    for batch in batches_in_order(order[writer.written :], lengths, tokens_per_forward):
        add_batch(writer, target, ends, taps, [(number, rows[number]) for number in batch])
        done += sum(lengths[number] for number in batch)
        rate = done / (time.monotonic() - start)
        logger.info(
            "Feature store: %d of %d tokens, %.0f tokens/s, %.0f s left.", done, total, rate, (total - done) / rate
        )
    writer.flush()
    return FeatureStore(directory, key)


def add_batch(
    writer: StoreWriter,
    target: PreTrainedModel,
    ends: TargetEnds,
    taps: Sequence[int],
    rows: list[tuple[int, Mapping[str, Any]]],
) -> None:
    """Compute and add the features of a few rows in one forward of the target."""
    lengths = [len(row["input_ids"]) for _, row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    needed = torch.zeros(ids.shape, dtype=torch.bool)
    for place, (_, row) in enumerate(rows):
        ids[place, : lengths[place]] = torch.tensor(row["input_ids"])
        needed[place, : lengths[place]] = needed_positions(lengths[place], row["spans"])
    device = ends.embedding.weight.device
    states, best, mass = (part.cpu() for part in read_states(target, ends, ids.to(device), taps, needed.to(device)))
    for place, (number, _) in enumerate(rows):
        length = lengths[place]
        writer.add(
            number,
            RowFeatures(states[place, :length].clone(), best[place, :length].clone(), mass[place, :length].clone()),
        )


def batches_in_order(order: Sequence[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Split row numbers in the given order into lists whose padded size stays within `tokens` (a longer row goes
    alone)."""
    batch: list[int] = []
    longest = 0
    for number in order:
        if batch and max(longest, lengths[number]) * (len(batch) + 1) > tokens:
            yield batch
            batch, longest = [], 0
        batch.append(number)
        longest = max(longest, lengths[number])
    if batch:
        yield batch
