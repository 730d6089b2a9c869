"""Sizes of a target that a draft layer is built with, read from any family's text config.

Called by `HeadConfig.for_target`. Head layers are Llama-style whatever the family, so a size that a family names in
its own way, or does not have, is translated here.
"""

from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

# RoPE kinds whose parameters a Llama layer can use as they are; others describe another family's layer.
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the decoder's config out of a possibly composite one.

    Raises:
        ValueError: If it lacks one of the sizes every head needs.
    """
    text = config.get_text_config(decoder=True)
    needed = ("vocab_size", "hidden_size", "num_hidden_layers")
    missing = [name for name in needed if getattr(text, name, None) is None]
    if missing:
        raise ValueError(
            f"{type(config).__name__} does not say {', '.join(missing)}; heads need the config of a causal LM."
        )
    return text


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Return the three taps an EAGLE-3 head reads when none are chosen.

    From 7 layers on they are EAGLE-3's own choice, the states entering layers 2, n//2 and n-3. Smaller targets get
    three distinct ids close to it (n = 6 would name layer 3 twice), below n where the layers allow it.

    Args:
        num_layers: n, the number of layers of the target.

    Returns:
        Three ids out of 0..n, low to high.

    Raises:
        ValueError: If the target has fewer than 2 layers.
    """
    if num_layers < 2:
        raise ValueError(
            f"A target of {num_layers} layer(s) has no three distinct taps; EAGLE-3 needs at least 2 layers. "
            "Use an EAGLE (one tap) or a Medusa head."
        )
    low = max(0, min(2, num_layers - 3))
    middle = max(low + 1, num_layers // 2)
    return low, middle, max(middle + 1, num_layers - 3)


def logit_scale(text: PreTrainedConfig) -> float:
    """Return the factor that the target's forward puts on its logits (Cohere, Falcon-H1; Granite divides)."""
    factor = getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1.0
    return float(factor) / float(getattr(text, "logits_scaling", None) or 1.0)


def layer_sizes(text: PreTrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Llama-style layer that suit the target.

    Args:
        text: The target's text config.
        overrides: Fields the caller sets; what they set is not asked of the target.

    Returns:
        Values for `DraftLayerConfig`.

    Raises:
        ValueError: If a size differs from layer to layer, or cannot be found, and is not overridden.
    """
    hidden = text.hidden_size
    heads = size(text, "num_attention_heads", overrides)
    values: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": size(text, "num_key_value_heads", overrides, heads),
        "intermediate_size": size(text, "intermediate_size", overrides, getattr(text, "n_inner", None) or 4 * hidden),
        "head_dim": head_dim(text, heads, overrides),
        "rms_norm_eps": float(getattr(text, "rms_norm_eps", None) or 1e-5),
        "max_position_embeddings": size(text, "max_position_embeddings", overrides, 2048),
    }
    if values["num_attention_heads"] % values["num_key_value_heads"]:
        values["num_key_value_heads"] = heads
    values["rope_parameters"] = rope_parameters(text, overrides.get("head_dim") or values["head_dim"])
    return values


def size(text: PreTrainedConfig, name: str, overrides: dict[str, Any], otherwise: int | None = None) -> int:
    """Return one integer size: the override, the target's, or `otherwise`."""
    value = overrides.get(name, getattr(text, name, None))
    if value is None:
        value = otherwise
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(
            f"{type(text).__name__}.{name} is {value!r}, not one size for all layers; give {name}=... to for_target."
        )
    return value


def head_dim(text: PreTrainedConfig, heads: int, overrides: dict[str, Any]) -> int:
    """Return the attention head size; latent-attention targets name their RoPE part so, which a Llama layer is not."""
    if "head_dim" in overrides:
        return size(text, "head_dim", overrides)
    if getattr(text, "kv_lora_rank", None) is not None:
        return text.hidden_size // heads
    return size(text, "head_dim", overrides, text.hidden_size // heads)


def rope_parameters(text: PreTrainedConfig, dim: int) -> dict[str, Any]:
    """Return the target's RoPE settings as far as a Llama layer has them; its theta alone otherwise.

    Args:
        text: The target's text config; without RoPE (learned positions) the head uses theta 10000.
        dim: Attention head size of the head.

    Returns:
        One flat dict with at least `rope_type` and `rope_theta`.
    """
    given = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    if nested:  # one entry per layer type: heads attend fully
        given = given.get("full_attention") or nested[0]
    theta = float(given.get("rope_theta") or 10000.0)
    kind = given.get("rope_type", "default")
    foreign = ("partial_rotary_factor", "mrope_section", "type")  # belong to the target's own attention
    kept = {key: value for key, value in given.items() if key not in foreign}
    fits = kind in ROPE_TYPES or (kind == "longrope" and len(given.get("long_factor") or []) == dim // 2)
    if not fits:
        logger.info(
            "The target's RoPE kind %r does not fit a draft layer of head size %d; "
            "the head uses plain RoPE with theta %s.",
            kind,
            dim,
            theta,
        )
        return {"rope_type": "default", "rope_theta": theta}
    return kept | {"rope_type": kind, "rope_theta": theta}
