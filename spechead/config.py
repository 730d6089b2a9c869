"""SpeculativeConfig: how one call drafts and accepts. Read by the mixin and by the proposers' constructors.

A config names a method and, where a user wants other than the measured defaults, its shape. Fields that a method does
not use must stay None, so that nothing given is silently ignored.
"""

from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, TypeVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from .verify import TypicalAcceptance

Method = Literal["auto", "draft_model", "eagle", "medusa", "prompt_lookup"]
METHODS: tuple[str, ...] = ("auto", "draft_model", "eagle", "medusa", "prompt_lookup")

_USED_BY: dict[str, tuple[str, ...]] = {
    "num_draft_tokens": ("auto", "draft_model", "eagle", "medusa", "prompt_lookup"),
    "tree": ("auto", "eagle", "medusa"),
    "tree_size": ("auto", "eagle", "medusa"),
    "branching": ("auto", "eagle", "medusa"),
    "max_ngram": ("auto", "prompt_lookup"),
}

T = TypeVar("T")


def strictly(cls: type[T]) -> type[T]:
    """Check every field of a dataclass against its annotation; what does not fit is a ValueError.

    The annotations must be types: a module with postponed annotations has strings, which nothing is checked against.
    """
    if any(isinstance(annotation, str) for annotation in cls.__annotations__.values()):
        raise TypeError(f"{cls.__name__} has postponed annotations; drop the __future__ import of its module.")
    checked = strict(cls)
    initialise = checked.__init__

    @wraps(initialise)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            initialise(self, *args, **kwargs)
        except StrictDataclassError as error:
            raise ValueError(f"{cls.__name__}: {' '.join(str(error).split())}") from error

    checked.__init__ = __init__  # type: ignore[method-assign]  # the same signature
    return checked


@strictly
@dataclass
class DraftingConfig:
    """How a drafting model picks tokens.

    Attributes:
        temperature: temperature of the draft's own law; None takes the call's. The draft's law never alters the
            target's, so any value is exact; it only moves the acceptance.
        confidence_threshold: stop drafting a row once a draft model's probability of the token just drawn, or an EAGLE
            head's of its likeliest path so far (of a drawn chain: what was drawn), falls below this. That token or
            level itself is always proposed, but of a dynamic tree only the likeliest node and those whose path has at
            least a `branching`th of this. 0 never stops; None takes the head's measured default, and never stops a
            draft model.
    """

    temperature: float | int | None = None
    confidence_threshold: float | int | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and self.temperature <= 0:
            raise ValueError(f"drafting.temperature={self.temperature} must be above 0; leave it None for the call's.")
        if self.confidence_threshold is not None and not 0 <= self.confidence_threshold < 1:
            raise ValueError(
                f"drafting.confidence_threshold={self.confidence_threshold} must be at least 0 (never stop) "
                "and below 1."
            )


@strictly
@dataclass
class TypicalConfig:
    """Thresholds of typical acceptance (lossy; Cai et al. 2024): p > min(epsilon, delta * exp(-entropy))."""

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not (0 < self.epsilon < 1 and 0 < self.delta <= 1):
            raise ValueError(f"typical acceptance needs 0 < epsilon < 1 and 0 < delta <= 1; got {self}.")


@strictly
@dataclass
class SpeculativeConfig:
    """How `model.generate(speculative=...)` drafts and accepts.

    Attributes:
        method: "auto", "draft_model", "eagle", "medusa" or "prompt_lookup".
        num_draft_tokens: depth to which a chain or tree is drafted, the root excluded; None takes the method's own.
        tree: static tree as paths of ranks, or "chain", "static" or "dynamic"; None takes the head's measured default.
        tree_size: nodes kept of a dynamic tree, the root excluded.
        branching: children tried under each node of a dynamic tree.
        max_ngram: longest n-gram that prompt lookup matches.
        acceptance: "exact" follows the target's law; "typical" is lossy.
        drafting: how a drafting model picks tokens.
        typical: thresholds for acceptance="typical".
    """

    method: Method = "auto"
    num_draft_tokens: int | None = None
    tree: str | list[Any] | tuple[Any, ...] | None = None
    tree_size: int | None = None
    branching: int | None = None
    max_ngram: int | None = None
    acceptance: Literal["exact", "typical"] = "exact"
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    typical: TypicalConfig = field(default_factory=TypicalConfig)

    def __post_init__(self) -> None:
        for name, methods in _USED_BY.items():
            value = getattr(self, name)
            if value is not None and self.method not in methods:
                raise ValueError(f"{name}={value!r} means nothing to method={self.method!r}; it is for {methods}.")
        for name in ("num_draft_tokens", "tree_size", "branching", "max_ngram"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} drafts nothing; give at least 1.")
        if isinstance(self.tree, str) and self.tree not in ("chain", "static", "dynamic"):
            raise ValueError(f"tree={self.tree!r} must be 'chain', 'static', 'dynamic' or a list of paths of ranks.")
        if self.drafting != DraftingConfig() and self.method not in ("auto", "draft_model", "eagle"):
            raise ValueError(f"drafting={self.drafting} means nothing to method={self.method!r}, which draws nothing.")
        if self.typical != TypicalConfig() and self.acceptance != "typical":
            raise ValueError('typical=... is used with acceptance="typical" (lossy) only; set that, or leave it out.')

    def typical_acceptance(self) -> TypicalAcceptance | None:
        """Return the lossy rule when it was asked for, else None."""
        if self.acceptance != "typical":
            return None
        return TypicalAcceptance(self.typical.epsilon, self.typical.delta)
