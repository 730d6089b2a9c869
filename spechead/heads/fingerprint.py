"""Which target a head was trained for: a hash of what makes its architecture, and a few of its logits.

Training writes it into the head's config (`target_fingerprint`); `load_head` compares it with the target at hand and
warns. Two fine-tunes of one model have the same hash and other logits; the same weights in bfloat16 and float32 agree
within rounding.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .base_config import DRAFTING_FIELDS, HeadConfig

# Named by every transformers version that this package has to do with; defaults added later must not change the hash.
HASHED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
PROMPT_LENGTH, PROBES = 6, 16
# Largest deviation of a logit, as a share of their spread, that rounding between dtypes and kernels explains.
TOLERANCE = 0.1


def prompt_digest(ids: Sequence[int]) -> str:
    """Return what tells a prompt from others without showing it: 12 hex digits of BLAKE2b of its token ids.

    Training writes it beside the head for every prompt, `spechead bench` into its results, so that anybody can see
    that a head was not measured on what it was trained on.
    """
    return hashlib.blake2b(" ".join(map(str, ids)).encode(), digest_size=6).hexdigest()


def fingerprint(target: PreTrainedModel) -> dict[str, Any]:
    """Return the fingerprint of a target; runs it once over six tokens.

    Args:
        target: A causal LM.

    Returns:
        `{"config": hash, "logits": [16 floats]}`, ready for JSON.
    """
    return {"config": config_hash(target.config), "logits": probe_logits(target)}


def config_hash(target_config: PreTrainedConfig) -> str:
    """Return a short hash of the sizes of the target's text model."""
    text = target_config.get_text_config(decoder=True)
    values = {name: getattr(text, name, None) for name in HASHED}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@torch.no_grad()
def probe_logits(target: PreTrainedModel) -> list[float]:
    """Return 16 logits, spread over the vocabulary, after a fixed prompt of six ids."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    table = target.get_input_embeddings().get_parameter("weight")
    ids = torch.arange(1, PROMPT_LENGTH + 1, device=None if table.is_meta else table.device) * 7919 % vocab_size
    was_training = target.training
    target.eval()
    try:
        logits = target(input_ids=ids[None], use_cache=False).logits[0, -1].float().cpu()
    finally:
        target.train(was_training)
    places = torch.arange(PROBES) * (vocab_size - 1) // (PROBES - 1)
    return [round(value, 4) for value in logits[places].tolist()]


def describe_mismatch(
    config: HeadConfig, target: PreTrainedModel | PreTrainedConfig, revision: str | None = None
) -> str | None:
    """Say how a target differs from the one that a head was trained for, or None.

    The fingerprint decides where there is one; names differ too easily (a local copy of a hub model) and count only
    without it.

    Args:
        config: The head's config.
        target: The target at hand; its config alone compares all but the weights.
        revision: The target's revision, where the caller knows it.
    """
    target_config = target if isinstance(target, PreTrainedConfig) else target.config
    if config.target_revision and revision and config.target_revision != revision:
        return f"it was trained for revision {config.target_revision} of its target, this is revision {revision}"
    known = config.target_fingerprint
    if known:
        if known.get("config") != config_hash(target_config):
            return "its target had another architecture (the hashes of the configs differ)"
        if isinstance(target, PreTrainedConfig):
            return None
        return compare_logits(known.get("logits") or [], probe_logits(target))
    name = target_config.name_or_path
    if config.target_name and name and last_part(config.target_name) != last_part(name):
        return f"it was trained for {config.target_name}, the target at hand is {name}"
    return None


def compare_logits(known: list[float], found: list[float]) -> str | None:
    """Say whether two probes belong to different weights, or None."""
    if len(known) != len(found):
        return None
    before, now = torch.tensor(known), torch.tensor(found)
    spread = (before.max() - before.min()).clamp(min=1e-6)
    share = float((before - now).abs().max() / spread)
    if share > TOLERANCE or share != share:  # not a number differs from everything
        return f"its target had other weights (logits of a fixed prompt differ by {share:.0%} of their spread)"
    return None


def last_part(name: str) -> str:
    """Return the last part of a repo id or a path, lower-cased."""
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


def head_identity(head: PreTrainedModel) -> dict[str, Any]:
    """Return what tells a head from what was trained or tuned on in its place: weights' digest, default drafting."""
    digest = hashlib.sha256()
    for name, tensor in sorted(head.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return {"weights": digest.hexdigest()[:16]} | {name: getattr(head.config, name) for name in DRAFTING_FIELDS}
