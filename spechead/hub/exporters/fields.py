"""config.json fields that several formats share: a draft layer as a Llama or Qwen3 config, RoPE for both generations.

transformers 5 reads `rope_parameters`, transformers 4 `rope_theta` and `rope_scaling`; engines read the one or the
other, so both are written and say the same.
"""

from typing import Any

import torch
from torch import Tensor

from ...heads.base import Head
from ...heads.config import DraftLayerConfig, Eagle3Config
from .features import rope_of, stated_taps

NORM_FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")


def layer_fields(config: DraftLayerConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of a Llama or Qwen3 config that describes the draft layers.

    Args:
        config: The head's config.
        dtype: The head's dtype.
    """
    qwen3 = config.layer_style == "qwen3"
    values = {
        "model_type": "qwen3" if qwen3 else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if not qwen3:
        values["mlp_bias"] = config.mlp_bias
    return values | rope_fields(config)


def rope_fields(config: DraftLayerConfig) -> dict[str, Any]:
    """Return RoPE as both generations of transformers read it."""
    rope = rope_of(config)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
    }


def eagle3_fields(config: Eagle3Config) -> dict[str, Any]:
    """Return the fields that vLLM, speculators and llama.cpp read beside the layer's: vocabulary, norms, taps.

    `norm_before_residual` is always said: vLLM and the speculators library take different defaults. The taps are left
    out where they are every engine's default; `target_hidden_size` where it is the head's own, as a null breaks vLLM.
    A null `draft_vocab_size` says that the LM head is the target's.
    """
    values: dict[str, Any] = {"draft_vocab_size": None if config.share_lm_head else config.draft_vocab_size}
    values |= {name: getattr(config, name) for name in NORM_FLAGS}
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    taps = stated_taps(config)
    if taps is not None:
        values["eagle_aux_hidden_state_layer_ids"] = taps
    return values


def zero_biases(head: Head, names: list[str], rows: int) -> dict[str, Tensor]:
    """Return zero biases [rows] under own names, in the head's dtype, for engines that load a bias in any case."""
    return {name: torch.zeros(rows, dtype=head.dtype) for name in names}


def state_of(head: Head) -> dict[str, Tensor]:
    """Return the head's tensors under own names, contiguous and on the CPU."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
