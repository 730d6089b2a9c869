"""What a training run loads before it starts: rows, target, ends, features, and the held-out split.

With `features: store` the target is loaded only to write the store (or to measure acceptance); later processes read
the target's embedding and LM head from the store itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from huggingface_hub import ResolvedRevision
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging, resolve_revision

from ..demo_target import resolve_target
from ..heads.fingerprint import compare_logits, fingerprint
from .arguments import warn_of_slow_dtype
from .dataset import Features, OnlineFeatures, RowDataset, StoredFeatures
from .ends import TargetEnds
from .features import new_index, write_store
from .recipe import DataArguments, as_mapping
from .rows import Rows, hash_of, prepare_rows
from .selection import split_rows
from .store import FeatureStore, is_whole, store_bytes
from .trainer import WEIGHTS

logger = logging.get_logger(__name__)

WEIGHT_FILES = (".safetensors", ".bin")
SAMPLED_PIECES, SAMPLED_BYTES = 64, 2**16  # of a weight file: a 140 GB target costs no reading of it


class NamesTarget(Protocol):
    """Arguments of any recipe: which target, and in which dtype."""

    target: str
    target_revision: str | None
    dtype: str


def load_tokenizer(data: NamesTarget) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer."""
    return AutoTokenizer.from_pretrained(resolve_target(data.target), revision=data.target_revision)


def load_config(data: NamesTarget) -> PreTrainedConfig:
    """Load the target's config."""
    return AutoConfig.from_pretrained(resolve_target(data.target), revision=data.target_revision)


def load_target(data: NamesTarget, device: torch.device, spread: bool = False) -> PreTrainedModel:
    """Load the frozen target.

    Args:
        data: names it and its dtype.
        device: where it goes.
        spread: spread it over all devices of this process (`device_map="auto"`).
    """
    placement: dict[str, Any] = {"device_map": "auto"} if spread and torch.cuda.device_count() > 1 else {}
    target = AutoModelForCausalLM.from_pretrained(
        resolve_target(data.target), revision=data.target_revision, dtype=getattr(torch, data.dtype), **placement
    )
    warn_of_slow_dtype(data.dtype, device.type)
    if not placement:
        target.to(device)
    return target.eval().requires_grad_(False)


def end_ids(data: NamesTarget, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids that end an answer: the target's generation config's, and the tokenizer's EOS."""
    ids = {tokenizer.eos_token_id}
    try:
        config = GenerationConfig.from_pretrained(resolve_target(data.target), revision=data.target_revision)
    except OSError:
        config = GenerationConfig()
    stated = config.eos_token_id
    ids |= set(stated if isinstance(stated, list) else [stated])
    return sorted(token for token in ids if token is not None)


def load_rows(data: DataArguments, tokenizer: PreTrainedTokenizerBase) -> Rows:
    """Return the recipe's rows, from the cache where they exist."""
    return prepare_rows(
        data.data,
        tokenizer,
        data.cache_path(),
        data.max_length,
        as_mapping("template_kwargs", data.template_kwargs),
        end_ids(data, tokenizer),
    )


@dataclass
class Sources:
    """What features come from: `target` is None where only its ends are loaded."""

    rows: Rows
    ends: TargetEnds
    features: Features
    store: FeatureStore | None
    target: PreTrainedModel | None
    fingerprint: dict[str, Any]
    started: Path | None = None  # where a head that was started from the target lies, beside the store
    planned_bytes: int = 0  # of a store that a dry run leaves unwritten

    def datasets(self, held_out: float) -> tuple[RowDataset, RowDataset]:
        """Return the training rows and the held-out rows."""
        train, rest = split_rows(self.rows, held_out)
        return RowDataset(self.rows, train, self.store), RowDataset(self.rows, rest, self.store)


def store_key(data: DataArguments, rows: Rows, config: PreTrainedConfig) -> str:
    """Return the key of a store: rows, target and dtype; which taps it holds is in its index."""
    sizes = {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("transformers_version", "_name_or_path")
    }
    return hash_of([rows.key, data.target, data.target_revision, data.dtype, sizes, weights_of(data)])


def commit_of(data: NamesTarget) -> str | None:
    """Return the commit of a target on the Hub; None for a directory."""
    revision = resolve_revision(resolve_target(data.target), data.target_revision)
    return revision.resolved if isinstance(revision, ResolvedRevision) else None


def weights_of(data: NamesTarget) -> list[Any]:
    """Return what changes with a target's weights: the Hub's commit, or of a directory's files their size and a sample
    of their bytes, which training in place does not leave alone."""
    place = resolve_target(data.target)
    files = sorted(path for path in Path(place).glob("*") if path.suffix in WEIGHT_FILES)
    if not files:
        return [commit_of(data)]
    found: list[Any] = []
    for path in files:
        size, digest = path.stat().st_size, hashlib.sha256()
        with path.open("rb") as file:
            for piece in range(SAMPLED_PIECES):
                file.seek(piece * size // SAMPLED_PIECES)
                digest.update(file.read(SAMPLED_BYTES))
        found.append([path.name, size, digest.hexdigest()[:16]])
    return found


def store_directory(data: DataArguments, key: str, taps: tuple[int, ...]) -> Path:
    """Return the recipe's store, or a whole one in the cache with at least these taps, or where to write one."""
    if data.store is not None:
        return Path(data.store).expanduser()
    found = [path for path in sorted(data.cache_path().glob(f"features-{key}-*")) if is_whole(path, key, taps)]
    return found[0] if found else data.cache_path() / f"features-{key}-{'-'.join(map(str, taps))}"


def online_sources(data: DataArguments, rows: Rows, device: torch.device) -> Sources:
    """Load the target and run it once a batch; one that is to be stored may need several devices."""
    target = load_target(data, device, spread=data.features == "store")
    ends = TargetEnds.of(target)
    if hasattr(target, "hf_device_map"):  # its ends may lie on two devices, where those of a store lie on one
        with TemporaryDirectory() as apart:
            ends.save(Path(apart))
            ends = TargetEnds.load(Path(apart)).to(device)
    return Sources(rows, ends, OnlineFeatures(target, ends), None, target, fingerprint(target))


def open_sources(
    data: DataArguments,
    rows: Rows,
    config: PreTrainedConfig,
    taps: tuple[int, ...],
    device: torch.device,
    world_size: int,
    *,
    started: str | None,
    acceptance: bool,
    dry_run: bool,
) -> Sources:
    """Load the target or its ends, and write the store if the recipe wants one and it is not whole yet.

    Args:
        data: the recipe's data part.
        rows: its rows.
        config: the target's config.
        taps: hidden states to have, the final one last.
        device: of this process.
        world_size: number of processes; a store is written by one alone.
        started: name of the head, started from the target, that is kept beside the store; None where none is needed.
        acceptance: whether this process decodes with the target.
        dry_run: read features online where no store is whole, and write none.

    Raises:
        ValueError: if several processes find no whole store, or the store was written from other weights.
    """
    if data.features == "online":
        return online_sources(data, rows, device)
    key = store_key(data, rows, config)
    directory = store_directory(data, key, taps)
    whole = is_whole(directory, key, taps)
    if dry_run and not whole:
        online = online_sources(data, rows, device)
        online.planned_bytes = store_bytes(rows.lengths(), new_index(key, online.target, taps, rows))
        return online
    beside = None if started is None else directory / started
    unstarted = beside is not None and world_size == 1 and not (beside / WEIGHTS).exists()
    target = None
    if not whole:
        if world_size > 1:
            raise ValueError(
                f"No whole feature store in {directory}; {world_size} processes would write it at once. Write it "
                "first with one process: the same command without the launcher and with --write_store true."
            )
        target = load_target(data, device, spread=True)
        write_store(directory, key, target, TargetEnds.of(target), taps, rows, rows.lengths())
    elif acceptance or unstarted:
        target = load_target(data, device, spread=world_size == 1)
    store = FeatureStore(directory, key)
    if target is not None:
        problem = compare_logits(store.index.target_fingerprint["logits"], fingerprint(target)["logits"])
        if problem:
            raise ValueError(
                f"The store in {directory} does not fit the target: {problem}. Delete it, or give its own target."
            )
    ends = TargetEnds.load(directory).to(device)
    return Sources(rows, ends, StoredFeatures(store), store, target, store.index.target_fingerprint, beside)
