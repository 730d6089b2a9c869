"""Will it fit, and what should be tried: memory of target, cache, draft and buffers, from configs alone.

Called by `spechead plan`; scripts/check_plan.py compares it with measured peaks. The sizes follow the code that runs:
cache buffers of cache.RaggedCache, masks of hf.model_masks, laws of the proposers.
"""

from dataclasses import dataclass

from ..cache import BLOCK
from ..proposers.eagle import CATCH_UP, DEPTH
from ..proposers.growth import BRANCHING, TREE_SIZE
from .footprint import Footprint

SLACK = 64  # slots that generate asks for beyond prompt and answer
LONGEST_START = 4096  # new tokens that are allocated at once
LOOKUP_TOKENS, DRAFT_TOKENS = 8, 5
MEDUSA_NODES = 63
LOGITS_COPIES = 5  # [B, V] in float32: raw, processed, law, coins


@dataclass(frozen=True)
class Workload:
    """The load to plan for.

    Attributes:
        prompt_tokens, max_new_tokens: of the longest row.
        batch_size: rows at once.
        sampled: whether tokens are drawn; drafted laws are kept then.
        overlap: share of the answer that is copied from the prompt, from 0 to 1; None where nobody knows.
    """

    prompt_tokens: int = 512
    max_new_tokens: int = 256
    batch_size: int = 1
    sampled: bool = False
    overlap: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is no load; give at least 1.")
        if self.overlap is not None and not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap={self.overlap} is a share; give a number from 0 to 1.")


@dataclass(frozen=True)
class Draft:
    """What drafts.

    Attributes:
        method: its name.
        model: its sizes; None for prompt lookup.
        nodes: drafted nodes a row.
        depth: of the deepest.
        taps: hidden states of the target that it reads.
        drawn: whether its tokens are drawn from a law when the call samples.
    """

    method: str
    model: Footprint | None
    nodes: int
    depth: int
    taps: int = 0
    drawn: bool = False


@dataclass(frozen=True)
class Part:
    """One line of a plan: what, its bytes, and whether it stays for the whole call or is there at one moment."""

    what: str
    bytes: int
    stays: bool = True


@dataclass(frozen=True)
class Plan:
    """Memory of one method under one load.

    Attributes:
        method: "plain" or a method.
        parts: what it takes.
    """

    method: str
    parts: list[Part]

    @property
    def peak(self) -> int:
        """What stays, and the largest of what comes and goes."""
        moments = [part.bytes for part in self.parts if not part.stays]
        return sum(part.bytes for part in self.parts if part.stays) + max(moments, default=0)


def lookup() -> Draft:
    """Return prompt lookup with its defaults."""
    return Draft("prompt_lookup", None, LOOKUP_TOKENS, LOOKUP_TOKENS)


def draft_model(model: Footprint, tokens: int | None = None) -> Draft:
    """Return a draft model."""
    return Draft("draft_model", model, tokens or DRAFT_TOKENS, tokens or DRAFT_TOKENS, drawn=True)


def eagle(head: Footprint, taps: int, tree_size: int | None = None, depth: int | None = None) -> Draft:
    """Return an EAGLE head with a dynamic tree."""
    return Draft("eagle", head, tree_size or TREE_SIZE, depth or DEPTH, taps)


def medusa(head: Footprint, depth: int, tree_size: int | None = None) -> Draft:
    """Return Medusa heads with their tree."""
    return Draft("medusa", head, tree_size or MEDUSA_NODES, depth, 1)


def plain(target: Footprint, load: Workload) -> Plan:
    """Plan plain generation: transformers' cache grows by a token a step, and is copied while it grows."""
    length = load.prompt_tokens + load.max_new_tokens
    rows, prompt = load.batch_size, load.prompt_tokens
    cache = rows * length * target.cached
    parts = [
        Part("target weights", target.weight_bytes),
        Part(f"KV cache, {rows} x {length} tokens", cache),
        Part("prompt's activations", target.activations(rows * prompt) + target.repeated(rows, prompt), stays=False),
        Part("step's logits", LOGITS_COPIES * 4 * rows * target.vocabulary + cache // target.layers, stays=False),
    ]
    return Plan("plain", parts)


def speculative(target: Footprint, draft: Draft, load: Workload) -> Plan:
    """Plan speculation with one method."""
    rows, prompt = load.batch_size, load.prompt_tokens
    slots = capacity(load, draft.nodes + 1)
    model = draft.model
    parts = [
        Part("target weights", target.weight_bytes),
        Part(f"KV cache, {rows} x {slots} slots", rows * slots * target.cached),
    ]
    if model is not None:
        parts.append(Part("draft weights" if draft.method == "draft_model" else "head weights", model.weight_bytes))
    if model is not None and model.cached:
        own = slots if draft.method != "draft_model" else rounded(prompt + load.max_new_tokens + draft.nodes)
        parts.append(Part(f"KV cache of the draft, {rows} x {own} slots", rows * own * model.cached))
    states = draft.taps * rows * prompt * target.hidden * target.bytes
    prefill = target.activations(rows * prompt) + target.repeated(rows, prompt) + states
    parts.append(Part("prompt's activations", prefill, stays=False))
    if model is not None and model.layers:
        parts.append(Part("draft's first look at the prompt", first_draft(target, draft, load), stays=False))
    parts += step_parts(target, draft, load, slots)
    return Plan(draft.method, parts)


def step_parts(target: Footprint, draft: Draft, load: Workload, slots: int) -> list[Part]:
    """Return what one step takes at its two widest moments: drafting, and scoring the nodes."""
    rows, nodes = load.batch_size, draft.nodes + 1
    width = min(load.prompt_tokens + load.max_new_tokens + nodes, slots)
    laws = 0
    drafting = 0
    if draft.model is not None:
        vocabulary = draft.model.vocabulary
        levels = BRANCHING if draft.method == "eagle" else draft.depth if draft.method == "medusa" else 1
        drafting = 3 * 4 * rows * levels * vocabulary
    if draft.drawn and load.sampled:
        laws = 4 * rows * nodes * target.vocabulary
        drafting += 5 * 4 * rows * draft.depth * target.vocabulary  # one by one, stacked, one-hot, chosen, padded
    mask = rows * nodes * width * target.bytes
    logits = rows * nodes * target.vocabulary * target.bytes
    scoring = (
        laws
        + mask
        + max(
            logits + LOGITS_COPIES * 4 * rows * target.vocabulary,
            target.activations(rows * nodes) + target.repeated(rows, width) + rows * nodes * width * 12,
        )
    )
    return [
        Part("drafting a step", drafting, stays=False),
        Part(f"tree of {nodes} nodes: mask, logits, laws", scoring, stays=False),
    ]


def first_draft(target: Footprint, draft: Draft, load: Workload) -> int:
    """Return what the draft takes when it first sees the prompt; an EAGLE head holds the target's states of it."""
    model = draft.model
    if model is None:
        return 0
    rows, prompt = load.batch_size, load.prompt_tokens
    if draft.method == "draft_model":
        return model.activations(rows * prompt) + model.repeated(rows, prompt)
    states = (
        2 * draft.taps * rows * prompt * target.hidden * target.bytes + 2 * rows * prompt * model.hidden * model.bytes
    )
    chunk = min(prompt, CATCH_UP)
    mask = rows * chunk * prompt * (model.bytes + 1) if rows > 1 else 0
    return states + mask + model.activations(rows * chunk) + model.repeated(rows, prompt)


def capacity(load: Workload, nodes: int) -> int:
    """Return the slots a row of the ragged cache: those of the start, or whole blocks where they are too few."""
    length = load.prompt_tokens + load.max_new_tokens
    start = load.prompt_tokens + min(load.max_new_tokens, LONGEST_START) + SLACK
    return start if length + nodes <= start else rounded(length + nodes)


def rounded(slots: int) -> int:
    """Return slots in whole blocks."""
    return -(-slots // BLOCK) * BLOCK
