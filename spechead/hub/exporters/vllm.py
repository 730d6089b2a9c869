"""vLLM: Medusa heads (up to 0.32), EAGLE-1/2 and EAGLE-3 heads as draft directories.

Read in vllm-project/vllm. EAGLE at 0.33.0 (commit 4ba787ec9): model_executor/models/llama_eagle.py, llama_eagle3.py,
qwen3_eagle3.py (names, flags, no fc bias), v1/spec_decode/llm_base_proposer.py (an embedding or LM head that is not
in the file is the target's), v1/worker/gpu_model_runner.py (tap k = the state entering layer k; n = before the final
norm), transformers_utils/configs/eagle.py (architectures). Medusa at 0.32.0 (commit 5df63a720), the last release that
has it: model_executor/models/medusa.py, transformers_utils/configs/medusa.py (every key with "num" and "heads" or
"layers" is taken for the number of heads or blocks), v1/spec_decode/medusa.py.
"""

import json
import shlex
from typing import Any

from ...heads.config import Eagle3Config, EagleConfig, MedusaConfig
from ...heads.convert import from_own
from ...heads.medusa import MedusaHeads
from .features import EVERY_NORM, EVERY_ROPE, kind_of
from .fields import eagle3_fields, layer_fields, state_of
from .plan import Origin, Plan, Request

EAGLE_ORIGIN = Origin(
    "vLLM",
    "0.33.0",
    "4ba787ec9",
    ("vllm/model_executor/models/llama_eagle.py", "vllm/model_executor/models/llama_eagle3.py"),
    "vllm/config/speculative.py",
)
MEDUSA_ORIGIN = Origin(
    "vLLM",
    "0.32.0",
    "5df63a720",
    ("vllm/model_executor/models/medusa.py", "vllm/transformers_utils/configs/medusa.py"),
    "vllm/config/speculative.py",
)
LAYERS = frozenset({"layers", "attention_bias", "mlp_bias", "logit_scale", "own_embeddings", "head_dim"}) | EVERY_ROPE
RUNS = {
    "medusa": frozenset({"layers", "logit_scale"}),
    "eagle": LAYERS,
    "eagle3": LAYERS | EVERY_NORM | {"qwen3", "width", "shared_lm_head", "taps", "first_tap"},
}


def origin(kind: str) -> Origin:
    """Return where the facts for a kind of head were read."""
    return MEDUSA_ORIGIN if kind == "medusa" else EAGLE_ORIGIN


def plan(request: Request) -> Plan:
    """Plan the export of a head that vLLM runs."""
    config = request.head.config
    if isinstance(config, MedusaConfig):
        return medusa(request, config)
    fields = layer_fields(config, request.head.dtype)
    if config.logit_scale != 1.0:
        fields["logit_scale"] = config.logit_scale
    layout = "eagle"
    if isinstance(config, Eagle3Config):
        layout = "eagle3"
        style = "Qwen3" if config.layer_style == "qwen3" else "Llama"
        fields |= eagle3_fields(config) | {"architectures": [f"Eagle3{style}ForCausalLM"]}
    elif isinstance(config, EagleConfig):
        # "bias" says that fc has none, as EAGLE's own configs do.
        fields |= {"architectures": ["EagleLlamaForCausalLM"], "bias": False}
    tensors = from_own(layout, state_of(request.head))
    command = serve(request, kind_of(config), request.depth)
    return Plan(layout, fields, tensors, commands=[command])


def medusa(request: Request, config: MedusaConfig) -> Plan:
    """Plan Medusa heads; a shared LM head is written once, as `lm_heads.0` with `original_lm_head`."""
    head = request.head
    assert_medusa(head)
    state = state_of(head)
    added: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    written = dict(state)
    if config.share_lm_head:
        table = request.parts.lm_head("vLLM's Medusa format")
        written["lm_heads.0.weight"] = table
        added = {f"lm_heads.{index}.weight": table for index in range(config.num_heads)}
        changed = {"share_lm_head": False, "vocab_size": len(table)}
    vocab_size = len(written["lm_heads.0.weight"])
    fields = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.share_lm_head,
        "logit_scale": config.logit_scale,
        "base_model_name_or_path": config.target_name,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    notes = [
        "vLLM 0.33.0 (commit 4ba787ec9) no longer has Medusa; serve with vllm<=0.32.",
        f"vLLM builds as many heads as num_speculative_tokens says, so it must be {config.num_heads}; it drafts one "
        "chain of each head's best token.",
    ]
    commands = [serve(request, "medusa", config.num_heads)]
    tensors = from_own("medusa-vllm", written)
    return Plan("medusa-vllm", fields, tensors, added=added, changed=changed, commands=commands, notes=notes)


def assert_medusa(head: Any) -> None:
    """Raise TypeError for anything but Medusa heads: the caller chose the wrong plan."""
    if not isinstance(head, MedusaHeads):
        raise TypeError(f"{type(head).__name__} are no MedusaHeads.")


def serve(request: Request, method: str, depth: int) -> str:
    """Return the command that serves the target with the exported head."""
    settings = json.dumps({"method": method, "model": request.directory, "num_speculative_tokens": depth})
    return f"vllm serve {shlex.quote(request.target_argument)} --speculative-config {shlex.quote(settings)}"
