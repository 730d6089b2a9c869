"""What `generate(speculative=...)` refuses: before the first token, by name, with the value and what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, QuantizedCache, StaticCache
from transformers.generation import CompileConfig, ContinuousBatchingConfig, WatermarkingConfig
from transformers.generation.logits_process import (
    ClassifierFreeGuidanceLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    TopHLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from spechead import SpeculativeConfig, enable_speculation, support
from spechead.hf import ranks_run_together
from tests.tiny import PAD, fresh_model, left_padded, prompt_ids, tiny_model

NEW = 12


@pytest.fixture(scope="module")
def model() -> Any:
    """A target that also drafts for itself; not to be modified."""
    return enable_speculation(fresh_model("llama"), draft_model=tiny_model("llama"))


class Silent(BaseStreamer):
    """A streamer that must not get a token."""

    def put(self, value: Tensor) -> None:
        pytest.fail(f"the streamer got {value.tolist()}")

    def end(self) -> None:
        """Being let go is allowed."""


def refuses(model: Any, match: str, **settings: Any) -> None:
    """Assert that a call raises this before any forward of the target and before the streamer gets the prompt."""
    forwards: list[Any] = []
    hook = model.register_forward_pre_hook(lambda module, args: forwards.append(args))
    inputs = {"inputs": prompt_ids()} if "input_ids" not in settings and "inputs_embeds" not in settings else {}
    streamer = {} if "streamer" in settings else {"streamer": Silent()}
    try:
        with pytest.raises(ValueError, match=match):
            model.generate(**(inputs | {"max_new_tokens": NEW, "speculative": "prompt_lookup"} | streamer | settings))
    finally:
        hook.remove()
    assert forwards == []


BEAMS = "use num_beams=1"
OTHERS = "transformers' own speculation; use either it or speculative"
GUIDANCE = "two passes a token"
INPUTS = "only token ids can be fed"
CACHE = "the loop has a cache of its own"
NODES = "rows are tree nodes, not tokens"

ARGUMENTS: dict[str, tuple[Any, str, str]] = {
    "synced_gpus": (True, "True", "ranks could accept different lengths"),
    "assistant_model": (tiny_model("llama"), "LlamaForCausalLM", OTHERS),
    "assistant_tokenizer": ("a tokenizer", "a tokenizer", OTHERS),
    "negative_prompt_ids": (prompt_ids(), r"shape \(1, 12\)", GUIDANCE),
    "negative_prompt_attention_mask": (torch.ones(1, 12), r"shape \(1, 12\)", GUIDANCE),
    "custom_generate": ("some/repo", "some/repo", "decoding loop of its own"),
    "position_ids": (torch.arange(12)[None], r"shape \(1, 12\)", "positions follow from the attention mask"),
    "inputs_embeds": (torch.zeros(1, 12, 32), r"shape \(1, 12, 32\)", INPUTS),
    "pixel_values": (torch.zeros(1, 3, 8, 8), r"shape \(1, 3, 8, 8\)", INPUTS),
    "pixel_values_videos": (torch.zeros(1, 3, 8, 8), r"shape \(1, 3, 8, 8\)", INPUTS),
    "input_features": (torch.zeros(1, 8, 8), r"shape \(1, 8, 8\)", INPUTS),
    "encoder_outputs": ((torch.zeros(1, 4, 32),), "tensor", INPUTS),
    "logits_to_keep": (3, "3", "asks for the logits it needs"),
}

FIELDS: dict[str, tuple[Any, str, str]] = {
    "use_cache": (False, "False", "verification needs the cache"),
    "num_beams": (2, "2", BEAMS),
    "num_beam_groups": (2, "2", BEAMS),
    "diversity_penalty": (0.5, "0.5", BEAMS),
    "constraints": ([3], r"\[3\]", BEAMS),
    "force_words_ids": ([[3]], r"\[\[3\]\]", BEAMS),
    "penalty_alpha": (0.6, "0.6", BEAMS),
    "dola_layers": ("high", "high", BEAMS),
    "guidance_scale": (1.5, "1.5", GUIDANCE),
    "watermarking_config": (WatermarkingConfig(), "Watermarking", "watermarks keep state"),
    "cache_implementation": ("static", "static", CACHE),
    "cache_config": ({"backend": "quanto"}, "quanto", CACHE),
    "continuous_batching_config": (ContinuousBatchingConfig(), "ContinuousBatching", CACHE),
    "token_healing": (True, "True", "rewriting the prompt's last token"),
    "output_attentions": (True, "True", NODES),
    "output_hidden_states": (True, "True", NODES),
    "encoder_repetition_penalty": (1.3, "1.3", "use repetition_penalty"),
    "encoder_no_repeat_ngram_size": (2, "2", "use no_repeat_ngram_size"),
    "prompt_lookup_num_tokens": (3, "3", OTHERS),
    "assistant_early_exit": (1, "1", OTHERS),
    "use_mtp": (True, "True", OTHERS),
    "is_assistant": (True, "True", OTHERS),
    "speculation_type": ("dflash", "dflash", OTHERS),
    "assistant_ensemble_weight": (0.5, "0.5", OTHERS),
}


def test_every_refused_row_of_the_table_is_tried_here() -> None:
    assert set(ARGUMENTS) == {name for name, rule in support.ARGUMENTS.items() if rule.remedy}
    assert set(FIELDS) == {name for name, rule in support.FIELDS.items() if rule.remedy}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_refused_argument(model: Any, name: str) -> None:
    value, shown, remedy = ARGUMENTS[name]
    refuses(model, rf"(?s)^{name}=.*{shown}.* cannot be honoured.*: .*{remedy}", **{name: value})


@pytest.mark.parametrize("name", FIELDS)
def test_refused_field(model: Any, name: str) -> None:
    value, shown, remedy = FIELDS[name]
    refuses(model, rf"(?s)^{name}=.*{shown}.* cannot be honoured.*: .*{remedy}", **{name: value})


@pytest.mark.parametrize("name", ["num_beams", "use_cache", "token_healing", "guidance_scale"])
def test_refused_field_of_a_generation_config(model: Any, name: str) -> None:
    value, _, remedy = FIELDS[name]
    refuses(model, rf"(?s)^{name}=.*{remedy}", generation_config=GenerationConfig(**{name: value}))


def test_refused_field_of_the_models_own_config_and_its_remedy() -> None:
    model = enable_speculation(fresh_model("llama"))
    model.generation_config.num_beams = 3
    refuses(model, "^num_beams=3 cannot be honoured")
    model.generate(prompt_ids(), max_new_tokens=4, num_beams=1, speculative="prompt_lookup")


NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "guidance_scale": 1.0,
    "diversity_penalty": 0.0,
    "use_cache": True,
    "synced_gpus": False,
    "token_healing": False,
    "prompt_lookup_num_tokens": None,
    "output_hidden_states": False,
    "encoder_repetition_penalty": 1.0,
    "cache_implementation": "dynamic",
    "compile_config": CompileConfig(),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_value_that_asks_for_nothing_is_no_refusal(model: Any, name: str) -> None:
    settings = {"max_new_tokens": 4, name: NEUTRAL[name]}
    plain = model.generate(prompt_ids(), **settings)
    assert model.generate(prompt_ids(), speculative="draft_model", **settings).tolist() == plain.tolist()


def test_misspelt_argument_is_refused(model: Any) -> None:
    refuses(model, "^max_new_token=5 cannot be honoured.*knows no such argument", max_new_token=5)


@pytest.mark.parametrize(
    ("cache", "kind"),
    [
        (lambda config: StaticCache(config=config, max_cache_len=64), "StaticCache"),
        (lambda config: DynamicCache(config=config, offloading=True), "offloaded"),
    ],
    ids=["static", "offloaded"],
)
def test_other_caches_are_refused(model: Any, cache: Any, kind: str) -> None:
    refuses(model, kind, cache=cache(model.config))


def test_quantised_cache_is_refused(model: Any) -> None:
    cache = QuantizedCache.__new__(QuantizedCache)  # its back ends are not installed; only its kind is looked at
    cache.layers, cache.layer_class_to_replicate, cache.offloading = [], None, False
    refuses(model, "^cache=QuantizedCache", cache=cache)


@pytest.mark.parametrize("name", ["static", "offloaded", "quantized", "paged", "offloaded_static", "hybrid"])
def test_cache_implementations_are_refused(model: Any, name: str) -> None:
    refuses(model, f"^cache_implementation='{name}' cannot be honoured", cache_implementation=name)


@pytest.mark.parametrize(
    "mask",
    [[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]],
    ids=["hole", "right padding", "hole after padding", "empty"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_masks_with_holes_or_right_padding_are_refused(model: Any, mask: list[int], batch: int) -> None:
    rows = torch.ones(batch, 6, dtype=torch.long)
    rows[-1] = torch.tensor(mask)
    refuses(
        model,
        rf"attention_mask of shape \({batch}, 6\) has holes, right padding.*padding_side='left'",
        input_ids=prompt_ids(batch, 6),
        attention_mask=rows,
    )


def test_mask_inferred_from_pad_tokens_in_the_text_is_explained(model: Any) -> None:
    ids = prompt_ids()
    ids[0, 4] = PAD
    refuses(model, "inferred from pad_token_id: pass the mask", input_ids=ids)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, speculative="prompt_lookup")


def test_only_the_new_end_of_a_text_is_refused(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    text = model.generate(prompt_ids(width=4), max_new_tokens=4, cache=cache)
    longer = torch.cat([text, prompt_ids(width=20, seed=3)], dim=1)
    refuses(
        model,
        r"attention_mask is 28 wide and the prompt 20.*pass the whole text so far",
        input_ids=longer[:, 8:],
        attention_mask=torch.ones_like(longer),
        cache=cache,
    )
    match = "the cache holds 7 tokens and the prompt 4.*at least one token longer"
    refuses(model, match, input_ids=text[:, :4], cache=cache)


def test_cache_of_a_padded_batch_is_refused(model: Any) -> None:
    ids, mask = left_padded(batch=3)
    cache = DynamicCache(config=model.config)
    text = model.generate(ids, attention_mask=mask, max_new_tokens=4, cache=cache)
    longer = torch.cat([mask, torch.ones(3, 4, dtype=torch.long)], dim=1)
    refuses(model, "cache of a left-padded batch has holes", input_ids=text, attention_mask=longer, cache=cache)


def test_batch_that_may_end_apart_without_a_pad_token() -> None:
    model = enable_speculation(fresh_model("llama"))
    model.generation_config.pad_token_id = None

    def rule(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == 3

    match = "3 rows may end at different lengths; pass pad_token_id"
    refuses(model, match, input_ids=prompt_ids(3), stopping_criteria=[rule])


class OwnGuidance(ClassifierFreeGuidanceLogitsProcessor):
    """A caller's subclass is the caller's promise."""


def test_processors_that_keep_state_are_refused_by_name(model: Any) -> None:
    stateful = ClassifierFreeGuidanceLogitsProcessor(guidance_scale=1.5)
    refuses(model, "^ClassifierFreeGuidance.*cannot be honoured.*keeps state", logits_processor=[stateful])
    support.check_processors(LogitsProcessorList([OwnGuidance(guidance_scale=1.5)]), lossy=False)


def test_typical_acceptance_refuses_processors_of_the_text(model: Any) -> None:
    lossy = SpeculativeConfig(method="prompt_lookup", acceptance="typical")
    refuses(
        model,
        r"RepetitionPenalty.*reads the text so far.*acceptance='exact'",
        speculative=lossy,
        repetition_penalty=1.2,
    )
    at_begin = SuppressTokensAtBeginLogitsProcessor([3], begin_index=12)
    refuses(model, "SuppressTokensAtBegin.*typical", speculative=lossy, logits_processor=[at_begin])
    support.check_processors(LogitsProcessorList([TopHLogitsWarper(0.5)]), lossy=True)
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "suppress_tokens": [3]}
    model.generate(prompt_ids(), max_new_tokens=4, speculative=lossy, **settings)


def test_ranks_that_gather_weights_together_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ranks_run_together(model)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert not ranks_run_together(model)
    monkeypatch.setattr("spechead.hf.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match=r"^synced_gpus=True cannot be honoured"):
        support.check_model(model)


@pytest.mark.parametrize("part", ["target", "draft"])
def test_batch_on_a_model_without_tree_masks(part: str) -> None:
    tiers = {"target": "tree", "draft": "tree"} | {part: "chain"}
    with pytest.raises(ValueError, match=rf"this {part} takes no tree mask, so a batch of 2 rows.*'sdpa'"):
        support.check_batch(2, [], PAD, tiers)
    support.check_batch(1, [], PAD, tiers)


def test_unknown_method_and_objects_are_refused(model: Any) -> None:
    refuses(model, re.escape("speculative='eagel' must be one of auto"), speculative="eagel")
    refuses(model, "speculative=True names no method", speculative=True)
    with pytest.raises(TypeError, match="neither a method's name"):
        model.generate(prompt_ids(), speculative=3, max_new_tokens=2)


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_method_without_its_head_names_the_lines_that_make_one(model: Any, method: str) -> None:
    match = rf"(?s)speculative=\"{method}\" needs a head.*recipes/train_{method}.*enable_speculation\("
    refuses(model, match, speculative=method)
