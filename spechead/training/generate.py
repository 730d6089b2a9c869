"""The main of generate_data.py: from prompts to a directory of the target's answers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from transformers.utils import logging

from ..heads.fingerprint import fingerprint
from .backends import EndpointBackend, LocalBackend
from .chat import ChatEncoder, messages_of
from .generations import AnswerLog, Backend, Interview, answer_all, check_provenance
from .recipe import as_mapping, parse
from .rows import hash_of, load_sources
from .sources import end_ids, load_target, load_tokenizer

logger = logging.get_logger(__name__)


@dataclass
class GenerateArguments:
    """What is asked, of whom, and how."""

    target: str = field(metadata={"help": "Target model: Hub name or directory."})
    data: list[str] = field(
        metadata={"help": "Prompts: JSONL or parquet files, directories, or Hub datasets (name[:split])."}
    )
    output_dir: str = field(metadata={"help": "Directory of the answers."})
    target_revision: str | None = field(default=None, metadata={"help": "Revision of the target."})
    dtype: str = field(default="bfloat16", metadata={"help": "The target's dtype."})
    template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of the chat template."}
    )
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.8], metadata={"help": "Drawn from, row by row."})
    max_new_tokens: int = field(default=512, metadata={"help": "Longest answer."})
    max_prompt_tokens: int = field(default=1536, metadata={"help": "Longer histories are skipped and counted."})
    limit: int | None = field(default=None, metadata={"help": "Only the first so many rows."})
    seed: int = field(default=0, metadata={"help": "Of the temperature mix and of sampling."})
    use_cpu: bool = field(default=False, metadata={"help": "Stay on the CPU; several processes talk through gloo."})

    def __post_init__(self) -> None:
        self.template_kwargs = as_mapping("template_kwargs", self.template_kwargs)
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(
                f"temperatures={self.temperatures} must be one or more numbers of at least 0 (0 = greedy)."
            )


@dataclass
class BackendArguments:
    """Batches of the local target, or the server that runs it."""

    rows_per_batch: int = field(default=32, metadata={"help": "Rows generated together."})
    tokens_per_batch: int = field(default=65536, metadata={"help": "Padded tokens of a batch, new ones included."})
    speculative: str | None = field(
        default=None,
        metadata={"help": "prompt_lookup or auto, for few rows of long prompts: the same law, faster; none = plain."},
    )
    endpoint: str | None = field(
        default=None, metadata={"help": "Base url of an OpenAI-compatible server; none = local."}
    )
    endpoint_model: str | None = field(
        default=None, metadata={"help": "The target's name there; by default `target`."}
    )
    endpoint_key: str = field(default="OPENAI_API_KEY", metadata={"help": "Environment variable with the key."})
    concurrency: int = field(default=32, metadata={"help": "Requests under way at once."})
    retries: int = field(default=5, metadata={"help": "Further attempts after a failed request."})

    def __post_init__(self) -> None:
        if self.speculative is not None and self.endpoint is not None:
            raise ValueError(
                f"speculative={self.speculative!r} is for the local target, and endpoint={self.endpoint!r} answers "
                "with what it was started with; leave one out."
            )


def with_ids(data: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, each with an id that no other has, the same at every start: its own, or its place; where two
    sources count alike, the later one's starts with the source.

    Raises:
        ValueError: if two rows of one source have the same id.
    """
    rows: list[dict[str, Any]] = []
    taken: set[str] = set()
    for place, row in enumerate(data):
        name = str(row["id"] if row.get("id") is not None else place)
        if name in taken:
            name = f"{row.get('source', 'row')}:{name}"
        if name in taken:
            raise ValueError(f"Two rows are called {name}; an answer is kept by its row's id, so each needs its own.")
        taken.add(name)
        rows.append({**row, "id": name})
    return rows


def generate_data(argv: Sequence[str] | None = None) -> list[str]:
    """Answer prompts as `--config` and overrides say.

    Returns:
        Lines to show: what was answered, skipped and dropped, and where it lies.
    """
    asked, how = parse((GenerateArguments, BackendArguments), argv)
    state = PartialState(cpu=asked.use_cpu)
    tokenizer = load_tokenizer(asked)
    ends = end_ids(asked, tokenizer)
    encoder = ChatEncoder(tokenizer, asked.template_kwargs, ends)
    data = load_sources(asked.data)
    if asked.limit is not None:
        data = data.select(range(min(asked.limit, len(data))))
    directory = Path(asked.output_dir)
    backend, prints = make_backend(asked, how, tokenizer, ends, state.device)
    directory.mkdir(parents=True, exist_ok=True)
    check_provenance(directory, provenance(asked, how, tokenizer, prints), state.is_main_process)
    log = AnswerLog(directory, state.process_index)
    state.wait_for_everyone()
    rows = with_ids(data)
    own = rows[state.process_index :: state.num_processes]
    interview = Interview(own, encoder, log, asked.temperatures, asked.seed, asked.max_prompt_tokens)
    turns = max((count_turns(row) for row in own), default=0)
    budget = how.tokens_per_batch
    tokens = sum(
        answer_all(
            interview,
            backend,
            log,
            turns,
            how.rows_per_batch,
            budget,
            asked.max_new_tokens,
            state.is_local_main_process,
        )
    )
    lines = [
        f"Process {state.process_index}: {tokens:,} answer tokens written to {log.path}.",
        *interview.skipped.lines(),
    ]
    if isinstance(backend, EndpointBackend):
        lines += [f"  {count} answers or requests: {reason}" for reason, count in backend.counts.items()]
    return lines


def make_backend(
    asked: GenerateArguments, how: BackendArguments, tokenizer: Any, ends: list[int], device: torch.device
) -> tuple[Backend, dict[str, Any] | None]:
    """Return who answers, and the fingerprint of the target where it is loaded here."""
    if how.endpoint is not None:
        model = how.endpoint_model or asked.target
        key = os.environ.get(how.endpoint_key)
        backend = EndpointBackend(
            how.endpoint, model, tokenizer, ends, asked.max_new_tokens, asked.seed, how.concurrency, how.retries, key
        )
        return backend, None
    target = load_target(asked, device)
    print_of_target = fingerprint(target)
    return LocalBackend(target, tokenizer, ends, asked.max_new_tokens, asked.seed, how.speculative), print_of_target


def provenance(asked: GenerateArguments, how: BackendArguments, tokenizer: Any, prints: Any) -> dict[str, Any]:
    """Return what makes a run's answers what they are."""
    return {
        "target": asked.target,
        "target_revision": asked.target_revision,
        "target_fingerprint": prints,
        "dtype": asked.dtype,
        "backend": how.endpoint or "transformers",
        **({} if how.speculative is None else {"speculative": how.speculative}),
        "data": asked.data,
        "limit": asked.limit,
        "template": hash_of(tokenizer.chat_template),
        "template_kwargs": asked.template_kwargs,
        "temperatures": asked.temperatures,
        "top_p": 1.0,
        "top_k": 0,
        "seed": asked.seed,
        "max_new_tokens": asked.max_new_tokens,
        "max_prompt_tokens": asked.max_prompt_tokens,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
    }


def count_turns(row: dict[str, Any]) -> int:
    """Return the user turns of a source row; 1 where it is unusable, so that it is counted as such."""
    try:
        return max(1, sum(message.get("role") == "user" for message in messages_of(row)))
    except ValueError:
        return 1
