"""The results.json schema, version 1: what was measured, on what, how, and the figures made of it.

bench/timing.py fills it; README, docs and model cards render it. Every class is strict: an unknown or mistyped field
is an error, so that a file of another schema is never half-read. A file is replaced whole at every append, so that an
interrupted run keeps what it had measured.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from .extras import Peak, Sample
from .hardware import Hardware, Versions
from .strict_json import build, read_json, write_json

SCHEMA = 1


@strict
@dataclass
class Model:
    """A target, head or draft: its name, what it is, and the fingerprint that tells it from its namesakes."""

    name: str
    role: str
    kind: str
    parameters: int
    dtype: str
    attention: str | None = None
    revision: str | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)


@strict
@dataclass
class Load:
    """One way of asking: what is the same for all methods that are compared."""

    max_new_tokens: int
    batch_size: int = 1
    temperature: float = 0.0
    repeats: int = 1
    seed: int = 0


@strict
@dataclass
class Difference:
    """The first new token at which a row differs from plain's.

    Attributes:
        position: index among the new tokens.
        plain_token, token: plain's and the method's id there; None where one had ended.
        gap: distance of the two tokens' logits in float32, the larger of the two below the top; None if not computed.
        tolerance: what rounding in the measured dtype explains.
        verdict: "tie" or "bug"; None if not computed.
    """

    position: int
    plain_token: int | None
    token: int | None
    gap: float | None = None
    tolerance: float | None = None
    verdict: str | None = None


@strict
@dataclass
class Record:
    """One timed `generate` call.

    Attributes:
        load: index into the results' loads.
        method: its name.
        prompts: ids of the batch's rows; a later turn of prompt "81" is "81/2".
        group: of the prompts.
        repeat: from 0.
        seconds, seconds_to_first_token: of the call, by the wall clock.
        new_tokens: emitted tokens of all rows, an EOS counted, pads not.
        stats: `DecodeStats.to_dict()`, or the same figures counted from outside; None for plain.
        differences: the rows that differ from plain's; None where a comparison means nothing (sampling).
    """

    load: int
    method: str
    prompts: list[str]
    group: str
    repeat: int
    seconds: float
    seconds_to_first_token: float
    new_tokens: int
    stats: dict[str, Any] | None = None
    differences: list[Difference] | None = None


@strict
@dataclass
class Cell:
    """The figures of one method on one group under one load; `figures.summarise` makes them of the records.

    Attributes:
        load, group, method: which cell; group "mean" is the mean over the groups.
        rows: generations counted, repeats included.
        tokens_per_second: all tokens over all seconds.
        ratio, ratio_low, ratio_high: median over prompts of tokens/s against plain's on the same prompt, and its 95 %
            bootstrap interval; no interval from fewer than three prompts of a group.
        seconds_to_first_token, seconds: median over calls; `seconds` is the whole call, end to end.
        acceptance_length, acceptance_rate, acceptance_rate_by_depth: over all steps, as DecodeStats defines them.
        acceptance_length_by_position: of the steps that began in an answer's first 32 new tokens, the next 32, ...;
            None where none did, as steps of more tokens leap over such a part.
        drafting, verifying, other: shares of the steps' time.
        identical: share of rows equal to plain's; None when sampling.
        ties, bugs: first differences by verdict.
        lossy: whether the method is.
    """

    load: int
    group: str
    method: str
    rows: int
    tokens_per_second: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    seconds_to_first_token: float
    acceptance_length: float | None = None
    acceptance_rate: float | None = None
    acceptance_rate_by_depth: list[float] = field(default_factory=list)
    acceptance_length_by_position: list[float | None] = field(default_factory=list)
    drafting: float | None = None
    verifying: float | None = None
    other: float | None = None
    identical: float | None = None
    ties: int = 0
    bugs: int = 0
    lossy: bool = False
    seconds: float | None = None


@strict
@dataclass
class Results:
    """A results file.

    Attributes:
        schema: SCHEMA.
        created: when the run began, ISO 8601 in UTC.
        command: the command that repeats it.
        versions, hardware: with and on what.
        models: the target first, then heads and drafts.
        methods: name -> the arguments given to `generate`; "plain" first.
        loads: the ways of asking.
        source: where the prompts come from.
        prompts: group -> the ids asked, in order.
        digests: prompt id -> digest of its first turn's token ids (`heads.fingerprint.prompt_digest`).
        template: the chat template's keyword arguments; None without a chat template.
        records: every timed call.
        cells: the figures.
        peaks: peak memory of each method under each load, of a run of its own that is not timed.
        samples: an answer of each method, piece by piece.
        complete: False while prompts are missing.
    """

    created: str
    command: list[str]
    versions: Versions
    hardware: Hardware
    models: list[Model]
    methods: dict[str, dict[str, Any]]
    loads: list[Load]
    source: str
    prompts: dict[str, list[str]]
    digests: dict[str, str] = field(default_factory=dict)
    template: dict[str, Any] | None = None
    records: list[Record] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    complete: bool = False
    schema: int = SCHEMA

    def check(self) -> None:
        """Check what the fields' types cannot say.

        Raises:
            ValueError: naming the first thing that does not fit.
        """
        if self.schema != SCHEMA:
            raise ValueError(f"schema={self.schema} is not {SCHEMA}; read it with the spechead version that wrote it.")
        if next(iter(self.methods), None) != "plain":
            raise ValueError(
                f"the first method must be 'plain', which the others are compared with; got {list(self.methods)}."
            )
        known = {prompt for ids in self.prompts.values() for prompt in ids}
        for record in self.records:
            # A later turn of a prompt is "id/2"; an id may hold a slash of its own.
            asked = {prompt if prompt in known else prompt.rpartition("/")[0] for prompt in record.prompts}
            if record.method not in self.methods or record.group not in self.prompts or not asked <= known:
                raise ValueError(f"a record names a method, group or prompt that the run does not have: {record}.")
        items: list[Record | Cell | Peak | Sample] = [*self.records, *self.cells, *self.peaks, *self.samples]
        for item in items:
            if not 0 <= item.load < len(self.loads):
                raise ValueError(f"load={item.load} is out of range; the run has {len(self.loads)} loads.")
            if item.method not in self.methods:
                raise ValueError(f"a cell names the unknown method {item.method!r}.")

    def same_run(self, other: "Results") -> bool:
        """Whether this run continues `other`: everything but the date, the command and what was measured is equal.

        One prompt at a time, this run may also ask more of each group, those of before among them: batches of several
        would be others then.
        """
        ignored = {"created", "command", "records", "cells", "peaks", "samples", "complete"}
        if all(load.batch_size == 1 for load in self.loads) and other.prompts.keys() <= self.prompts.keys():
            more = all(set(ids) <= set(self.prompts[group]) for group, ids in other.prompts.items())
            ignored |= {"prompts", "digests"} if more and other.digests.items() <= self.digests.items() else set()
        return all(
            getattr(self, item.name) == getattr(other, item.name) for item in fields(self) if item.name not in ignored
        )

    def measured(self, load: int, prompts: Sequence[str]) -> bool:
        """Whether every method has run on these prompts under this load."""
        done = {record.method for record in self.records if record.load == load and record.prompts == list(prompts)}
        return done == set(self.methods)


def save(results: Results, path: Path) -> None:
    """Write a results file."""
    results.check()
    write_json(asdict(results), path)


def load(path: Path) -> Results:
    """Read a results file.

    Raises:
        ValueError: if it is no JSON, of another schema, or holds a field that does not belong or does not fit.
    """
    try:
        raw = read_json(path, SCHEMA)
        if "digests" not in raw:
            raise ValueError(
                "an earlier version wrote it, without digests of the prompts and acceptance by position; measure again"
            )
        results = build(Results, raw)
        results.check()
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{path.name} is no results file: {error}") from error
    return results
