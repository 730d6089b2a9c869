"""Synthetic checkpoints in the published layouts: configs as their projects write them, noise for tensors.

Config fields are those of EAGLE cb7e084 eagle/traineagle3/config.json and eagle/train/vicuna_7B_config.json, SpecForge
a6b6b02 configs/*.json, speculators c05b95b, vLLM 0531c22 configs/medusa.py and Medusa e2a5d20, with tiny sizes.
"""

from typing import Any

import torch
from torch import Tensor

from tests.unit.heads.targets import DRAFT, HIDDEN, VOCAB, kept_ids

Blocks = list[list[tuple[Tensor, Tensor | None]]]
HEAD_DIM, HEADS, GROUPS, INNER, THETA = 8, 4, 2, 40, 500000.0
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": GROUPS,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": VOCAB,
}
SIZES = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-05,
    "rope_theta": THETA,
    "num_hidden_layers": 1,
}


class Noise:
    """Seeded tensors of given shapes; norm weights lie around 1."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator) * 0.3 + (len(shape) == 1)


def layer(noise: Noise, name: str, inputs: int, *, biased: bool = False, normed: bool = False) -> dict[str, Tensor]:
    """Return the projections and MLP of one decoder layer whose attention reads `inputs` values."""
    rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": GROUPS * HEAD_DIM, "v_proj": GROUPS * HEAD_DIM}
    tensors = {f"{name}.self_attn.{key}.weight": noise(size, inputs) for key, size in rows.items()}
    if biased:
        tensors |= {f"{name}.self_attn.{key}.bias": noise(size) - 1 for key, size in rows.items()}
    if normed:
        tensors |= {f"{name}.self_attn.{key}.weight": noise(HEAD_DIM) for key in ("q_norm", "k_norm")}
    return tensors | {
        f"{name}.self_attn.o_proj.weight": noise(HIDDEN, HEADS * HEAD_DIM),
        f"{name}.mlp.gate_proj.weight": noise(INNER, HIDDEN),
        f"{name}.mlp.up_proj.weight": noise(INNER, HIDDEN),
        f"{name}.mlp.down_proj.weight": noise(HIDDEN, INNER),
        f"{name}.post_attention_layernorm.weight": noise(HIDDEN),
    }


def eagle1_tensors(*, bias: bool = True, biased: bool = False, layers: int = 1) -> dict[str, Tensor]:
    """Return an EAGLE-1/2 checkpoint's tensors without its embeddings."""
    noise = Noise(1)
    tensors = {"fc.weight": noise(HIDDEN, 2 * HIDDEN)}
    if bias:
        tensors["fc.bias"] = noise(HIDDEN) - 1
    for index in range(layers):
        tensors |= layer(noise, f"layers.{index}", HIDDEN, biased=biased)
        if index:
            tensors[f"layers.{index}.input_layernorm.weight"] = noise(HIDDEN)
    return tensors


def eagle3_tensors(
    first: str = "midlayer", *, size: int = DRAFT, normed: bool = False, layers: int = 1, taps_width: int = HIDDEN
) -> dict[str, Tensor]:
    """Return an EAGLE-3 checkpoint's tensors without its embeddings."""
    noise = Noise(2)
    tensors = {"fc.weight": noise(HIDDEN, 3 * taps_width)} | layer(noise, first, 2 * HIDDEN, normed=normed)
    tensors |= {f"{first}.{name}.weight": noise(HIDDEN) for name in ("hidden_norm", "input_layernorm")}
    for index in range(1, layers):
        tensors |= layer(noise, f"layers.{index}", HIDDEN, normed=normed)
        tensors[f"layers.{index}.input_layernorm.weight"] = noise(HIDDEN)
    tensors |= {"norm.weight": noise(HIDDEN), "lm_head.weight": noise(size, HIDDEN)}
    return tensors | vocabulary_map(size)


def vocabulary_map(size: int = DRAFT) -> dict[str, Tensor]:
    """Return d2t offsets and the t2d mask of the kept ids."""
    ids = torch.arange(VOCAB) if size == VOCAB else kept_ids(VOCAB, size)
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(size), "t2d": mask}


def eagle3_config(**changes: Any) -> dict[str, Any]:
    """Return config.json of an EAGLE-3 checkpoint."""
    return LLAMA | {"draft_vocab_size": DRAFT} | changes


def speculators_config(model_type: str = "llama", layers: int = 1, **changes: Any) -> dict[str, Any]:
    """Return config.json of a speculators eagle3 checkpoint."""
    inner = {key: value for key, value in LLAMA.items() if key not in ("architectures", "torch_dtype")}
    inner |= {"model_type": model_type, "num_hidden_layers": layers, "head_dim": HEAD_DIM}
    inner |= {"rope_parameters": {"rope_type": "default", "rope_theta": inner.pop("rope_theta")}}
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT,
        "eagle_aux_hidden_state_layer_ids": None,
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/target"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": inner,
        "transformers_version": "5.2.0",
    } | changes


def medusa_blocks(heads: int, layers: int, bias: bool = True) -> Blocks:
    """Return (weight, bias) of each residual block of each head."""
    noise = Noise(3)
    return [
        [(noise(HIDDEN, HIDDEN), noise(HIDDEN) - 1 if bias else None) for _ in range(layers)] for _ in range(heads)
    ]


def medusa_tensors(
    blocks: list[list[tuple[Tensor, Tensor | None]]], lm_heads: list[Tensor] | None
) -> dict[str, Tensor]:
    """Return FasterDecoding's names for blocks and, in v1, LM heads."""
    tensors = {}
    for i, layers in enumerate(blocks):
        for j, (weight, bias) in enumerate(layers):
            tensors[f"{i}.{j}.linear.weight"] = weight
            if bias is not None:
                tensors[f"{i}.{j}.linear.bias"] = bias
        if lm_heads is not None:
            tensors[f"{i}.{len(layers)}.weight"] = lm_heads[i]
    return tensors


def vllm_medusa_tensors(blocks: Blocks, lm_heads: list[Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return vLLM's names for blocks and LM heads."""
    tensors = {f"{prefix}lm_heads.{i}.weight": lm_head for i, lm_head in enumerate(lm_heads)}
    for i, layers in enumerate(blocks):
        for j, (weight, bias) in enumerate(layers):
            tensors[f"{prefix}blocks.{i}.layers.{j}.weight"] = weight
            if bias is not None:
                tensors[f"{prefix}blocks.{i}.layers.{j}.bias"] = bias
    return tensors
