"""Tiny seeded causal LMs, built in memory: the targets and drafts of every test.

Weights are scaled up from the usual initialisation, so that greedy choices are far from ties and attention to far
tokens matters. `tiny_model` is cached and shared: treat it as read-only; take `fresh_model` to enable or patch one.
"""

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

FAMILIES = ("llama", "qwen3", "mistral", "gemma3", "gpt2", "gpt_neox", "phi")
ATTENTION = ("sdpa", "eager")
VOCAB = 48
PAD = 0
MISTRAL_WINDOW, GEMMA_WINDOW = 16, 8
WEIGHT_STD = 0.3

_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma3": Gemma3TextConfig,
    "gpt2": GPT2Config,
    "gpt_neox": GPTNeoXConfig,
    "phi": PhiConfig,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "sliding_window": MISTRAL_WINDOW},
    "gemma3": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 3,
        "sliding_window": GEMMA_WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        # tied and scaled embeddings of random weights would only ever repeat the last token
        "tie_word_embeddings": False,
    },
}


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """Return a tiny config of a family; `overrides` replace fields."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": PAD,
    }
    if family == "gpt2":
        del fields["intermediate_size"]
    return _CONFIGS[family](**{**fields, **_OWN.get(family, {}), **overrides})


def build(
    config: PreTrainedConfig, attention: str = "sdpa", seed: int = 0, std: float = WEIGHT_STD
) -> PreTrainedModel:
    """Build a float32 model in evaluation mode, all its matrices drawn anew with standard deviation `std`."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, std, generator=generator)
    return model


@lru_cache(maxsize=64)
def tiny_model(family: str, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """Return the shared tiny model of a family; read-only."""
    return build(tiny_config(family), attention, seed)


def fresh_model(family: str, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """Return a copy of `tiny_model` that a test may change."""
    return copy.deepcopy(tiny_model(family, attention, seed))


def table_model(successors: Sequence[int]) -> PreTrainedModel:
    """Return a Llama whose greedy next token is `successors[last token]`, whatever came before."""
    size = len(successors)
    model = build(
        tiny_config("llama", vocab_size=size, hidden_size=size, num_attention_heads=1, num_key_value_heads=1)
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.eye(size))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[torch.tensor(successors), torch.arange(size)] = 1.0
    return model


def prompt_ids(batch: int = 1, width: int = 12, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    """Return random prompts `[B, P]` without the pad id."""
    return torch.randint(1, vocab, (batch, width), generator=torch.Generator().manual_seed(seed))


def left_padded(batch: int = 4, width: int = 12, seed: int = 0, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Return prompts `[B, P]` and their mask; row b has 3 * b left pads (at least two real tokens are left)."""
    ids = prompt_ids(batch, width, seed, vocab)
    pads = (3 * torch.arange(batch)).clamp(max=width - 2)
    mask = (torch.arange(width)[None, :] >= pads[:, None]).long()
    return ids * mask, mask
