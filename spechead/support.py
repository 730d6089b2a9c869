"""What `generate(speculative=...)` honours: one table of every argument of `generate` and field of GenerationConfig.

A contract test fails on an argument or field that the installed transformers has and the table lacks. Whatever is set
and refused raises before the first token: what was given, what is allowed, what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from . import hf
from .sampling import PREFIX_FREE


@dataclass(frozen=True)
class Rule:
    """How one argument or field is treated.

    Attributes:
        remedy: what to do where it is refused; empty when it is always honoured.
        refused: says of a value that was set whether it is refused.
    """

    remedy: str = ""
    refused: Callable[[Any], bool] = lambda value: False


def _honour(*names: str) -> dict[str, Rule]:
    return {name: Rule() for name in names}


def _refuse(remedy: str, *names: str, unless: Iterable[Any] = ()) -> dict[str, Rule]:
    neutral = (None, False, *unless)
    return {name: Rule(remedy, lambda value: not any(value is n or value == n for n in neutral)) for name in names}


_BEAMS = "speculation follows one sequence a row; use num_beams=1, or speculative=None"
_TRANSFORMERS = "that is transformers' own speculation; use either it or speculative=..., not both"
_INPUTS = "only token ids can be fed; pass input_ids, or speculative=None"

ARGUMENTS: dict[str, Rule] = {
    **_honour("inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
    **_honour("streamer", "input_ids", "attention_mask", "cache", "past_key_values", "tokenizer", "token_type_ids"),
    **_honour("mm_token_type_ids"),
    **_refuse("ranks could accept different lengths; use synced_gpus=False", "synced_gpus"),
    **_refuse(_TRANSFORMERS, "assistant_model", "assistant_tokenizer"),
    **_refuse("guidance needs two passes a token; use speculative=None", "negative_prompt_ids"),
    **_refuse("guidance needs two passes a token; use speculative=None", "negative_prompt_attention_mask"),
    **_refuse("speculative=... is a decoding loop of its own; drop one of the two", "custom_generate"),
    **_refuse("positions follow from the attention mask; leave position_ids out", "position_ids"),
    **_refuse(_INPUTS, "inputs_embeds", "pixel_values", "pixel_values_videos", "input_features", "encoder_outputs"),
    **_refuse("the loop asks for the logits it needs; leave it out", "logits_to_keep"),
}

FIELDS: dict[str, Rule] = {
    **_honour("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
    **_honour("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff"),
    **_honour("eta_cutoff", "repetition_penalty", "bad_words_ids", "no_repeat_ngram_size", "sequence_bias"),
    **_honour("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    **_honour("exponential_decay_length_penalty", "renormalize_logits", "remove_invalid_values"),
    **_honour("num_return_sequences", "output_scores", "output_logits", "return_dict_in_generate"),
    **_honour("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "prefill_chunk_size"),
    # Without effect on plain greedy search and sampling too, where no beams, other drafts or compiled caches are on:
    **_honour("length_penalty", "early_stopping", "compile_config", "disable_compile", "max_cache_len", "low_memory"),
    **_honour("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    **_honour("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
    "use_cache": Rule("verification needs the cache; leave use_cache on", lambda value: value is False),
    **_refuse(_BEAMS, "num_beams", "num_beam_groups", unless=(1,)),
    **_refuse(_BEAMS, "diversity_penalty", unless=(0.0,)),
    **_refuse(_BEAMS, "constraints", "force_words_ids", "penalty_alpha", "dola_layers"),
    **_refuse("guidance needs two passes a token; use speculative=None", "guidance_scale", unless=(1, 1.0)),
    **_refuse("watermarks keep state between tokens; use speculative=None", "watermarking_config"),
    **_refuse("the loop has a cache of its own; leave it out", "cache_implementation", unless=("dynamic",)),
    **_refuse("the loop has a cache of its own; leave it out", "cache_config", "continuous_batching_config"),
    **_refuse("rewriting the prompt's last token is not supported; use speculative=None", "token_healing"),
    **_refuse("a step's rows are tree nodes, not tokens; use speculative=None", "output_attentions"),
    **_refuse("a step's rows are tree nodes, not tokens; use speculative=None", "output_hidden_states"),
    **_refuse("a prompt's encoder penalties are not row-wise; use repetition_penalty", "encoder_repetition_penalty", unless=(1.0,)),
    **_refuse("use no_repeat_ngram_size", "encoder_no_repeat_ngram_size", unless=(0,)),
    **_refuse(_TRANSFORMERS, "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "is_assistant"),
    **_refuse(_TRANSFORMERS, "speculation_type", "assistant_ensemble_weight"),
}

# transformers' own processors that are functions of (ids, scores) of a row; its others keep state between calls.
ROW_FUNCTIONS = (
    *PREFIX_FREE,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.TopHLogitsWarper,
)


def _refusal(name: str, value: Any, remedy: str) -> ValueError:
    shown = f"a tensor of shape {tuple(value.shape)}" if torch.is_tensor(value) else repr(value)
    return ValueError(f"{name}={shown[:200]} cannot be honoured with speculative=...: {remedy}.")


def check_arguments(arguments: dict[str, Any], configs: Iterable[Any]) -> None:
    """Refuse what the call or its generation configs ask for and speculation cannot honour.

    Args:
        arguments: everything passed to `generate`, by name, `speculative` and `generator` left out.
        configs: the generation configs in force, the strongest first; a call's arguments are stronger than all.

    Raises:
        ValueError: naming the argument, its value and the remedy.
    """
    for name, value in arguments.items():
        if value is None or name in FIELDS:
            continue
        rule = ARGUMENTS.get(name)
        if rule is None:
            raise _refusal(name, value, "it is not an argument that speculation knows; drop it, or use speculative=None")
        if rule.refused(value):
            raise _refusal(name, value, rule.remedy)
    known = [config for config in configs if config is not None]
    for name, rule in FIELDS.items():
        values = [arguments[name]] if name in arguments else [getattr(config, name, None) for config in known]
        value = next((value for value in values if value is not None), None)
        if value is not None and rule.refused(value):
            raise _refusal(name, value, rule.remedy)


def check_processors(processors: LogitsProcessorList, lossy: bool) -> None:
    """Refuse processors that are not functions of (ids, scores) of one row.

    Raises:
        ValueError: naming the processor.
    """
    for processor in processors:
        kind = type(processor)
        if kind.__module__ == logits_process.__name__ and kind not in ROW_FUNCTIONS:
            remedy = "it keeps state between calls or rows; use speculative=None"
            raise ValueError(f"{kind.__name__} cannot be honoured with speculative=...: {remedy}.")
        if lossy and kind not in PREFIX_FREE:
            raise ValueError(
                f"{kind.__name__} reads the text so far, which acceptance='typical' (lossy) cannot give it for every "
                "node of a tree; use acceptance='exact', or drop the processor."
            )


def check_prompt(ids: Tensor, attention_mask: Tensor | None, cache: Any, tier: str, pad_token: int | None) -> Tensor:
    """Refuse prompts, masks and caches that rows of their own lengths cannot stand for; count left pads.

    Args:
        ids: prompts `[B, P]`.
        attention_mask: `[B, P]`, or None where nothing is padded.
        cache: the caller's cache (or the empty one that generate made).
        tier: "tree" or "chain", from the target's probe.
        pad_token: what finished rows are filled with.

    Returns:
        Left pads `[B]`.

    Raises:
        ValueError: naming what was given and what to do.
    """
    pads = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
    if attention_mask is not None:
        mask = attention_mask.bool()
        if mask.shape != ids.shape or not bool((mask[:, 1:] >= mask[:, :-1]).all()) or not bool(mask[:, -1].all()):
            raise ValueError(
                f"attention_mask of shape {tuple(attention_mask.shape)} has holes, right padding or another shape than "
                f"the prompt {tuple(ids.shape)}; only left padding is supported: tokenizer.padding_side='left'."
            )
        pads = (~mask).sum(1)
    cached = hf.cached_length(cache) if cache is not None else 0
    if cached > ids.shape[1] - 1:
        raise ValueError(
            f"the cache holds {cached} tokens and the prompt {ids.shape[1]}; with speculative=... pass the whole "
            "text so far as input_ids, at least one token longer than what is cached."
        )
    if cached and bool((pads > 0).any()):
        raise ValueError(
            "a cache of a left-padded batch has holes and cannot be continued with speculative=...; continue its rows "
            "one by one, or pass no cache."
        )
    if tier == "chain" and len(ids) > 1:
        raise ValueError(
            f"this target takes no tree mask, so a batch of {len(ids)} rows cannot be verified at once; pass one row, "
            "or load the target with attn_implementation='sdpa'."
        )
    if len(ids) > 1 and pad_token is None:
        raise ValueError(f"a batch of {len(ids)} rows may end at different lengths; pass pad_token_id to fill them.")
    return pads
