"""Kinds of models: recurrent, hybrid, encoder-decoder ones are refused by name; image-text and quantised ones work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    Lfm2Config,
    Mamba2Config,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
    TorchAoConfig,
)

from spechead import enable_speculation
from tests.tiny import PAD, fresh_model, left_padded, prompt_ids, tiny_config, tiny_model

METHODS = ("draft_model", "prompt_lookup")


def recurrent(kind: str) -> Any:
    """Build a tiny model whose layers keep a state that cannot be rolled back."""
    sizes = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": None}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "mamba2":
        own = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2}
        return AutoModelForCausalLM.from_config(Mamba2Config(**sizes, **own, bos_token_id=1))
    if kind == "lfm2":
        types = ["conv", "full_attention"]
        return AutoModelForCausalLM.from_config(Lfm2Config(**sizes, **heads, layer_types=types, bos_token_id=1))
    own = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    types = ["linear_attention", "full_attention"]
    config = Qwen3NextConfig(**sizes, **heads, **own, **experts, head_dim=8, layer_types=types, intermediate_size=32)
    config.shared_expert_intermediate_size = 16
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["mamba2", "lfm2", "qwen3_next"])
def test_recurrent_and_hybrid_targets_are_refused_by_name(kind: str) -> None:
    target = recurrent(kind)
    name = type(target).__name__
    with pytest.raises(ValueError, match=rf"{name} keeps recurrent or hybrid state .*cannot be rolled back"):
        enable_speculation(target)
    assert type(target).__name__ == name
    assert not hasattr(target, "_spechead")
    with pytest.raises(ValueError, match=rf"{name} keeps recurrent or hybrid state"):
        enable_speculation(fresh_model("llama"), draft_model=target)


def test_encoder_decoders_are_refused_by_name() -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    target = T5ForConditionalGeneration(T5Config(vocab_size=48, **sizes))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        enable_speculation(target)


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a transformers causal LM; got Linear"):
        enable_speculation(torch.nn.Linear(2, 2))


def image_text_model() -> Any:
    """Build a tiny Gemma 3 with its vision tower."""
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    text = tiny_config("gemma3").to_dict()
    tokens = {"image_token_index": 40, "boi_token_index": 41, "eoi_token_index": 42, "mm_tokens_per_image": 4}
    tokens["tie_word_embeddings"] = False
    config = Gemma3Config(text_config=text, vision_config=vision, **tokens)
    model = Gemma3ForConditionalGeneration(config).eval()
    source = tiny_model("gemma3").state_dict()
    for name, parameter in model.named_parameters():
        of_text = name.replace("model.language_model.", "model.")
        if of_text in source:
            parameter.data = source[of_text].clone()
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_text_prompts_of_an_image_text_model(method: str) -> None:
    model = enable_speculation(image_text_model(), draft_model=tiny_model("gemma3"))
    for ids, mask in ((prompt_ids(vocab=40), torch.ones(1, 12)), left_padded(batch=3, vocab=40)):
        settings = {"attention_mask": mask.long(), "max_new_tokens": 24}
        plain = model.generate(ids, **settings)
        output = model.generate(ids, speculative=method, return_dict_in_generate=True, **settings)
        assert output.sequences.tolist() == plain.tolist()
        assert output.stats.drafted_tokens > 0
        if method == "draft_model":
            assert output.stats.acceptance_length > 3
    with pytest.raises(ValueError, match=r"^pixel_values=.*only token ids"):
        model.generate(prompt_ids(), pixel_values=torch.zeros(1, 3, 8, 8), speculative=method)


@pytest.mark.parametrize("method", METHODS)
def test_token_types_that_a_processor_adds(method: str) -> None:
    model = enable_speculation(image_text_model(), draft_model=tiny_model("gemma3"))
    ids, mask = left_padded(batch=3, vocab=40)
    settings = {"attention_mask": mask, "token_type_ids": torch.zeros_like(ids), "max_new_tokens": 16}
    plain = model.generate(ids, **settings)
    output = model.generate(ids, speculative=method, return_dict_in_generate=True, **settings)
    assert output.sequences.tolist() == plain.tolist()
    assert output.stats.drafted_tokens > 0
    chunked = model.generate(ids, speculative=method, prefill_chunk_size=5, **settings)
    assert chunked.tolist() == plain.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_quantised_to_int8(dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    fresh_model("llama").save_pretrained(tmp_path)
    settings = {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig()), "dtype": dtype}
    target = AutoModelForCausalLM.from_pretrained(tmp_path, **settings)
    assert type(target.model.layers[0].mlp.down_proj.weight).__name__ == "Int8Tensor"
    model = enable_speculation(target, draft_model=fresh_model("llama").to(dtype))
    ids, mask = left_padded(batch=3)
    for method in METHODS:
        call = {"attention_mask": mask, "max_new_tokens": 16, "return_dict_in_generate": True}
        plain, output = (model.generate(ids, speculative=one, **call) for one in (None, method))
        assert output.sequences.shape == plain.sequences.shape
        assert output.stats.kept_tokens > 0
        if dtype == torch.float32:  # in lower precision several rows of queries at once may round otherwise
            assert output.sequences.tolist() == plain.sequences.tolist()
