"""The main of generate_data.py: from prompts to a directory of the target's answers."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import gather_object
from transformers.utils import logging

from ..heads.fingerprint import fingerprint
from ..target import learned_positions
from .answer_log import AnswerLog, repair_parts
from .backends import FULL_LAW, EndpointBackend, LocalBackend
from .chat import ChatEncoder, Skipped
from .checks import as_sources, at_least_one, check_dtype
from .generations import Backend, Interview, answer_all
from .recipe import as_mapping, parse
from .rows import hash_of, load_sources
from .sources import commit_of, end_ids, load_config, load_target, load_tokenizer

logger = logging.get_logger(__name__)

PROVENANCE_FILE = "provenance.json"
NOT_COMPARED = ("versions", "target_commit")
LONGEST_WAIT = timedelta(weeks=4)  # of a process that is done for one that still asks


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
        self.data = as_sources(self.data)
        check_dtype(self.dtype)
        at_least_one(max_new_tokens=self.max_new_tokens, max_prompt_tokens=self.max_prompt_tokens, limit=self.limit)
        self.temperatures = [float(heat) for heat in self.temperatures]  # YAML reads 1e-1 as text
        if not self.temperatures or not all(math.isfinite(heat) and heat >= 0 for heat in self.temperatures):
            raise ValueError(
                f"temperatures={self.temperatures} must be one or more finite numbers of at least 0 (0 = greedy)."
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
        at_least_one(
            rows_per_batch=self.rows_per_batch, tokens_per_batch=self.tokens_per_batch, concurrency=self.concurrency
        )
        if self.retries < 0:
            raise ValueError(f"retries={self.retries} must be at least 0 (a failed request ends the run).")
        if self.speculative is not None and self.endpoint is not None:
            raise ValueError(
                f"speculative={self.speculative!r} is for the local target, and endpoint={self.endpoint!r} answers "
                "with what it was started with; leave one out."
            )


def row_ids(data: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the rows' names, no two alike and the same at every start: its own id, or its place; where two sources
    count alike, the later one's starts with the source.

    Raises:
        ValueError: if two rows of one source have the same id.
    """
    names: dict[str, None] = {}  # keeps the order
    for place, row in enumerate(data):
        name = str(row["id"] if row.get("id") is not None else place)
        if name in names:
            name = f"{row.get('source', 'row')}:{name}"
        if name in names:
            raise ValueError(f"Two rows are called {name}; an answer is kept by its row's id, so each needs its own.")
        names[name] = None
    return list(names)


def generate_data(argv: Sequence[str] | None = None) -> list[str]:
    """Answer prompts as `--config` and overrides say.

    Returns:
        Lines to show: what all processes answered, skipped and dropped, and where it lies.
    """
    asked, how = parse((GenerateArguments, BackendArguments), argv)
    on_cpu = asked.use_cpu or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu, timeout=LONGEST_WAIT)
    tokenizer = load_tokenizer(asked)
    encoder = ChatEncoder(tokenizer, asked.template_kwargs, end_ids(asked, tokenizer))
    data = load_sources(asked.data)
    if asked.limit is not None:
        data = data.select(range(min(asked.limit, len(data))))
    names = row_ids(data.select_columns([name for name in ("id", "source") if name in data.column_names]))
    most = learned_positions(load_config(asked).get_text_config())
    if most is not None and most <= asked.max_new_tokens:
        raise ValueError(
            f"max_new_tokens={asked.max_new_tokens} leaves no prompt within the target's {most} positions."
        )
    longest = asked.max_prompt_tokens if most is None else min(asked.max_prompt_tokens, most - asked.max_new_tokens)
    directory = Path(asked.output_dir)
    backend, prints = make_backend(asked, how, encoder, state.device)
    directory.mkdir(parents=True, exist_ok=True)
    check_provenance(directory, provenance(asked, how, tokenizer, prints), state.is_main_process)
    if state.is_main_process:
        repair_parts(directory)
    state.wait_for_everyone()
    log = AnswerLog(directory, state.process_index)
    state.wait_for_everyone()  # nobody writes while another still reads
    own = range(state.process_index, len(data), state.num_processes)
    interview = Interview(
        data.select(own),
        [names[place] for place in own],
        encoder,
        log,
        asked.temperatures,
        asked.seed,
        longest,
    )
    tokens = sum(
        answer_all(
            interview,
            backend,
            how.rows_per_batch,
            how.tokens_per_batch,
            asked.max_new_tokens,
            state.is_local_main_process,
        )
    )
    return summary_lines(directory, gather_object([(tokens, interview.skipped, backend.counts)]))


def summary_lines(directory: Path, results: Sequence[tuple[int, Skipped, Counter[str]]]) -> list[str]:
    """Return what to show of the answer tokens, skipped rows and backend's counts of every process."""
    skipped, counts = Skipped(), Counter[str]()
    for _, left_out, counted in results:
        skipped.include(left_out)
        counts += counted
    tokens = sum(written for written, _, _ in results)
    return [
        f"{tokens:,} answer tokens written to {directory} (processes: {len(results)}).",
        *skipped.lines(),
        *(f"  {count} answers or requests: {reason}" for reason, count in counts.items()),
    ]


def make_backend(
    asked: GenerateArguments, how: BackendArguments, encoder: ChatEncoder, device: torch.device
) -> tuple[Backend, dict[str, Any] | None]:
    """Return who answers, and the fingerprint of the target where it is loaded here."""
    if how.endpoint is not None:
        model = how.endpoint_model or asked.target
        key = os.environ.get(how.endpoint_key)
        backend = EndpointBackend(
            how.endpoint, model, encoder, asked.max_new_tokens, asked.seed, how.concurrency, how.retries, key
        )
        return backend, None
    target = load_target(asked, device)
    prints = fingerprint(target)
    ends = sorted(encoder.end_ids)
    return LocalBackend(target, encoder.tokenizer, ends, asked.max_new_tokens, asked.seed, how.speculative), prints


def provenance(asked: GenerateArguments, how: BackendArguments, tokenizer: Any, prints: Any) -> dict[str, Any]:
    """Return what makes a run's answers what they are."""
    return {
        "target": asked.target,
        "target_revision": asked.target_revision,
        "target_commit": commit_of(asked),
        "target_fingerprint": prints,
        "dtype": asked.dtype,
        "backend": how.endpoint or "transformers",
        **({} if how.speculative is None else {"speculative": how.speculative}),
        "data": asked.data,
        "limit": asked.limit,
        "template": hash_of(tokenizer.chat_template),
        "template_kwargs": asked.template_kwargs,
        "temperatures": asked.temperatures,
        **FULL_LAW,
        "seed": asked.seed,
        "max_new_tokens": asked.max_new_tokens,
        "max_prompt_tokens": asked.max_prompt_tokens,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
    }


def check_provenance(directory: Path, made_by: Mapping[str, Any], is_main: bool) -> None:
    """Write what made a run's answers, or compare it with what made those that are there.

    Versions may differ, and so may the commit: whether its weights are the same is the fingerprint's to say.

    Raises:
        ValueError: if the directory holds answers made otherwise, or by a version that did not record how.
    """
    path = directory / PROVENANCE_FILE
    if not path.exists():
        if is_main:
            half = path.with_suffix(".half")  # other processes look at the same time
            half.write_text(json.dumps(made_by, indent=1))
            half.replace(path)
        return
    before = json.loads(path.read_text())
    missing = [name for name in FULL_LAW if name not in before]
    if missing:
        raise ValueError(
            f"{directory} holds answers of a version that did not record {', '.join(missing)}, so the target's "
            "generation config may have set them: give another output directory, or if it sets none of them add "
            f"{', '.join(f'{json.dumps(name)}: {FULL_LAW[name]}' for name in missing)} to {path}."
        )
    changed = [name for name in made_by if name not in NOT_COMPARED and before.get(name) != made_by[name]]
    if changed:
        raise ValueError(
            f"{directory} holds answers made with other settings ({', '.join(changed)}): give another output "
            "directory, or the same settings to go on."
        )
    if before.get("target_commit") not in (None, made_by["target_commit"]):
        logger.warning("%s: earlier answers are of commit %s of the target.", directory, before["target_commit"])
