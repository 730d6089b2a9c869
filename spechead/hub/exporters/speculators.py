"""The speculators format: EAGLE-3 heads that `vllm serve` takes as they are, and that the speculators library loads.

Read in speculators 0.9.0 (the release's own files) and vllm-project/speculators c05b95b:
models/eagle3/{config,core}.py (fc reads three states of the head's own width; t2d and d2t where the vocabulary is
pruned), model.py (an embedding or LM head that is not in the file stays NaN until training), config.py (`verifier`
names the target); and vLLM 0.33.0 (commit 4ba787ec9) transformers_utils/configs/speculators/{base,algos}.py (needs
proposal_methods, the target's name and transformer_layer_config; `norm_before_residual` defaults to true there, to
false in the library).
"""

import shlex
from typing import Any

from ...heads.config import Eagle3Config
from ...heads.convert import from_own
from ..target_parts import TargetUnavailable
from .features import EVERY_NORM, EVERY_ROPE
from .fields import eagle3_fields, layer_fields, state_of
from .plan import Origin, Plan, Request

ORIGIN = Origin(
    "speculators",
    "0.9.0",
    "c05b95b30 of its repository; vLLM 0.33.0 4ba787ec9",
    ("src/speculators/models/eagle3/core.py", "vllm/transformers_utils/configs/speculators/algos.py"),
    "vllm/transformers_utils/configs/speculators/base.py",
)
RUNS = {
    "eagle3": EVERY_NORM
    | EVERY_ROPE
    | {"layers", "qwen3", "qwen3_bias", "attention_bias", "mlp_bias", "activation", "own_embeddings", "head_dim"}
    | {"shared_lm_head", "taps", "first_tap"}
}


def origin(kind: str) -> Origin:
    """Return where the facts for a kind of head were read."""
    return ORIGIN


def plan(request: Request) -> Plan:
    """Plan the export; the target's embedding and, where shared, its LM head are copied into the file.

    Raises:
        ValueError: If no target is named, which vLLM takes from the file.
    """
    config = request.head.config
    if not isinstance(config, Eagle3Config):
        raise TypeError(f"{type(config).__name__} is no Eagle3Config.")
    if request.target is None:
        raise ValueError(
            "The speculators format names the target that `vllm serve` then loads, and the head's config names none; "
            "give it with --target <name>."
        )
    state = state_of(request.head)
    added, changed = {}, {}
    if config.share_embeddings:
        added["embed_tokens.weight"] = request.parts.embeddings("The speculators format")
        changed["share_embeddings"] = False
    if config.share_lm_head:
        added["lm_head.weight"] = request.parts.lm_head("The speculators format")
        changed["share_lm_head"] = False
    return Plan(
        "speculators",
        fields_of(request, config),
        from_own("speculators", state | added),
        added=added,
        changed=changed,
        commands=[f"vllm serve {shlex.quote(request.directory)}"],
        notes=[f"vLLM loads the target {request.target} beside the head and drafts {request.depth} tokens a step."],
    )


def fields_of(request: Request, config: Eagle3Config) -> dict[str, Any]:
    """Return config.json of the speculators format."""
    layer = layer_fields(config, request.head.dtype)
    dtype = layer.pop("torch_dtype")
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": request.depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": request.target, "architectures": target_architectures(request)},
        },
        "transformer_layer_config": layer,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    } | (eagle3_fields(config) | {"draft_vocab_size": config.draft_vocab_size})


def target_architectures(request: Request) -> list[str]:
    """Return the target's architectures, [] where the target cannot be had: the library only records them."""
    try:
        return list(request.parts.config().architectures or [])
    except TargetUnavailable:
        return []
