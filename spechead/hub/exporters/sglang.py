"""SGLang: EAGLE-1/2 and EAGLE-3 heads as draft directories.

Read in sgl-project/sglang at 0.5.23 (the release's own files, python/sglang/srt/): models/llama_eagle.py (fc is built
with a bias in any case; layer 0 without input norm), models/llama_eagle3.py (no q, k, v biases, `bias` would also put
one on o_proj, residual never normed, later layers read `hidden_norm`), models/llama.py (`layers_to_capture` = ids +
1; silu alone; no MLP bias), model_executor/model_runner_components/spec_aux_hidden_state.py (ids are read from
`eagle_config` alone), speculative/eagle_worker_v2.py (the target's embedding always replaces the head's where the
widths are equal; `draft_vocab_size` null = the target's LM head), arg_groups/fields/spec.py (flags).
"""

import shlex

from ...heads.config import Eagle3Config, EagleConfig
from ...heads.convert import from_own
from .features import EVERY_NORM, stated_taps
from .fields import eagle3_fields, layer_fields, state_of, zero_biases
from .plan import Origin, Plan, Request

ORIGIN = Origin(
    "SGLang",
    "0.5.23",
    "015c87262 for the flags; the release names none",
    ("python/sglang/srt/models/llama_eagle.py", "python/sglang/srt/models/llama_eagle3.py"),
    "python/sglang/srt/arg_groups/fields/spec.py",
)
ROPE = frozenset(f"rope {kind}" for kind in ("default", "linear", "dynamic", "yarn", "llama3"))
RUNS = {
    "eagle": frozenset({"layers", "attention_bias", "fc_bias", "head_dim"}) | ROPE,
    "eagle3": (EVERY_NORM - {"norm_before_residual"}) | {"width", "head_dim", "shared_lm_head", "taps"} | ROPE,
}


def origin(kind: str) -> Origin:
    """Return where the facts for a kind of head were read."""
    return ORIGIN


def plan(request: Request) -> Plan:
    """Plan the export of a head that SGLang runs."""
    config = request.head.config
    fields = layer_fields(config, request.head.dtype)
    state = state_of(request.head)
    if isinstance(config, Eagle3Config):
        fields |= eagle3(config)
        tensors = from_own("eagle3-midlayer", state)
        return Plan("eagle3-midlayer", fields, tensors, commands=[serve(request, "EAGLE3")])
    added, changed = {}, {}
    if isinstance(config, EagleConfig) and not config.fc_bias:
        # Without it SGLang's fc would keep the bias it was built with.
        added = zero_biases(request.head, ["fc.bias"], config.hidden_size)
        changed = {"fc_bias": True}
    fields |= {"architectures": ["LlamaForCausalLMEagle"]}
    tensors = from_own("eagle", state | added)
    return Plan("eagle", fields, tensors, added=added, changed=changed, commands=[serve(request, "EAGLE")])


def eagle3(config: Eagle3Config) -> dict[str, object]:
    """Return the fields of an EAGLE-3 config for SGLang.

    Its ids name the output of a layer, ours (and vLLM's) the state entering one, so they are one lower in
    `eagle_config`, the only place where SGLang looks. The ids at the top, which vLLM and spechead read, are ours.
    """
    fields: dict[str, object] = eagle3_fields(config) | {"architectures": ["LlamaForCausalLMEagle3"]}
    taps = stated_taps(config)
    if taps is not None:
        fields["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
        }
    return fields


def serve(request: Request, algorithm: str) -> str:
    """Return the command that serves the target with the exported head: a chain, the root counted."""
    arguments = [
        ("--model-path", request.target_argument),
        ("--speculative-algorithm", algorithm),
        ("--speculative-draft-model-path", request.directory),
        ("--speculative-num-steps", str(request.depth)),
        ("--speculative-eagle-topk", "1"),
        ("--speculative-num-draft-tokens", str(request.depth + 1)),
    ]
    return "python -m sglang.launch_server " + " ".join(f"{flag} {shlex.quote(value)}" for flag, value in arguments)
