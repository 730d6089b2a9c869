"""From the names on a command line to the methods that bench/timing.py compares."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..attach import Speculation
from ..bench.measure import Method, twin
from ..bench.results import Model
from ..bench.run import describe_model
from ..bench.timing import PLAIN
from ..config import METHODS, SpeculativeConfig
from ..heads.base import Head
from ..heads.medusa import MedusaHeads
from ..mixin import disable_speculation, enable_speculation
from ..proposers.base import BaseProposer
from ..proposers.prompt_lookup import PromptLookupProposer

NO_DRAFT = "no_draft"  # the same loop without a draft: what it costs, or saves, beside plain generate


@dataclass
class Comparison:
    """What a run compares.

    Attributes:
        methods: plain first, on an untouched instance; the others on a twin that shares its weights.
        models: the target, heads and draft, described for the results file.
    """

    methods: list[Method]
    models: list[Model]


def assemble(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    names: Sequence[str] | None = None,
    heads: Sequence[str] | None = None,
    draft_model: str | None = None,
    num_draft_tokens: Sequence[int] | None = None,
    with_transformers: bool = False,
) -> Comparison:
    """Attach what was given to a twin of the target, and list the methods.

    Args:
        target: stays untouched.
        tokenizer: the target's.
        name: the target's, for the results file.
        names: methods to compare with plain, "eagle:chain" for one with another tree than the head's own; None takes
            prompt lookup and every method that was given what it needs.
        heads: repo ids or directories of heads.
        draft_model: repo id or directory of a draft model.
        num_draft_tokens: tokens drafted a step; several make a method of each; None is each method's own.
        with_transformers: add transformers' own prompt lookup, and its assisted generation where there is a draft.

    Raises:
        ValueError: if a method is unknown, or lacks its head or draft.
    """
    enabled = enable_speculation(
        twin(target), head=list(heads or ()) or None, draft_model=draft_model, tokenizer=tokenizer
    )
    attached = Speculation.of(enabled)
    models = [describe_model(target, "target", name)]
    models += [describe_model(head, "head", path) for head, path in zip(attached.heads, heads or (), strict=True)]
    if attached.draft is not None:
        models.append(describe_model(attached.draft.model, "draft", draft_model))
    called = list(zip(attached.heads, short_names(heads or ()) if heads else (), strict=True))
    methods = [Method(PLAIN, target)]
    for method in names or available(attached):
        if method == NO_DRAFT:
            shown = {"speculative": {"method": NO_DRAFT}}
            methods.append(Method(NO_DRAFT, enabled, {"speculative": BaseProposer()}, shown))
            continue
        methods += variants(method, attached, called, num_draft_tokens)
    if with_transformers:
        methods += transformers_own(target, draft_model, next(iter(num_draft_tokens or ()), None))
    return Comparison(methods, models)


def variants(
    asked: str, attached: Speculation, heads: Sequence[tuple[Head, str]], num_draft_tokens: Sequence[int] | None
) -> list[Method]:
    """Return one method for each draft length, and for each head where several can do it.

    Args:
        asked: a method's name, or "name:tree" for another tree than the head's own.
        attached: to the model that all variants of one head share.
        heads: every head with its short name.
        num_draft_tokens: as in `assemble`.

    Raises:
        ValueError: if the method is unknown, or lacks its head or draft.
    """
    name, colon, tree = asked.partition(":")
    if name not in METHODS:
        raise ValueError(
            f"{asked!r} is no method; there are {', '.join((*METHODS, NO_DRAFT))}, and with a tree of another kind "
            "eagle:chain, eagle:static, eagle:dynamic, medusa:chain, medusa:static, "
            "medusa:dynamic."
        )
    able = [
        each
        for each in heads
        if name in ("eagle", "medusa") and isinstance(each[0], MedusaHeads) == (name == "medusa")
    ]
    lengths: Sequence[int | None] = num_draft_tokens or [None]
    found = []
    for head, called in able if len(able) > 1 else [(None, "")]:
        model = attached.target.model
        if head is not None:
            model = enable_speculation(disable_speculation(twin(model)), head=head)
        for length in lengths:
            config = SpeculativeConfig(method=name, num_draft_tokens=length, tree=tree if colon else None)  # type: ignore[arg-type]  # checked
            Speculation.of(model).proposer(config)  # refuses here what would fail after the first prompts
            described = {"method": name, "num_draft_tokens": length}
            described |= ({"tree": tree} if tree else {}) | ({"head": called} if called else {})
            parts = [name, tree, called, f"K={length}" if len(num_draft_tokens or ()) > 1 else ""]
            label = " ".join(part for part in parts if part)
            found.append(Method(label, model, {"speculative": config}, {"speculative": described}))
    return found


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last part of each directory or repo id, with as many parts before it as tell them apart.

    Raises:
        ValueError: if one is given twice.
    """
    parts = [(Path(path).resolve() if Path(path).exists() else Path(path)).parts for path in paths]
    for length in range(1, 1 + max(map(len, parts), default=0)):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"a head is given twice: {', '.join(paths)}; give each once.")


def available(attached: Speculation) -> list[str]:
    """Return prompt lookup, and the methods whose head or draft is attached."""
    medusa = {isinstance(head, MedusaHeads) for head in attached.heads}
    names = ["prompt_lookup"]
    names += ["medusa"] if True in medusa else []
    names += ["eagle"] if False in medusa else []
    return names + (["draft_model"] if attached.draft is not None else [])


def transformers_own(target: PreTrainedModel, draft_model: str | None, num_draft_tokens: int | None) -> list[Method]:
    """Return transformers' own speculation with the same draft length, to compare with."""
    count = num_draft_tokens or PromptLookupProposer().num_draft_tokens
    arguments = {"prompt_lookup_num_tokens": count}
    methods = [Method("transformers_prompt_lookup", target, arguments, arguments)]
    if draft_model is not None:
        draft = AutoModelForCausalLM.from_pretrained(draft_model, dtype=target.dtype).to(target.device)
        fixed = {"num_assistant_tokens": count, "num_assistant_tokens_schedule": "constant"}
        draft.generation_config.update(**fixed, assistant_confidence_threshold=0.0)
        described = {"assistant_model": draft_model, **fixed}
        methods.append(Method("transformers_draft_model", target, {"assistant_model": draft}, described))
    return methods
