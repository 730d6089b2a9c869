"""The certificate of `spechead verify`, version 1: what was checked on this target and head, and what came out.

lossless.py fills it, cli/verify.py shows and writes it. Every class is strict: an unknown or mistyped field is an
error. A certificate passes when no fault was found; a lossy method gets a measured distance instead.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from .results import Difference, Hardware, Model, Versions
from .strict_json import build, read_json

SCHEMA = 1


@strict
@dataclass
class CheckSettings:
    """How much is checked.

    Attributes:
        max_new_tokens: greedy tokens a prompt.
        batch_sizes: rows of the greedy batches; above 1 rows are left-padded to one width.
        temperature, top_k: of the sampled check; a small top_k keeps the joint law of several tokens small.
        tokens: how many first tokens the joint law covers.
        significance: chance that an exact sampler fails a test.
        effect_size: Cohen's w that must be found, with probability `power`.
        power: see effect_size.
        law_prompts: prompts whose law is sampled, short ones whose first token is uncertain.
        rows: rows sampled at once.
        steps: steps whose nodes are computed again.
        seed: of all sampling.
    """

    max_new_tokens: int = 64
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4])
    temperature: float = 1.2
    top_k: int = 4
    tokens: int = 3
    significance: float = 1e-3
    effect_size: float = 0.15
    power: float = 0.95
    law_prompts: int = 2
    rows: int = 64
    steps: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "tokens", "law_prompts", "rows", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} checks nothing; give at least 1.")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes={self.batch_sizes} must hold sizes of at least 1.")
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} samples nothing; give more than 0.")
        if self.tokens > 4 or self.top_k**self.tokens > 4096:
            raise ValueError(
                f"{self.tokens} tokens of top_k={self.top_k} have {self.top_k**self.tokens} outcomes; at most 4 "
                "tokens and 4096 outcomes can be tested, so lower one of them."
            )


@strict
@dataclass
class Fault:
    """A named fault and what shows it."""

    name: str
    evidence: str


@strict
@dataclass
class GreedyCheck:
    """Greedy outputs against plain `generate`.

    Attributes:
        batch_size: rows at once.
        rows, tokens: compared.
        identical: rows that are plain's token for token.
        ties, bugs: first differences by verdict.
        near_ties: greedy decisions that rounding may turn: float32 gaps of the two best tokens within the bound.
        drafted_tokens, kept_tokens: a check in which nothing was drafted says nothing.
        bound: the largest distance that counts as a tie, in logits.
        bound_source: where the bound comes from.
        differences: the first difference of every row that has one.
    """

    batch_size: int
    rows: int
    tokens: int
    identical: int
    ties: int
    bugs: int
    near_ties: int
    drafted_tokens: int
    kept_tokens: int
    bound: float
    bound_source: str
    differences: list[Difference] = field(default_factory=list)


@strict
@dataclass
class TreeCheck:
    """Logits of drafted nodes against plain forwards over the same text.

    Attributes:
        steps, nodes: compared.
        worst, bound: largest difference of a logit, and what rounding explains (three times the distance of plain's
            own two ways, or a floor).
        changed: nodes that were changed to see whether others, which must not see them, move.
        moved, moved_bound: how far they moved, and what rounding explains.
        laws: laws compared with the call's processors over the same logits.
    """

    steps: int
    nodes: int
    worst: float
    bound: float
    changed: int
    moved: float
    moved_bound: float
    laws: int


@strict
@dataclass
class LawCheck:
    """Chi-square of the first sampled tokens against the target's exact joint law.

    Attributes:
        prompts: ids of the prompts.
        tokens: of the joint law.
        samples: drawn, half of them with drafts as deep as the method's, half with room for one drafted token.
        cells, degrees: after merging outcomes expected fewer than five times.
        statistic, p_value: of all prompts together.
        significance, effect_size, power: at these samples a law that is off by the effect size fails so often.
        rounding: effect size by which plain's own two ways of computing the law differ; allowed for.
        impossible: sampled outcomes to which the law gives nothing, ties at the edge of top-k left out.
        drafted_tokens: drafted in these calls; without any, the samples show nothing.
    """

    prompts: list[str]
    tokens: int
    samples: int
    cells: int
    degrees: int
    statistic: float
    p_value: float
    significance: float
    effect_size: float
    power: float
    rounding: float
    impossible: int
    drafted_tokens: int


@strict
@dataclass
class DrawCheck:
    """Where single tokens lie in the laws they should follow, at every depth: uniform, if they do.

    Attributes:
        what: which tokens.
        tokens: how many.
        p_value: of uniformity; 1 where too few tokens say nothing.
        impossible: tokens without any mass in their law.
    """

    what: str
    tokens: int
    p_value: float
    impossible: int


@strict
@dataclass
class Distance:
    """Total variation between a lossy method's first tokens and the target's law.

    Attributes:
        prompts, tokens, samples: of the joint law.
        total_variation: measured; biased upwards by the sampling itself.
        low, high: interval of the true distance, at `confidence`.
        exact: what an exact sampler of as many samples shows at most, on average.
    """

    prompts: list[str]
    tokens: int
    samples: int
    total_variation: float
    low: float
    high: float
    exact: float
    confidence: float = 0.95


@strict
@dataclass
class MethodCheck:
    """All that was found about one method.

    It passes when there is no fault; a lossy one neither passes nor fails (`passed` is None) but has a distance.
    """

    method: str
    arguments: dict[str, Any]
    lossy: bool
    passed: bool | None
    greedy: list[GreedyCheck] = field(default_factory=list)
    trees: TreeCheck | None = None
    law: LawCheck | None = None
    draws: list[DrawCheck] = field(default_factory=list)
    distance: Distance | None = None
    faults: list[Fault] = field(default_factory=list)


@strict
@dataclass
class Certificate:
    """A certificate file.

    Attributes:
        created: ISO 8601 in UTC.
        command: the command that repeats it.
        versions, hardware: with and on what.
        models: the target first, then heads and drafts, with fingerprints.
        source, prompts: where prompts come from, and group -> the ids asked.
        template: the chat template's keyword arguments.
        settings: how much was checked.
        methods: what was found.
        passed: whether every method passed; None where nothing failed and a lossy one was measured.
        schema: SCHEMA.
    """

    created: str
    command: list[str]
    versions: Versions
    hardware: Hardware
    models: list[Model]
    source: str
    prompts: dict[str, list[str]]
    settings: CheckSettings
    methods: list[MethodCheck]
    passed: bool | None
    template: dict[str, Any] | None = None
    schema: int = SCHEMA


def load(path: Path) -> Certificate:
    """Read a certificate file.

    Raises:
        ValueError: if it is no JSON, of another schema, or holds a field that does not belong or does not fit.
    """
    try:
        raw = read_json(path, SCHEMA)
        certificate = build(Certificate, raw)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ValueError(f"{path.name} is no certificate: {error}") from error
    return certificate
