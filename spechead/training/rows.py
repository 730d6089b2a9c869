"""Training rows from any source, cached under a key of everything they depend on.

Rows with `prompt_ids` and `response_ids` (what generate_data.py writes) are taken as they are; chats go through
`ChatEncoder`. Every process may call `prepare_rows`: the first one builds under a file lock, the others wait for it
and read, outside any collective that could time out.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock
from huggingface_hub.utils.sha import sha_fileobj
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..bench.strict_json import write_json
from .chat import ChatEncoder, Skipped, TokenRow, UnusableRow, given_ids, given_turn, messages_of
from .loading import files_of, load_source, load_sources

logger = logging.get_logger(__name__)

ROWS_VERSION = 5  # raise it when the same source would give other rows
ROWS_FILE, COUNTS_FILE, REPORT_FILE = "rows.arrow", "counts.npy", "report.json"
ROW_FEATURES = Features(
    {
        "row_id": Value("string"),
        "chat": Value("string"),
        "source": Value("string"),
        "input_ids": List(Value("int32")),
        "spans": List(List(Value("int32"))),
        "length": Value("int32"),
    }
)


@dataclass(frozen=True)
class Rows:
    """Rows on disk: `data` has columns `row_id`, `chat`, `source`, `input_ids`, `spans`; `report` is counts and
    reasons for skipping."""

    data: Dataset
    key: str
    report: dict[str, Any]
    directory: Path

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.data[int(number)]

    def lengths(self) -> list[int]:
        """Return the number of tokens of each row."""
        return self.data.with_format("numpy")["length"][:].tolist()


def hash_of(value: object) -> str:
    """Return a short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of what the tokenizer does to text: its whole definition where it has one, else its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return hash_of(backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()))


def contents_of(source: str) -> list[str]:
    """Return what a source's rows depend on: its name and its files' bytes, so that a file that was only copied or
    touched is the same; a Hub dataset's fingerprint."""
    files = files_of(source)
    if not files:
        return [source, str(load_source(source)._fingerprint)]
    digests = []
    for file in files:
        with open(file, "rb") as opened:
            digests.append(sha_fileobj(opened).hex())
    return [Path(source).name, *digests]


def rows_key(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    max_length: int,
    end_ids: Sequence[int] | None = None,
) -> str:
    """Return the key of the rows that these inputs give."""
    return hash_of(
        {
            "data": [contents_of(source) for source in sources],
            "tokenizer": tokenizer_hash(tokenizer),
            "template": tokenizer.chat_template,
            "template_kwargs": dict(template_kwargs),
            "max_length": max_length,
            "end_ids": None if end_ids is None else list(end_ids),
            "vocab_size": len(tokenizer),
            "version": ROWS_VERSION,
        }
    )


def prepare_rows(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    max_length: int,
    template_kwargs: Mapping[str, Any] | None = None,
    end_ids: Sequence[int] | None = None,
) -> Rows:
    """Return the rows of all sources, from the cache if they have been made before.

    Args:
        sources: files, directories or Hub datasets.
        tokenizer: the target's.
        cache: directory of the cache.
        max_length: longer rows are cut; a row whose answer is cut off whole is skipped.
        template_kwargs: arguments of the chat template.
        end_ids: token ids that end an answer.

    Raises:
        ValueError: if nothing is left to train on.
    """
    data = load_sources(sources)
    key = rows_key(sources, tokenizer, template_kwargs or {}, max_length, end_ids)
    directory = cache / f"rows-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(str(directory) + ".lock"):
        if (found := cached_rows(directory, key)) is not None:
            return found
        build_rows(data, directory, tokenizer, max_length, template_kwargs, end_ids)
        found = cached_rows(directory, key)
    if found is None:
        raise ValueError(f"The rows just written to {directory} cannot be read; delete it, and look at the disk.")
    return found


def cached_rows(directory: Path, key: str) -> Rows | None:
    """Return rows written before; None where there are none, or where they cannot be read and are to be rebuilt."""
    if not (directory / REPORT_FILE).exists():
        return None
    try:
        report = json.loads((directory / REPORT_FILE).read_text())
        rows = Rows(Dataset.from_file(str(directory / ROWS_FILE)), key, report, directory)
        np.load(directory / COUNTS_FILE, mmap_mode="r")
        if report["rows"] == len(rows):
            return rows
        reason = "it holds another number of rows than its report"
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    logger.warning("The cached rows in %s cannot be read (%s) and are built again.", directory, reason)
    return None


def refuse_ids_beyond(report: Mapping[str, Any], vocab_size: int) -> None:
    """Refuse rows with token ids that a model has no embedding for.

    Raises:
        ValueError: if their largest id is not below `vocab_size`.
    """
    if report["largest_id"] >= vocab_size:
        raise ValueError(
            f"The rows hold token id {report['largest_id']}, and the model's vocabulary has {vocab_size} ids, 0 to "
            f"{vocab_size - 1}: prompt_ids and response_ids are of another tokenizer. Give answers made by this "
            "target, or chats as messages, which are tokenized here."
        )


def build_rows(
    data: Dataset,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    template_kwargs: Mapping[str, Any] | None,
    end_ids: Sequence[int] | None,
) -> None:
    """Encode all rows, write them, then the report that marks them whole."""
    skipped, encoder = Skipped(), None
    if "response_ids" not in data.column_names or len(set(data.column_names) & {"messages", "conversations"}):
        encoder = ChatEncoder(tokenizer, template_kwargs, end_ids)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with ArrowWriter(path=str(directory / ROWS_FILE), features=ROW_FEATURES) as writer:
        for encoded in encoded_rows(data, encoder, max_length, skipped):
            writer.write(encoded)
        written, _ = writer.finalize()
    if written == 0:
        raise ValueError("No row is left to train on. " + " ".join(skipped.lines()))
    for line in skipped.lines():
        logger.warning(line)
    rows = Dataset.from_file(str(directory / ROWS_FILE))
    counts, largest = np.zeros(len(tokenizer), dtype=np.int64), 0
    for row in rows:
        largest = max(largest, *row["input_ids"])
        for start, stop in row["spans"]:
            found = np.bincount(row["input_ids"][start:stop])
            if len(found) > len(counts):  # a target can sample ids that its tokenizer does not have
                counts = np.pad(counts, (0, len(found) - len(counts)))
            counts[: len(found)] += found
    np.save(directory / COUNTS_FILE, counts)
    report = {
        "rows": len(rows),
        "tokens": int(sum(rows["length"])),
        "answer_tokens": int(counts.sum()),
        "largest_id": largest,
        "skipped": dict(skipped.counts),
        "skipped_examples": skipped.examples,
    }
    write_json(report, directory / REPORT_FILE)


def encoded_rows(
    data: Dataset, encoder: ChatEncoder | None, max_length: int, skipped: Skipped
) -> Iterator[dict[str, Any]]:
    """Yield encoded rows; what cannot be used is counted in `skipped`."""
    for place, row in enumerate(data):
        name = str(row.get("id") if row.get("id") is not None else place)
        try:
            for turn, made in enumerate(encode_row(row, encoder), start=given_turn(row)):
                cut = cut_row(made, max_length)
                yield {
                    "row_id": name if turn == 0 else f"{name}.{turn}",
                    "chat": name,
                    "source": str(row["source"]),
                    "input_ids": cut.input_ids,
                    "spans": cut.spans,
                    "length": len(cut.input_ids),
                }
        except UnusableRow as reason:
            skipped.add(str(reason), row)


def encode_row(row: Mapping[str, Any], encoder: ChatEncoder | None) -> list[TokenRow]:
    """Return a source row's training rows.

    Raises:
        UnusableRow: if it cannot be used.
    """
    if row.get("response_ids") is not None:
        return [given_ids(row)]
    if encoder is None:
        raise UnusableRow("neither response_ids nor messages")
    return encoder.rows(messages_of(row))


def cut_row(row: TokenRow, max_length: int) -> TokenRow:
    """Cut a row to `max_length` tokens.

    Raises:
        UnusableRow: if fewer than two answer tokens stay.
    """
    spans = [[start, min(stop, max_length)] for start, stop in row.spans if min(stop, max_length) - start >= 2]
    if not spans:
        raise UnusableRow("longer than max_length before its answer, or an answer of one token")
    return TokenRow(row.input_ids[:max_length], spans)
