"""Speculation: what enable_speculation attaches to a model: its Target, heads, draft, and how a call gets a proposer.

Lives in the model's `__dict__`, outside its module tree, so that state dict, saving and parameter counts stay the
target's own.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, cast

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from .config import METHODS, DraftingConfig, Method, SpeculativeConfig
from .heads.base import Head
from .heads.load import load_head
from .heads.medusa import MedusaHeads
from .proposers.auto import AutoProposer
from .proposers.base import BaseProposer, WrappedProposer
from .proposers.draft_model import DraftModelProposer
from .proposers.eagle import EagleProposer
from .proposers.medusa import MedusaProposer
from .proposers.prompt_lookup import PromptLookupProposer
from .proposers.vocabulary import shared_vocabulary
from .target import Target

logger = logging.get_logger(__name__)

SUPPORT_KEY = "_spechead"


class Speculation:
    """Heads and draft of one target.

    Args:
        model: the target.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.target = Target(model)
        self.heads: list[Any] = []
        self.draft: Target | None = None
        self.shared = self.target.vocab_size

    @classmethod
    def of(cls, model: Any) -> Speculation:
        """Return what is attached to a model; a class that inherits the mixin gets it at its first use."""
        known: Speculation | None = model.__dict__.get(SUPPORT_KEY)
        if known is None:
            known = model.__dict__[SUPPORT_KEY] = cls(model)
        return known

    def attach(self, head: Any, draft_model: Any, revision: str | None, tokenizer: Any, draft_tokenizer: Any) -> None:
        """Load and check heads and draft; what is given replaces what was attached, what is None stays.

        Raises:
            ValueError: if the draft's vocabulary, or a head, is another target's.
        """
        if head is not None:
            given = list(head) if isinstance(head, (list, tuple)) else [head]
            if not given:
                raise ValueError("head=[] names no head; leave it out to keep those attached.")
            self.heads = [self._load_head(one, revision) for one in given]
        if draft_model is not None:
            self._attach_draft(draft_model, tokenizer, draft_tokenizer)

    def _load_head(self, head: Any, revision: str | None) -> Head:
        if isinstance(head, Head):
            return head.bind(self.target.model).eval()
        if not isinstance(head, (str, os.PathLike)):
            raise ValueError(f"head={type(head).__name__} is no head; give a head, or the repo or directory of one.")
        return load_head(str(head), self.target.model, revision=revision).eval()

    def _attach_draft(self, draft_model: Any, tokenizer: Any, draft_tokenizer: Any) -> None:
        if isinstance(draft_model, (str, os.PathLike)):
            name = str(draft_model)
            draft_model = AutoModelForCausalLM.from_pretrained(name, dtype=self.target.dtype)
            draft_model.to(self.target.device)
            draft_tokenizer = draft_tokenizer or AutoTokenizer.from_pretrained(name)
        if not isinstance(draft_model, PreTrainedModel):
            raise ValueError(
                f"draft_model={type(draft_model).__name__} is no causal LM; give a model, repo or directory."
            )
        if draft_model is self.target.model:
            raise ValueError("draft_model is the target itself; pass a smaller model (or a copy, to test).")
        self.draft = Target(draft_model)
        _ = self.draft.verdict
        self.shared = shared_vocabulary(self.target.vocab_size, self.draft.vocab_size, tokenizer, draft_tokenizer)

    def proposer(self, speculative: Any) -> tuple[BaseProposer, SpeculativeConfig | None]:
        """Make the proposer of one call.

        Args:
            speculative: a method's name, a SpeculativeConfig, or a proposer.

        Raises:
            ValueError: if the method is unknown, or what it needs is not attached.
        """
        if isinstance(speculative, str):
            if speculative not in METHODS:
                raise ValueError(f"speculative={speculative!r} must be one of {', '.join(METHODS)}, or a proposer.")
            speculative = SpeculativeConfig(method=cast(Method, speculative))
        if isinstance(speculative, SpeculativeConfig):
            return self._by_method(speculative), speculative
        if speculative is True:
            raise ValueError(f"speculative=True names no method; give one of {', '.join(METHODS)}.")
        return speculative if isinstance(speculative, BaseProposer) else WrappedProposer(speculative), None

    def _by_method(self, config: SpeculativeConfig) -> BaseProposer:
        if config.method == "prompt_lookup":
            return PromptLookupProposer(config.num_draft_tokens or 8, config.max_ngram or 3)
        if config.method == "draft_model":
            if self.draft is None:
                raise ValueError(
                    'speculative="draft_model" needs a draft: enable_speculation(model, draft_model="<repo or path>").'
                )
            return DraftModelProposer(self.draft, config.num_draft_tokens or 5, self.shared, config.drafting)
        if config.method == "auto":
            return self._auto(config)
        medusa = config.method == "medusa"
        head = next(iter(self._heads(medusa)), None)
        if head is None:
            recipe = "train_medusa" if medusa else "train_eagle"
            raise ValueError(
                f'speculative="{config.method}" needs a head. Train one: `accelerate launch recipes/{recipe}.py '
                '--config recipes/configs/<target>.yaml`; load it: enable_speculation(model, head="<repo or path>").'
            )
        return self._with_head(head, config, medusa)

    def _heads(self, medusa: bool) -> list[Head]:
        return [head for head in reversed(self.heads) if isinstance(head, MedusaHeads) == medusa]

    def _auto(self, config: SpeculativeConfig) -> BaseProposer:
        """Prompt lookup beside the strongest drafting attached: an EAGLE head, Medusa heads, a draft, or none."""
        copied = {} if config.num_draft_tokens is None else {"num_draft_tokens": config.num_draft_tokens}
        lookup = PromptLookupProposer(max_ngram=config.max_ngram or 3, **copied)
        ordered = [*self._heads(medusa=False), *self._heads(medusa=True)]
        if ordered:
            head = ordered[0]
            return AutoProposer(lookup, self._with_head(head, config, isinstance(head, MedusaHeads)))
        for name in ("tree", "tree_size", "branching"):
            if getattr(config, name) is not None:
                raise ValueError(
                    f"{name}={getattr(config, name)!r} is for a head, and none is attached to this model."
                )
        if self.draft is None and config.drafting != DraftingConfig():
            raise ValueError(f"drafting={config.drafting} is for a head or draft model, and none is attached.")
        if self.draft is not None:
            depth = config.num_draft_tokens or 5
            return AutoProposer(lookup, DraftModelProposer(self.draft, depth, self.shared, config.drafting))
        return AutoProposer(lookup)

    def _with_head(self, head: Any, config: SpeculativeConfig, medusa: bool) -> BaseProposer:
        head.bind(self.target.model)  # the target may have been moved or cast since
        best = head.config
        tree: Any = config.tree or best.tree or ("static" if medusa else "dynamic")
        if config.branching is not None and tree != "dynamic":
            raise ValueError(f"branching={config.branching} is for tree='dynamic'; this call drafts tree={tree!r}.")
        notes: list[str] = []
        if self.target.verdict.tier == "chain" and tree != "chain":
            if config.tree is not None:
                raise ValueError(
                    f"tree={config.tree!r} cannot be verified on this target ({self.target.verdict.reason}); use "
                    'tree="chain", or load the target with attn_implementation="sdpa".'
                )
            tree = "chain"
            notes.append(f"drafted chains instead of trees: {self.target.verdict.reason}")
            logger.warning_once(f"{config.method}: {notes[0]}")
        # Best settings were measured with the head's own tree; a caller's paths are as deep and wide as given.
        own = config.tree is None or isinstance(config.tree, str)
        names = ("num_draft_tokens", "tree_size", "branching")
        sizes = {name: getattr(config, name) or (getattr(best, name) if own else None) for name in names}
        given = {name: value for name, value in sizes.items() if value is not None}
        if medusa:
            if config.drafting != DraftingConfig():
                raise ValueError(f"drafting={config.drafting} means nothing to Medusa heads, which draw nothing.")
            proposer: BaseProposer = MedusaProposer(head, tree=tree, **given)
        else:
            drafting = config.drafting
            if drafting.confidence_threshold is None and tree in ("chain", "dynamic"):
                drafting = replace(drafting, confidence_threshold=best.confidence_threshold)
            proposer = EagleProposer(head, tree=tree, drafting=drafting, **given)
        proposer.notes = notes
        return proposer
