"""What a training recipe can say: dataclasses read from `--config file.yaml` and command-line overrides.

TRL's parser fills them, the training arguments are transformers' own with other defaults, and a name that none of them
has is an error with the nearest one that exists. `save_recipe` writes what was said, resolved, beside the head.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from ..demo_target import cache_directory
from ..heads.config import Eagle3Config, EagleConfig, MedusaConfig
from .arguments import default_of, said_of
from .checks import as_sources, at_least_one, check_decay, check_dtype, check_head, check_types

FEATURES = ("online", "store")


@dataclass
class DataArguments:
    """The target, its answers, and how they are read."""

    target: str = field(metadata={"help": "Target model: Hub name or directory."})
    data: list[str] = field(
        metadata={"help": "JSONL or parquet files, directories of them, or Hub datasets (name[:split])."}
    )
    target_revision: str | None = field(default=None, metadata={"help": "Revision of the target."})
    dtype: str = field(default="bfloat16", metadata={"help": "The target's dtype."})
    template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of the chat template, as when serving."}
    )
    max_length: int = field(default=2048, metadata={"help": "Longer rows are cut."})
    held_out: float = field(default=0.02, metadata={"help": "Share of rows held out."})
    features: str = field(
        default="online", metadata={"help": "online, or store: write hidden states once, then train."}
    )
    store: str | None = field(default=None, metadata={"help": "Directory of the store; by default in the cache."})
    cache: str | None = field(default=None, metadata={"help": "Cache directory."})

    def __post_init__(self) -> None:
        self.template_kwargs = as_mapping("template_kwargs", self.template_kwargs)
        self.data = as_sources(self.data)
        check_dtype(self.dtype)
        at_least_one(max_length=self.max_length)
        if self.features not in FEATURES:
            raise ValueError(f"features={self.features!r} is unknown; give one of {', '.join(FEATURES)}.")
        if self.store is not None and self.features == "online":
            raise ValueError(
                f"store={self.store} is neither read nor written with features: online; say features: store, or leave "
                "it out."
            )
        if not 0.0 < self.held_out < 1.0:
            raise ValueError(
                f"held_out={self.held_out} must lie between 0 and 1: the best head is chosen on held-out rows."
            )

    def cache_path(self) -> Path:
        """Return the cache directory."""
        return Path(self.cache).expanduser() if self.cache else cache_directory()


@dataclass
class RunArguments:
    """How a run behaves."""

    tokens_per_batch: int = field(default=4096, metadata={"help": "Padded tokens of a micro-batch."})
    rows_per_batch: int | None = field(
        default=None, metadata={"help": "Rows of a micro-batch at most: small batches learn more from few tokens."}
    )
    resume: bool = field(
        default=True, metadata={"help": "Go on from the last checkpoint in output_dir, if there is one."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Print spans, tokens, hours, disk and memory, then stop."})
    write_store: bool = field(default=False, metadata={"help": "Write the feature store, then stop."})
    acceptance_prompts: int = field(
        default=16, metadata={"help": "Held-out prompts decoded with the head at each evaluation; 0 = none."}
    )
    acceptance_new_tokens: int = field(default=64, metadata={"help": "New tokens of each of them."})

    def __post_init__(self) -> None:
        at_least_one(tokens_per_batch=self.tokens_per_batch, rows_per_batch=self.rows_per_batch)
        if self.acceptance_prompts < 0:
            raise ValueError(f"acceptance_prompts={self.acceptance_prompts} must be at least 0 (none).")
        if self.acceptance_new_tokens < 2:
            raise ValueError(
                f"acceptance_new_tokens={self.acceptance_new_tokens} leaves nothing to draft: the first new token is "
                "the prompt's own. Give at least 2, or acceptance_prompts: 0 for no measurement."
            )


OF_EAGLE3 = ("depths", "decay", "draft_vocab_size", "softmax_rows", "first_depth_share")


@dataclass
class EagleArguments:
    """What is particular to EAGLE heads."""

    method: str = field(default="eagle3", metadata={"help": "eagle3, or eagle (EAGLE-1/2)."})
    init_head: str | None = field(default=None, metadata={"help": "A head to go on from; its vocabulary is kept."})
    init_from_target: bool = field(
        default=True, metadata={"help": "Start from the target's last layer and LM head rows."}
    )
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Most frequent answer tokens kept; none = all."}
    )
    depths: int = field(default=5, metadata={"help": "Steps of the training-time test (EAGLE-3)."})
    first_depth_share: float = field(
        default=0.0,
        metadata={"help": "Share of the steps, the first ones, that train the first depth alone (EAGLE-3)."},
    )
    decay: float = field(default=0.8, metadata={"help": "Weight of a depth against the one before (EAGLE-3)."})
    softmax_rows: int | None = field(
        default=None,
        metadata={"help": "Draft tokens always in the softmax, the rest is sampled (EAGLE-3); none = all."},
    )
    noise: float = field(default=0.1, metadata={"help": "Half-width of the noise on features (EAGLE-1)."})
    head: dict[str, Any] | str | None = field(default=None, metadata={"help": "Further fields of the head's config."})

    def __post_init__(self) -> None:
        self.head = as_mapping("head", self.head)
        if self.method not in ("eagle", "eagle3"):
            raise ValueError(f"method={self.method!r} is unknown; give eagle3, or eagle for EAGLE-1/2.")
        check_head(EagleConfig if self.method == "eagle" else Eagle3Config, self.head)
        at_least_one(depths=self.depths, draft_vocab_size=self.draft_vocab_size, softmax_rows=self.softmax_rows)
        check_decay(self.decay)
        if self.init_head is not None:
            refuse_beside_init_head(self, "draft_vocab_size", "head")
        if not 0.0 <= self.first_depth_share < 1.0:
            raise ValueError(f"first_depth_share={self.first_depth_share} must be at least 0 and below 1.")
        refuse_twice(self, "draft_vocab_size")
        given = said_of(self, *OF_EAGLE3) if self.method == "eagle" else said_of(self, "noise")
        if given:
            why = "trains one depth over the whole vocabulary" if self.method == "eagle" else "reads true features"
            raise ValueError(
                f"{', '.join(given)} mean nothing to method={self.method!r}, which {why}; leave them out."
            )


@dataclass
class MedusaArguments:
    """What is particular to Medusa heads."""

    init_head: str | None = field(default=None, metadata={"help": "Heads to go on from."})
    num_heads: int = field(default=4, metadata={"help": "K."})
    decay: float = field(default=0.8, metadata={"help": "Weight of a head against the one before."})
    softmax_rows: int | None = field(
        default=None, metadata={"help": "LM head rows always in the softmax, the rest is sampled; none = all."}
    )
    head: dict[str, Any] | str | None = field(default=None, metadata={"help": "Further fields of the head's config."})

    def __post_init__(self) -> None:
        self.head = as_mapping("head", self.head)
        check_head(MedusaConfig, self.head)
        at_least_one(num_heads=self.num_heads, softmax_rows=self.softmax_rows)
        check_decay(self.decay)
        refuse_twice(self, "num_heads")
        if self.init_head is not None:
            refuse_beside_init_head(self, "num_heads", "head")


def refuse_beside_init_head(arguments: Any, *names: str) -> None:
    """Raise ValueError for fields that a head that is gone on with has decided already."""
    said = said_of(arguments, *names)
    if said:
        raise ValueError(f"{', '.join(said)}: init_head keeps its own; leave it out, or train without init_head.")


def refuse_twice(arguments: Any, name: str) -> None:
    """Raise ValueError for a field that `head` says as well."""
    said = said_of(arguments, name)
    if said and name in arguments.head:
        raise ValueError(f"{said[0]} and head={arguments.head!r} both say {name}; give one of them.")


def as_mapping(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    """Return a mapping given as YAML, as JSON on the command line, or not at all.

    Raises:
        ValueError: if it is no mapping.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}={value!r} is not a JSON object ({error}).") from error
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name}={value!r} must be a mapping.")
    return dict(value or {})


def parse(classes: Sequence[type], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Fill dataclasses from `--config file.yaml` and command-line overrides.

    Args:
        classes: the dataclasses; their fields share one flat name space.
        argv: arguments, `sys.argv[1:]` by default.

    Raises:
        ValueError: for a name that none of the classes has, with the nearest one, and for a value in the file that its
            field does not take.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    fields = {entry.name for cls in classes for entry in dataclasses.fields(cls) if entry.init} | {"env"}
    known = sorted(fields | {"config", "help"})
    argv = [part for argument in argv for part in split_config(argument)]
    path = config_path(argv)
    if path is not None:
        said = read_config(path)
        for name in said:
            refuse_unknown(name, sorted(fields), f"{path}")
        check_types(said, classes, f"{path}")
    for argument in argv:
        if argument.startswith("--"):
            name = argument[2:].split("=")[0].replace("-", "_")
            refuse_unknown(
                name.removeprefix("no_") if name.removeprefix("no_") in known else name, known, "the command line"
            )
    return TrlParser(list(classes), allow_abbrev=False).parse_args_and_config(argv)


def split_config(argument: str) -> list[str]:
    """Return `--config=file` as two arguments, which is how TRL's parser wants it, and any other as it is."""
    name, equals, path = argument.partition("=")
    return [name, path] if equals and name == "--config" else [argument]


def config_path(argv: Sequence[str]) -> Path | None:
    """Return the file that `--config` names, or None without it.

    Raises:
        ValueError: if it names none, or one that is not there.
    """
    if "--config" not in argv:
        return None
    named = next(iter(argv[argv.index("--config") + 1 :]), "")
    if not named or named.startswith("--"):
        raise ValueError("--config names no file; give it a recipe, as in `--config recipe.yaml`, or leave it out.")
    if not Path(named).exists():
        raise ValueError(f"--config {named} does not exist.")
    return Path(named)


def read_config(path: Path) -> dict[str, Any]:
    """Read a recipe's YAML.

    Raises:
        ValueError: if it is broken, or no mapping of names.
    """
    try:
        said = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path} is no YAML: {error}") from error
    if not isinstance(said, dict) or not all(isinstance(name, str) for name in said):
        raise ValueError(f"--config {path} must map names to values, one a line: `learning_rate: 1.0e-3`.")
    return said


def refuse_unknown(name: str, known: Sequence[str], where: str) -> None:
    """Raise ValueError for a name that is not known."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " `--help` lists all."
        raise ValueError(f"{where} sets {name!r}, which no argument is called.{hint}")


def save_recipe(path: Path, *arguments: Any) -> None:
    """Write everything that differs from its default, so that `--config` on this file repeats the run.

    On what device it ran is left out unless it was said; in which arithmetic never is.
    """
    said: dict[str, Any] = {}
    for part in arguments:
        for entry in dataclasses.fields(part):
            value = getattr(part, entry.name)
            value = value.value if isinstance(value, Enum) else value
            plain = value if isinstance(value, bool | int | float | str | list | dict) else None
            if entry.name in getattr(part, "unsaid", ()) or not entry.init:
                continue
            if plain is not None and plain != default_of(entry) and plain not in ({}, []):
                said[entry.name] = plain
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(said, sort_keys=True))
