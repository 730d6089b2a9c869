"""Loads sources of rows: JSONL or parquet files, directories of them, and datasets on the Hub (`name`, `name:split`).

Sources are concatenated on disk, so a column has one type in all of them.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError

KNOWN_COLUMNS = ("id", "turn", "source", "prompt_ids", "response_ids", "messages", "conversations", "prompt")
FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


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
        ValueError: if a path has no readable file, a file is no UTF-8, or a Hub name cannot be loaded.
    """
    files = files_of(source)
    if files:
        kinds = {FILE_KINDS.get(Path(file).suffix) for file in files}
        if len(kinds) != 1 or None in kinds:
            raise ValueError(f"{source} must hold files of one kind out of {sorted(FILE_KINDS)}.")
        if "parquet" not in kinds:
            check_utf8(files)
        try:
            # A name is a pattern to load_dataset, and would read its namesakes.
            return load_dataset(kinds.pop(), data_files=[glob.escape(file) for file in files], split="train")
        except (StopIteration, DatasetGenerationError, OSError, ValueError) as error:
            for file in files if len(files) > 1 else []:
                load_source(file)  # raises with the name of the broken one
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


def check_utf8(files: Sequence[str]) -> None:
    """Refuse text in another encoding: load_dataset takes its bytes, and the row fails only when it is read.

    Raises:
        ValueError: naming the file and the line.
    """
    for file in files:
        with open(file, "rb") as opened:
            for number, line in enumerate(opened, start=1):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    raise ValueError(f"{file} cannot be read: line {number} is no UTF-8 ({error}).") from error


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
                plain = isinstance(part.features[name], Value)
                part = part.cast_column(name, Value("string")) if plain else with_strings(part, name, text_of)
        parts.append(part)
    return concatenate_datasets(agreeing(parts)) if len(parts) > 1 else parts[0]


def agreeing(parts: list[Dataset]) -> list[Dataset]:
    """Return sources that can be concatenated: where they disagree on a column's type (one has tool calls), it holds
    JSON in each, which the readers of rows decode; a `prompt` that is no text is never read, and left out."""
    for name in KNOWN_COLUMNS:
        kinds = {str(part.features[name]) for part in parts if name in part.column_names}
        if len(kinds - {str(Value("null"))}) > 1:
            string_of = (lambda value: value if isinstance(value, str) else None) if name == "prompt" else text_of
            parts = [with_strings(part, name, string_of) if name in part.column_names else part for part in parts]
    return parts


def with_strings(part: Dataset, name: str, string_of: Callable[[Any], str | None]) -> Dataset:
    """Return a source with strings in one column, written to the disk, not held in memory; null stays null."""

    def convert(values: list[Any]) -> dict[str, list[str | None]]:
        return {name: [None if value is None else string_of(value) for value in values]}

    features = Features({**part.features, name: Value("string")})
    return part.map(convert, batched=True, input_columns=[name], features=features)


def text_of(value: object) -> str:
    """Return a text as it is, anything else as JSON, with a date in it as its text."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
