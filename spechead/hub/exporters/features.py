"""The features of a head that not every engine runs, so that an exporter can refuse by name what would be lost.

Each exporter lists the features its engine runs; anything else that a head uses is refused before a file is written.
Keys are for the lists, phrases for the messages.
"""

from collections.abc import Mapping
from typing import Any

from ...heads.base_config import HeadConfig
from ...heads.config import DraftLayerConfig, Eagle3Config, EagleConfig, MedusaConfig
from ...heads.sizes import default_taps

KINDS = {MedusaConfig: "medusa", EagleConfig: "eagle", Eagle3Config: "eagle3"}
KIND_NAMES = {"medusa": "Medusa heads", "eagle": "EAGLE-1/2 heads", "eagle3": "EAGLE-3 heads"}
EVERY_ROPE = frozenset(f"rope {kind}" for kind in ("default", "linear", "dynamic", "yarn", "llama3", "longrope"))
EVERY_NORM = frozenset({"norm_before_residual", "norm_output", "norm_before_fc", "fc_norm"})


def kind_of(config: HeadConfig) -> str:
    """Return "medusa", "eagle" or "eagle3"."""
    return KINDS[type(config)]


def used_features(config: HeadConfig) -> dict[str, str]:
    """Return the features that a head uses beyond the plainest head of its kind: key to phrase.

    Args:
        config: The head's config.
    """
    used: dict[str, str] = {}
    if config.hidden_act != "silu":
        used["activation"] = f"hidden_act={config.hidden_act!r}"
    if config.logit_scale != 1.0:
        used["logit_scale"] = f"logit_scale={config.logit_scale}"
    if isinstance(config, MedusaConfig):
        if config.num_hidden_layers > 1:
            used["layers"] = f"{config.num_hidden_layers} residual blocks a head"
        return used
    if isinstance(config, DraftLayerConfig):
        used |= layer_features(config)
    if isinstance(config, EagleConfig):
        if not config.share_lm_head:
            used["own_lm_head"] = "an LM head of its own"
        if config.taps not in (None, [config.target_num_layers]):
            used["feature"] = f"taps={config.taps} instead of the state after the final norm"
    if isinstance(config, Eagle3Config):
        used |= eagle3_features(config)
    return used


def layer_features(config: DraftLayerConfig) -> dict[str, str]:
    """Return the features of the draft layers, in the order of `used_features`."""
    used: dict[str, str] = {}
    if config.num_hidden_layers > 1:
        used["layers"] = f"{config.num_hidden_layers} draft layers"
    if config.layer_style == "qwen3":
        used["qwen3"] = 'layer_style="qwen3" (norms on queries and keys)'
    if config.attention_bias:
        used["attention_bias"] = "attention_bias=true"
        if config.layer_style == "qwen3":
            used["qwen3_bias"] = "attention_bias=true in a Qwen3-style layer"
    if config.mlp_bias and config.layer_style == "llama":
        used["mlp_bias"] = "mlp_bias=true"
    if config.fc_bias:
        used["fc_bias"] = "a bias on fc"
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        used["head_dim"] = f"head_dim={config.head_dim}, not hidden_size / num_attention_heads"
    if config.target_hidden_size != config.hidden_size:
        used["width"] = f"hidden_size={config.hidden_size} beside target_hidden_size={config.target_hidden_size}"
    elif not config.share_embeddings:
        used["own_embeddings"] = "embeddings of its own"
    kind = rope_of(config)["rope_type"]
    used[f"rope {kind}"] = f"RoPE of kind {kind!r}"
    return used


def eagle3_features(config: Eagle3Config) -> dict[str, str]:
    """Return the features that only EAGLE-3 has."""
    used = {name: f"{name}=true" for name in sorted(EVERY_NORM) if getattr(config, name)}
    if config.share_lm_head:
        used["shared_lm_head"] = "the target's LM head"
    if config.taps is None:
        return used
    layers = config.target_num_layers
    if stated_taps(config) is not None:
        used["taps"] = f"taps={config.taps} instead of the default"
    if config.taps[0] == 0:
        used["first_tap"] = "tap 0 (the embedding's output)"
    if config.taps[-1] == layers:
        used["last_tap"] = f"tap {layers} (the state after the target's final norm; engines mean the one before it)"
    return used


def stated_taps(config: Eagle3Config) -> list[int] | None:
    """Return the taps to write into a published config, None where engines' default (2, n//2, n-3) is meant."""
    if config.taps is None:
        return None
    n = config.target_num_layers
    usual = n is not None and n > 1 and config.taps == [2, n // 2, n - 3] and config.taps == list(default_taps(n))
    return None if usual else list(config.taps)


def rope_of(config: DraftLayerConfig) -> dict[str, Any]:
    """Return the RoPE parameters, with kind and theta."""
    given = dict(config.rope_parameters or {})
    return {"rope_type": "default", "rope_theta": 10000.0} | given


def problems_of(config: HeadConfig, runs: Mapping[str, frozenset[str]]) -> list[str]:
    """Say what of a head an engine cannot run.

    Args:
        config: The head's config.
        runs: The engine's features by kind of head.

    Returns:
        Phrases; empty if it runs all.
    """
    kind = kind_of(config)
    if kind not in runs:
        return [f"it takes no {KIND_NAMES[kind]}"]
    return [f"it cannot run {phrase}" for key, phrase in used_features(config).items() if key not in runs[kind]]
