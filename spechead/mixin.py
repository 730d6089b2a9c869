"""SpeculativeGenerationMixin: `generate(..., speculative=...)` on a transformers model, and how to switch it on.

Input preparation, expansion, processors and criteria stay transformers' own: `generate` hands a decoding loop to
`super().generate(custom_generate=...)`. What that hook would silently drop (streamer, tokenizer) travels in a closure.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from . import hf, support
from .attach import SUPPORT_KEY, Speculation
from .cache import RaggedCache
from .config import SpeculativeConfig
from .context import Context
from .decoding import consumers, prefill, speculative_decode
from .proposers.draft_model import DraftModelProposer
from .row import rows_of_call
from .stats import DecodeStats
from .streamer import check_streamer
from .target import Target


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate(..., return_dict_in_generate=True)` returns: transformers' output, and `stats`."""

    stats: DecodeStats | None = None


class SpeculativeGenerationMixin:
    """Adds `speculative=` to `generate`. Put it before the model class, or use `enable_speculation`."""

    def generate(self, *args: Any, speculative: Any = None, generator: Any = None, **kwargs: Any) -> Any:
        """Generate as transformers does; with `speculative`, drafted and verified, following the same law.

        Args:
            *args: as transformers'.
            speculative: None or False for the untouched path; a method's name, a SpeculativeConfig, or an object with
                `taps` and `propose(context)`.
            generator: one torch.Generator, or a list with one a returned row, for sampling.
            **kwargs: as transformers'.

        Returns:
            Token ids `[B, S]`, or with return_dict_in_generate a SpeculativeOutput whose `stats` is a DecodeStats.

        Raises:
            ValueError: before the first token, for what cannot be honoured.
        """
        if speculative is None or speculative is False:
            extra = {} if generator is None else {"generator": generator}
            return super().generate(*args, **extra, **kwargs)  # type: ignore[misc]  # the model class follows the mixin
        plainly = super().generate  # type: ignore[misc]
        arguments = hf.named_arguments(plainly, args, kwargs)
        streamer = arguments.get("streamer")
        check_streamer(streamer)
        try:
            state = Speculation.of(self)
            configs = (arguments.get("generation_config"), self.generation_config)  # type: ignore[attr-defined]
            support.check_model(self)
            support.check_arguments(arguments, configs)
            # Held back: transformers would hand it the prompt before the loop has checked what it got.
            arguments.pop("streamer", None)
            _bind_stop_strings(arguments, configs)
            proposer, settings = state.proposer(speculative)
            call = _Call(state.target, proposer, settings, generator, streamer, arguments.get("attention_mask"))

            def loop(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Any:
                return call.run(input_ids, **prepared)

            return plainly(custom_generate=loop, **arguments)
        finally:
            if streamer is not None:  # after an error too: a thread that reads from it would wait for ever
                streamer.end()


def _bind_stop_strings(arguments: dict[str, Any], configs: Iterable[Any]) -> None:
    """Turn stop strings into a criterion here: the hook would lose the tokenizer that they need."""
    tokenizer = arguments.pop("tokenizer", None)
    known = (config.stop_strings for config in configs if config is not None and config.stop_strings is not None)
    strings = arguments["stop_strings"] if "stop_strings" in arguments else next(known, None)
    if strings is None:
        return
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r} needs the tokenizer: generate(..., tokenizer=tokenizer).")
    own = arguments.get("stopping_criteria") or []
    arguments["stopping_criteria"] = StoppingCriteriaList([*own, StopStringCriteria(tokenizer, strings)])
    arguments["stop_strings"] = None


@dataclass
class _Call:
    """One call of generate, after transformers has prepared its inputs."""

    target: Target
    proposer: Any
    settings: SpeculativeConfig | None
    generator: Any
    streamer: Any
    mask_given: Tensor | None

    def run(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Decode; returns ids or a SpeculativeOutput."""
        cache = model_kwargs.pop("cache", model_kwargs.pop("past_key_values", None))
        mask = model_kwargs.pop("attention_mask", None)
        pad = generation_config._pad_token_tensor
        pad_token = None if pad is None else int(pad)
        typical = None if self.settings is None else self.settings.typical_acceptance()
        support.check_processors(logits_processor, typical is not None)
        support.check_taps((tap for part in consumers(self.proposer) for tap in part.taps), self.target.num_layers)
        support.check_mask_width(self.mask_given, input_ids)
        pads = support.check_prompt(input_ids, mask, cache)
        support.check_batch(len(input_ids), stopping_criteria, pad_token, self._tiers())
        kinds = ("token_type_ids", "mm_token_type_ids")
        extra = {name: model_kwargs[name] for name in kinds if model_kwargs.get(name) is not None}
        returned = generation_config.return_dict_in_generate
        rows = rows_of_call(input_ids, logits_processor, stopping_criteria, generation_config, self.generator)
        ragged = self.target.new_cache(len(rows), min(generation_config.max_length, input_ids.shape[1] + 4096) + 64)
        if cache is not None and hf.cached_length(cache):
            support.check_layers(cache, self.target.model.config)
            hf.import_cache(cache, ragged)
        context = Context(
            self.target,
            self.proposer,
            input_ids.to(self.target.device),
            pads.to(self.target.device),
            rows,
            ragged,
            typical=typical,
            keep_scores=bool(returned and generation_config.output_scores),
            keep_logits=bool(returned and generation_config.output_logits),
            on_column=None if self.streamer is None else lambda column: self.streamer.put(column.cpu()),
            pad_token=pad_token or 0,
        )
        context.stats.method, context.stats.lossy = self.proposer.name, typical is not None
        context.stats.notes += self.proposer.notes
        mine = cache is not None and (returned or getattr(cache, "_is_user_defined", False))
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        carried = None if cache is None else _carried(cache, input_ids, ragged)
        try:
            copies = generation_config.num_return_sequences or 1
            prefill(context, mask, generation_config.prefill_chunk_size, carried, copies, **extra)
            speculative_decode(context)
        finally:
            if mine and context.stats.prefill_forwards:
                # Rows that ended early hold fewer columns. The next turn feeds again what some row lacks.
                hf.export_cache(ragged, cache, context.pads, int((ragged.lengths + context.pads).min()))
        if mine:
            _carry(cache, context)
        return self._output(context, cache) if returned else self._sequences(context)

    def _tiers(self) -> dict[str, str]:
        tiers = {"target": self.target.verdict.tier}
        for part in consumers(self.proposer):
            if isinstance(part, DraftModelProposer):
                tiers["draft"] = part.draft.verdict.tier
        return tiers

    def _sequences(self, context: Context) -> Tensor:
        return context.ids[:, : max(row.end for row in context.rows)]

    def _output(self, context: Context, cache: Any) -> SpeculativeOutput:
        return SpeculativeOutput(
            sequences=self._sequences(context),
            scores=_by_step([row.scores for row in context.rows]) if context.keep_scores else None,
            logits=_by_step([row.logits for row in context.rows]) if context.keep_logits else None,
            cache=cache,
            stats=context.stats,
        )


CARRIED_KEY = "_spechead_carried"


def _carry(cache: Any, context: Context) -> None:
    """Let the proposer's state travel with the cache, for rows of one length that a second turn can continue."""
    lengths = context.cached
    state = context.proposer.carry(context)
    if state is not None and not bool((context.pads > 0).any()) and bool((lengths == lengths[0]).all()):
        setattr(cache, CARRIED_KEY, (context.ids[:, : int(lengths[0])].clone(), state))


def _carried(cache: Any, ids: Tensor, ragged: RaggedCache) -> Any:
    """Return the state that travelled with a cache, if it is of the very tokens that are cached; it is used once."""
    known, state = cache.__dict__.pop(CARRIED_KEY, (None, None))
    cached = int(ragged.lengths[0])
    same = (
        known is not None
        and known.shape == (len(ids), cached)
        and torch.equal(known, ids[:, :cached].to(known.device))
    )
    return state if same else None


def _by_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Stack the rows' records by new token, `[B, V]` each; rows that had ended hold zeros."""
    blank = torch.zeros_like(rows[0][0])
    longest = max(len(row) for row in rows)
    return tuple(torch.stack([row[t] if t < len(row) else blank for row in rows]) for t in range(longest))


def enable_speculation(
    model: Any,
    *,
    head: Any = None,
    draft_model: Any = None,
    revision: str | None = None,
    tokenizer: Any = None,
    draft_tokenizer: Any = None,
) -> Any:
    """Give a loaded causal LM `generate(..., speculative=...)`.

    Args:
        model: a transformers causal LM, or a PeftModel around one, which is unwrapped.
        head: a head, the path or Hub repo of one, or a list of these; replaces earlier heads.
        draft_model: a smaller causal LM with the same vocabulary, or its path or Hub repo; replaces an earlier one.
        revision: of the head's repo.
        tokenizer: the target's tokenizer, to compare vocabularies with a draft's.
        draft_tokenizer: the draft's tokenizer.

    Returns:
        The same object. Its class is swapped for one of the same name that has the mixin in front.

    Raises:
        ValueError: if the target cannot be speculated on, or head or draft do not fit it.
    """
    hf.warn_if_untested()
    inner = unwrap(model)
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(f"enable_speculation needs a transformers causal LM; got {type(inner).__name__}.")
    known = inner.__dict__.get(SUPPORT_KEY)
    state = Speculation(inner) if known is None else copy.copy(known)  # what is attached stays, should attach() refuse
    state.attach(head, draft_model, revision, tokenizer, draft_tokenizer)
    _ = state.target.verdict
    base = type(inner)
    if not issubclass(base, SpeculativeGenerationMixin):
        inner.__class__ = _speculative_class(base)
    # An instance attribute, as repos with a custom_generate set one, would hide the mixin's.
    inner.__dict__.pop("generate", None)
    inner.__dict__[SUPPORT_KEY] = state
    return model


def disable_speculation(model: Any) -> Any:
    """Undo `enable_speculation`; returns the same object. A class that inherits the mixin itself keeps it."""
    inner = unwrap(model)
    inner.__dict__.pop(SUPPORT_KEY, None)
    base = type(inner).__dict__.get("_spechead_base")
    if base is not None:
        inner.__class__ = base
    return model


def unwrap(model: Any) -> Any:
    """Return the transformers model inside a PeftModel, or the model itself.

    Raises:
        ValueError: if the adapter is prompt learning, whose virtual tokens shift every position.
    """
    if not hasattr(model, "peft_config"):
        return model
    # A model whose adapters are its own (`add_adapter`) is no wrapper, and has no active_peft_config.
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("prompt-learning adapters add virtual tokens to the cache; merge or drop them first.")
    return model.get_base_model() if hasattr(model, "get_base_model") else model


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _speculative_class(base: type[nn.Module]) -> type[nn.Module]:
    """Make, once a base class, the class that enabled models take; name and module stay, so that saving does too."""
    if base not in _CLASSES:
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "_spechead_base": base}
        names |= {"__reduce_ex__": lambda model, _: (_blank, (base,), model.__dict__)}
        _CLASSES[base] = type(base.__name__, (SpeculativeGenerationMixin, base), names)
    return _CLASSES[base]


def _blank(base: type[nn.Module]) -> nn.Module:
    """Make an empty model of an enabled class: pickles find classes by their name, which is the base's."""
    made = _speculative_class(base)
    return made.__new__(made)
