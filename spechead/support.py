"""What `generate(speculative=...)` honours: one table of every argument of `generate` and field of GenerationConfig.

A contract test fails on an argument or field that the installed transformers has and the table lacks. Whatever is set
and refused raises before the first token: what was given, what is allowed, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedConfig,
    StoppingCriteriaList,
)
from transformers.cache_utils import DummyLayer
from transformers.generation import logits_process

from . import hf
from .sampling import PREFIX_FREE


@dataclass(frozen=True)
class Rule:
    """How one argument or field is treated.

    Attributes:
        remedy: what to do where it is refused; empty when it is always honoured.
        accepts: values that ask for nothing and so are never refused.
    """

    remedy: str = ""
    accepts: tuple[Any, ...] = ()

    def refuses(self, value: Any) -> bool:
        """Whether a value that was set is refused."""
        if not self.remedy:
            return False
        return torch.is_tensor(value) or not any(value is neutral or value == neutral for neutral in self.accepts)


def _honour(*names: str) -> dict[str, Rule]:
    return {name: Rule() for name in names}


def _refuse(remedy: str, *names: str, unless: tuple[Any, ...] = ()) -> dict[str, Rule]:
    return {name: Rule(remedy, (None, False, *unless)) for name in names}


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
    "use_cache": Rule("verification needs the cache; leave use_cache on", (None, True)),
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
    **_refuse(
        "it looks at a whole batch's prompts; use repetition_penalty", "encoder_repetition_penalty", unless=(1.0,)
    ),
    **_refuse(
        "it looks at a whole batch's prompts; use no_repeat_ngram_size", "encoder_no_repeat_ngram_size", unless=(0,)
    ),
    **_refuse(_TRANSFORMERS, "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "is_assistant"),
    **_refuse(_TRANSFORMERS, "speculation_type", "assistant_ensemble_weight"),
}

# transformers' own processors that are functions of (ids, scores) of a row; its others keep state between calls.
ROW_FUNCTIONS = (
    *PREFIX_FREE,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
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
            raise _refusal(name, value, "speculation knows no such argument; drop it, or use speculative=None")
        if rule.refuses(value):
            raise _refusal(name, value, rule.remedy)
    known = [config for config in configs if config is not None]
    for name, rule in FIELDS.items():
        values = [arguments[name]] if name in arguments else [getattr(config, name, None) for config in known]
        value = next((value for value in values if value is not None), None)
        if value is not None and rule.refuses(value):
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


def check_model(model: Any) -> None:
    """Refuse what the model's surroundings ask of every forward.

    Raises:
        ValueError: if ranks must run each forward together, or a prompt-learning adapter feeds virtual tokens.
    """
    if hf.ranks_run_together(model):
        raise _refusal("synced_gpus", True, ARGUMENTS["synced_gpus"].remedy)
    if hf.has_virtual_tokens(model):
        raise ValueError(
            "a prompt-learning adapter cannot be honoured with speculative=...: its virtual tokens shift every "
            "position; use a LoRA adapter, or speculative=None."
        )


def check_taps(taps: Iterable[int], num_layers: int) -> None:
    """Refuse hidden states that the target does not have.

    Raises:
        ValueError: naming the taps and the target's range.
    """
    wrong = sorted(tap for tap in taps if not 0 <= tap <= num_layers)
    if wrong:
        raise ValueError(
            f"taps {wrong} are not hidden states of this target: k in 0..{num_layers - 1} is what enters layer k, "
            f"{num_layers} what leaves the final norm."
        )


def check_mask_width(attention_mask: Tensor | None, ids: Tensor) -> None:
    """Refuse a mask of another width than the prompt, by which generate says that the prompt is only its new end.

    Raises:
        ValueError: naming both widths.
    """
    if attention_mask is not None and attention_mask.shape[-1] != ids.shape[1]:
        raise ValueError(
            f"attention_mask is {attention_mask.shape[-1]} wide and the prompt {ids.shape[1]}; with speculative=... "
            "pass the whole text so far as input_ids, with a mask of its width."
        )


def check_batch(batch: int, criteria: StoppingCriteriaList, pad_token: int | None, tiers: dict[str, str]) -> None:
    """Refuse a batch of several rows that a model cannot run, or whose ended rows nothing can fill.

    Args:
        batch: rows.
        criteria: what may stop a row.
        pad_token: what rows that end early are filled with, or None.
        tiers: "tree" or "chain" of the models involved, by their part ("target", "draft").

    Raises:
        ValueError: if one takes no tree mask, or `pad_token` is None and rows may end at different lengths.
    """
    for part, tier in tiers.items():
        if tier == "chain" and batch > 1:
            raise ValueError(
                f"this {part} takes no tree mask, so a batch of {batch} rows cannot run on it at once; pass one row, "
                f"or load the {part} with attn_implementation='sdpa'."
            )
    apart = any(type(criterion) is not MaxLengthCriteria for criterion in criteria)
    if batch > 1 and pad_token is None and apart:
        raise ValueError(f"the batch's {batch} rows may end at different lengths; pass pad_token_id to fill them.")


def check_prompt(ids: Tensor, attention_mask: Tensor | None, cache: Any) -> Tensor:
    """Refuse prompts, masks and caches that rows of their own lengths cannot stand for; count left pads.

    Args:
        ids: prompts `[B, P]`.
        attention_mask: `[B, P]`, or None where nothing is padded.
        cache: the caller's cache (or the empty one that generate made).

    Returns:
        Left pads `[B]`.

    Raises:
        ValueError: naming what was given and what to do.
    """
    if ids.numel() == 0:
        raise ValueError(f"prompts of shape {tuple(ids.shape)} hold no token; pass at least one row of one token.")
    pads = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
    if attention_mask is not None:
        mask = attention_mask.bool()
        if not bool((attention_mask == mask).all()):
            raise ValueError("attention_mask holds other values than 0 and 1; 1 marks text and 0 left padding.")
        if mask.shape != ids.shape or not bool((mask[:, 1:] >= mask[:, :-1]).all()) or not bool(mask[:, -1].all()):
            raise ValueError(
                f"attention_mask of shape {tuple(attention_mask.shape)} has holes, right padding or another shape "
                f"than the prompt {tuple(ids.shape)}; only left padding is supported: tokenizer.padding_side='left'. "
                "Where no mask is given, one is inferred from pad_token_id: pass the mask if that token is text."
            )
        pads = (~mask).sum(1)
    cached = hf.cached_length(cache) if cache is not None else 0
    if cached and (rows := hf.cached_rows(cache)) != len(ids):
        raise ValueError(
            f"the cache holds {rows} rows and the call {len(ids)} (num_return_sequences counted); pass a cache of as "
            "many rows, such as one that cache.batch_repeat_interleave has repeated."
        )
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
    return pads


def check_layers(cache: DynamicCache, config: PreTrainedConfig) -> None:
    """Refuse a cache some of whose layers hold other tokens than the rest, or that a model of other layers filled.

    Raises:
        ValueError: naming what the layers hold.
    """
    held = [layer.get_seq_length() for layer in cache.layers if type(layer) is not DummyLayer]
    layers = sum(type(layer) is not DummyLayer for layer in DynamicCache(config=config).layers)
    if len(held) != layers or len(set(held)) > 1:
        raise ValueError(
            f"the cache's {len(held)} layers hold {held} tokens, and the model has {layers} layers that cache; pass a "
            "cache that this model filled, all of its layers alike, or none."
        )
