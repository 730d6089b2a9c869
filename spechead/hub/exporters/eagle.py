"""SafeAILab's EAGLE repository: EAGLE-1/2 and EAGLE-3 heads for its own code.

Read in SafeAILab/EAGLE at cb7e084: eagle/model/ea_model.py (`bias` absent means that fc has one; model.safetensors is
taken where there is no pytorch_model.bin), cnets1.py (EAGLE-1/2: no biases in attention and MLP, head size =
hidden_size / heads, several layers), cnets.py (EAGLE-3: one `midlayer`, no norm flags; with `target_hidden_size` in
the config the embedding comes from the file), configs.py (`rope_scaling` null or exactly type and factor),
modeling_*_kv.py (taps 2, n//2, n-3 are fixed). Official files hold a copy of the embedding, and so does this export.
"""

import shlex

from ...heads.config import Eagle3Config
from ...heads.convert import from_own
from .features import rope_of
from .fields import layer_fields, state_of
from .plan import Origin, Plan, Request

ORIGIN = Origin(
    "SafeAILab/EAGLE",
    None,
    "cb7e0841f",
    ("eagle/model/ea_model.py", "eagle/model/cnets.py", "eagle/model/cnets1.py"),
    "eagle/application/webui.py",
)
ROPE = frozenset({"rope default", "rope linear", "rope dynamic"})
RUNS = {
    "eagle": frozenset({"layers", "fc_bias", "own_embeddings", "activation"}) | ROPE,
    "eagle3": frozenset({"width", "own_embeddings", "shared_lm_head", "activation"}) | ROPE,
}


def origin(kind: str) -> Origin:
    """Return where the facts for a kind of head were read."""
    return ORIGIN


def plan(request: Request) -> Plan:
    """Plan the export of a head that EAGLE's own code runs.

    Raises:
        ValueError: If RoPE has parameters that its config class refuses.
    """
    config = request.head.config
    fields = layer_fields(config, request.head.dtype) | {"architectures": ["LlamaForCausalLM"], "bias": config.fc_bias}
    fields["rope_scaling"] = scaling_of(config)
    state = state_of(request.head)
    added, changed = {}, {}
    if config.share_embeddings:
        added["embed_tokens.weight"] = request.parts.embeddings("EAGLE's format")
        changed["share_embeddings"] = False
    layout = "eagle"
    notes = []
    if isinstance(config, Eagle3Config):
        layout = "eagle3-midlayer"
        fields |= {"draft_vocab_size": config.draft_vocab_size, "target_hidden_size": config.target_hidden_size}
        if config.share_lm_head:
            added["lm_head.weight"] = request.parts.lm_head("EAGLE's format")
            changed["share_lm_head"] = False
    else:
        notes.append(
            "EAGLE-1/2's loader also reads the embedding from the target's sharded checkpoint "
            "(model.safetensors.index.json); a target in one file makes it fail."
        )
    command = (
        f"python -m eagle.application.webui --base-model-path {shlex.quote(request.target_argument)} "
        f"--ea-model-path {shlex.quote(request.directory)}"
    )
    if layout == "eagle":
        command += " --no-eagle3"
    return Plan(
        layout, fields, from_own(layout, state | added), added=added, changed=changed, commands=[command], notes=notes
    )


def scaling_of(config: object) -> dict[str, object] | None:
    """Return `rope_scaling` as EAGLE's config class takes it: null, or type and factor alone.

    Raises:
        ValueError: If RoPE has other parameters.
    """
    rope = rope_of(config)  # type: ignore[arg-type]  # a DraftLayerConfig, as problems_of has made sure
    kind = rope["rope_type"]
    if kind == "default":
        return None
    extra = sorted(set(rope) - {"rope_type", "rope_theta", "factor"})
    if extra:
        raise ValueError(
            f"EAGLE's config takes type and factor alone for RoPE {kind!r}; the head also has {', '.join(extra)}."
        )
    return {"type": kind, "factor": float(rope["factor"])}
