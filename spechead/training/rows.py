"""Training rows from any source, cached under a key of everything they depend on.

A source is a JSONL or parquet file, a directory of such files, or a dataset on the Hub (`name` or `name:split`). Rows
with `prompt_ids` and `response_ids` (what generate_data.py writes) are taken as they are; chats go through
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
from datasets import Dataset, Features, List, Value, concatenate_datasets, load_dataset
from datasets.arrow_writer import ArrowWriter
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock
from huggingface_hub.utils.sha import sha_fileobj
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .chat import ChatEncoder, Skipped, TokenRow, UnusableRow, messages_of

logger = logging.get_logger(__name__)

ROWS_VERSION = 4  # raise it when the same source would give other rows
ROWS_FILE, COUNTS_FILE = "rows.arrow", "counts.npy"
KNOWN_COLUMNS = ("id", "turn", "source", "prompt_ids", "response_ids", "messages", "conversations", "prompt")
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
FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


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


def files_of(source: str) -> list[str]:
    """Return the files of a source on disk, sorted; none for a dataset on the Hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        # A .json beside them is a record about the rows, not rows.
        return sorted(str(file) for file in path.rglob("*") if file.suffix in FILE_KINDS and file.suffix != ".json")
    return [str(path)] if path.exists() else []


def load_source(source: str) -> Dataset:
    """Load one source.

    Raises:
        ValueError: if a path has no readable file, or a Hub name cannot be loaded.
    """
    files = files_of(source)
    if files:
        kinds = {FILE_KINDS.get(Path(file).suffix) for file in files}
        if len(kinds) != 1 or None in kinds:
            raise ValueError(f"{source} must hold files of one kind out of {sorted(FILE_KINDS)}.")
        try:
            return load_dataset(kinds.pop(), data_files=files, split="train")
        except (StopIteration, DatasetGenerationError, OSError) as error:
            reason = error.__cause__ or error
            raise ValueError(
                f"{source} cannot be read ({type(reason).__name__}: {reason}); is a file empty, or a line broken?"
            ) from error
    name, _, split = source.partition(":")
    try:
        return load_dataset(name, split=split or "train")
    except Exception as error:
        raise ValueError(
            f"{source!r} is neither a file, nor a directory with {', '.join(FILE_KINDS)} files, nor a dataset that "
            f"can be loaded from the Hub ({type(error).__name__}: {error})."
        ) from error


def load_sources(sources: Sequence[str]) -> Dataset:
    """Load and concatenate sources; rows keep `id` and `source` where they have them, else get the source's own
    name."""
    parts = []
    for source in sources:
        part = load_source(source)
        if "source" not in part.column_names:
            part = part.add_column("source", [Path(source).name] * len(part))
        part = part.select_columns([name for name in KNOWN_COLUMNS if name in part.column_names])
        for name in ("id", "source"):
            if name in part.column_names:  # sources disagree on whether ids are numbers
                part = part.cast_column(name, Value("string"))
        parts.append(part)
    return concatenate_datasets(parts) if len(parts) > 1 else parts[0]


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
        if not (directory / "report.json").exists():
            build_rows(data, directory, tokenizer, max_length, template_kwargs, end_ids)
    report = json.loads((directory / "report.json").read_text())
    return Rows(Dataset.from_file(str(directory / ROWS_FILE)), key, report, directory)


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
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    for row in rows:
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
        "skipped": dict(skipped.counts),
        "skipped_examples": skipped.examples,
    }
    (directory / "report.json").write_text(json.dumps(report, indent=1))


def encoded_rows(
    data: Dataset, encoder: ChatEncoder | None, max_length: int, skipped: Skipped
) -> Iterator[dict[str, Any]]:
    """Yield encoded rows; what cannot be used is counted in `skipped`."""
    for place, row in enumerate(data):
        name = str(row.get("id") if row.get("id") is not None else place)
        try:
            for turn, made in enumerate(encode_row(row, encoder), start=row.get("turn") or 0):
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
        prompt, response = list(row["prompt_ids"] or []), list(row["response_ids"])
        if not prompt or len(response) < 2:
            raise UnusableRow("no prompt, or fewer than two answer tokens")
        return [TokenRow(prompt + response, [[len(prompt), len(prompt) + len(response)]])]
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
