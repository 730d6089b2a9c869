"""Own configs for published checkpoints: what their config.json says, and what only their tensors show.

Called by `load_head` and `spechead inspect`. Fields as read in the sources that `convert.py` cites; for taps see
`published_taps`. A flag that changes the computation and that spechead's heads do not have is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .config import Eagle3Config, EagleConfig, HeadConfig, MedusaConfig
from .convert import EAGLE3_LAYOUTS, MEDUSA_LAYOUTS, count_blocks, count_layers
from .sizes import default_taps

# Flags of other head variants: the values that mean "as in spechead's heads"; anything else is another computation.
ONLY: dict[str, tuple[Any, ...]] = {
    "add_para_norm": (None, False),  # HASS
    "num_aux_hidden_states": (None, 3),
    "parallel_drafting": (None, False),
    "parallel_draft_step": (None, 0, 1),  # ModelOpt, nested in eagle_config
    "use_aux_hidden_state": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": (None, False),
    "quantization_config": (None, {}),
}
EAGLE1_FREE = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")


def config_for(
    layout: str,
    source: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    num_layers: int | None = None,
    taps: Sequence[int] | None = None,
) -> HeadConfig:
    """Return the own config of a published checkpoint.

    Args:
        layout: A published layout (see `convert.LAYOUTS`).
        source: Its config.json.
        tensors: Its tensors under own names.
        num_layers: n of the target, where it is known.
        taps: Taps that the caller gives, in spechead's meaning.

    Returns:
        The config.

    Raises:
        ValueError: Naming a size that is missing, a flag that is not supported, or what does not fit together.
    """
    if layout in MEDUSA_LAYOUTS:
        values = medusa_values(source, tensors)
        config_class: type[HeadConfig] = MedusaConfig
    else:
        config_class = Eagle3Config if layout in EAGLE3_LAYOUTS else EagleConfig
        refuse_other_variants(layout, source)
        values = layer_values(source, tensors)
        if layout in EAGLE3_LAYOUTS:
            values |= eagle3_values(source, tensors, values)
            taps = published_taps(source) if taps is None else taps
    return config_class(**values, taps=None if taps is None else list(taps), target_num_layers=num_layers)


def medusa_values(source: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of `MedusaConfig`; heads, blocks, sizes and biases are read off the tensors."""
    heads, layers = count_blocks(tensors)
    lm_head = tensors.get("lm_heads.0.weight")
    return {
        "hidden_size": tensors["blocks.0.0.linear.weight"].shape[0],
        "vocab_size": (source.get("vocab_size") or 0) if lm_head is None else lm_head.shape[0],
        "num_heads": heads,
        "num_hidden_layers": layers,
        "bias": "blocks.0.0.linear.bias" in tensors,
        "share_lm_head": lm_head is None,
        "logit_scale": float(source.get("logit_scale") or 1.0),
        "target_name": source.get("base_model_name_or_path"),
    }


def refuse_other_variants(layout: str, source: Mapping[str, Any]) -> None:
    """Raise ValueError for flags of head variants that compute something else."""
    merged = dict(source) | dict(source.get("eagle_config") or {}) | dict(source.get("transformer_layer_config") or {})
    free = EAGLE1_FREE if layout == "eagle" else ()  # absent or false there, by the method itself
    for name, allowed in ONLY.items():
        if name not in free and merged.get(name) not in allowed:
            raise ValueError(
                f"The checkpoint's config has {name}={merged[name]!r}, another kind of head than spechead has; "
                f"supported is {' or '.join(map(repr, allowed[1:])) or 'leaving it out'}."
            )
    if "sliding_attention" in (merged.get("layer_types") or ()):
        raise ValueError("The checkpoint's draft layer uses sliding attention; spechead's draft layers attend fully.")


def layer_values(source: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields that EAGLE-1/2 and EAGLE-3 configs share, from a Llama or Qwen3 config."""
    layer = source.get("transformer_layer_config") or source
    missing = [
        name
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        if layer.get(name) is None
    ]
    if missing:
        raise ValueError(f"The checkpoint's config.json lacks {', '.join(missing)}; add them, as in a Llama config.")
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or layer.get("rope_theta") or 10000.0)
    stated, held = layer.get("num_hidden_layers"), count_layers(tensors)
    if stated is not None and stated != held:
        raise ValueError(
            f"config.json says num_hidden_layers={stated}, the file holds {held} layer(s); make them agree."
        )
    has_bias = any(name.endswith("self_attn.q_proj.bias") for name in tensors)
    return {
        "vocab_size": layer["vocab_size"],
        "hidden_size": layer["hidden_size"],
        "intermediate_size": layer["intermediate_size"],
        "num_hidden_layers": held,
        "num_attention_heads": layer["num_attention_heads"],
        "num_key_value_heads": layer.get("num_key_value_heads") or 0,
        "head_dim": layer.get("head_dim") or 0,
        "hidden_act": layer.get("hidden_act") or "silu",
        "rms_norm_eps": float(layer.get("rms_norm_eps") or 1e-6),
        "rope_parameters": rope,
        "max_position_embeddings": layer.get("max_position_embeddings") or 2048,
        "trained_positions": layer.get("max_position_embeddings"),
        "attention_bias": bool(layer.get("attention_bias")) or has_bias,
        "mlp_bias": bool(layer.get("mlp_bias")),
        "layer_style": "qwen3" if "layers.0.self_attn.q_norm.weight" in tensors else "llama",
        "share_embeddings": "embed_tokens.weight" not in tensors,
        "share_lm_head": "lm_head.weight" not in tensors,
        "fc_bias": "fc.bias" in tensors,
        "logit_scale": float(source.get("logit_scale") or 1.0),
    }


def eagle3_values(
    source: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields that only EAGLE-3 has."""
    trained_for = (source.get("speculators_config") or {}).get("verifier") or {}
    draft_size = source.get("draft_vocab_size") or layer["vocab_size"]
    return {
        "draft_vocab_size": draft_size,
        # Without an LM head of its own a pruned head is broken, which the strict load then says.
        "share_lm_head": "lm_head.weight" not in tensors and draft_size == layer["vocab_size"],
        "target_hidden_size": source.get("target_hidden_size") or layer["hidden_size"],
        "norm_before_residual": bool(source.get("norm_before_residual")),
        "norm_output": bool(source.get("norm_output")),
        "norm_before_fc": bool(source.get("norm_before_fc")),
        "fc_norm": bool(source.get("fc_norm")),
        "target_name": trained_for.get("name_or_path"),
    }


def published_taps(source: Mapping[str, Any]) -> list[int] | None:
    """Return the taps that a published EAGLE-3 config names, None where it names none (the default then).

    Ids are read as vLLM and speculators do: k = the state entering layer k. `ambiguous_taps` says when not to.
    """
    nested = (source.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = source.get("eagle_aux_hidden_state_layer_ids") or nested
    return list(ids) if ids else None


def ambiguous_taps(source: Mapping[str, Any], num_layers: int | None) -> str | None:
    """Say why the tap ids of a published config may be meant in the other convention, or None.

    The sign is that they are what the other convention gives for the default taps: nested in `eagle_config` and
    beginning with 1 (SGLang goes by that), or each one below the default.
    """
    ids = published_taps(source)
    if ids is None:
        return None
    shifted = [tap + 1 for tap in ids]
    usual = list(default_taps(num_layers)) if num_layers is not None and num_layers > 1 else None
    nested = not source.get("eagle_aux_hidden_state_layer_ids")
    if shifted == usual or (nested and ids[0] == 1 and ids != usual):
        return (
            f"eagle_aux_hidden_state_layer_ids={ids} may be meant in either convention: vLLM reads k as the state "
            "entering layer k, SGLang and ModelOpt's exporter as the output of layer k (the state entering k+1). One "
            "layer off costs most of the acceptance. Say which: load_head(..., taps="
            f"{ids}) or load_head(..., taps={shifted})."
        )
    return None


def complete(config: HeadConfig, source: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the tensors that a layout leaves out because they follow from others, and drop those that say nothing.

    A Qwen2-style layer has biases on q, k and v alone: o gets a zero one. `t2d` follows from `d2t` (ModelOpt writes no
    t2d). With D == V both say nothing if they are the identity (the official Vicuna-13B file). vLLM's Medusa files
    with `original_lm_head` hold one LM head for all.

    Args:
        config: The own config.
        source: The checkpoint's config.json.
        tensors: Tensors under own names.

    Returns:
        Tensors for `load_state_dict`.
    """
    done = dict(tensors)
    if isinstance(config, MedusaConfig):
        if source.get("original_lm_head") and "lm_heads.0.weight" in done:
            for head in range(1, config.num_heads):
                done.setdefault(f"lm_heads.{head}.weight", done["lm_heads.0.weight"].clone())
        return done
    if config.attention_bias:
        for name in [name for name in done if name.endswith("self_attn.q_proj.bias")]:
            done.setdefault(name.replace("q_proj", "o_proj"), torch.zeros(config.hidden_size, dtype=done[name].dtype))
    if isinstance(config, Eagle3Config) and "d2t" in done:
        d2t = done["d2t"] = done["d2t"].to(torch.int64)
        if config.draft_vocab_size == config.vocab_size and not d2t.any():
            done.pop("d2t")
            done.pop("t2d", None)
        elif "t2d" not in done:
            kept = (d2t + torch.arange(len(d2t))).clamp(0, config.vocab_size - 1)
            done["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    return done
