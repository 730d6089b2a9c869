"""llama.cpp: EAGLE-3 heads as a directory that its converter takes, with the commands that convert and serve.

Read in ggml-org/llama.cpp at 0c1e57098: conversion/llama.py (`draft_vocab_size` and one layer make it an EAGLE-3
head; `midlayer.` names; tokenizer, vocabulary and default taps from --target-model-dir; explicit ids are taken as
they are), src/models/eagle3.cpp (one layer, no biases, no norms on queries and keys; `norm_before_fc` and
`norm_before_residual`; embedding and LM head from the target where the file has none; hands on the state before the
norm), common/speculative.cpp (id k = the input of layer k, n = before the final norm), common/arg.cpp (flags). For
draft models see draft_model.py.
"""

import shlex

from ...heads.config import Eagle3Config
from ...heads.convert import from_own
from .fields import eagle3_fields, layer_fields, state_of
from .plan import Origin, Plan, Request

ORIGIN = Origin(
    "llama.cpp",
    None,
    "0c1e57098",
    ("conversion/llama.py", "src/models/eagle3.cpp", "common/speculative.cpp"),
    "common/arg.cpp",
)
ROPE = frozenset(f"rope {kind}" for kind in ("default", "linear", "yarn", "llama3"))
RUNS = {
    "eagle3": ROPE
    | {"width", "norm_before_residual", "norm_before_fc", "own_embeddings", "head_dim", "shared_lm_head"}
    | {"taps", "first_tap"}
}


def origin(kind: str) -> Origin:
    """Return where the facts for a kind of head were read."""
    return ORIGIN


def plan(request: Request) -> Plan:
    """Plan the directory that `convert_hf_to_gguf.py` takes."""
    config = request.head.config
    if not isinstance(config, Eagle3Config):
        raise TypeError(f"{type(config).__name__} is no Eagle3Config.")
    fields = layer_fields(config, request.head.dtype) | eagle3_fields(config)
    fields["architectures"] = ["LlamaForCausalLMEagle3"]
    tensors = from_own("eagle3-midlayer", state_of(request.head))
    notes = ["The converter needs a llama.cpp of commit 0c1e57098 or later, and the target as a directory."]
    commands = commands_for(
        request.target_argument, request.directory, "draft-eagle3", request.depth, with_target=True
    )
    return Plan("eagle3-midlayer", fields, tensors, commands=commands, notes=notes)


def commands_for(target: str, draft: str, method: str, depth: int, *, with_target: bool) -> list[str]:
    """Return the three commands for a target and a draft, both directories of the transformers kind."""
    target, draft = shlex.quote(target), shlex.quote(draft)
    needs = f" --target-model-dir {target}" if with_target else ""
    return [
        f"python convert_hf_to_gguf.py {target} --outtype bf16 --outfile target.gguf",
        f"python convert_hf_to_gguf.py {draft}{needs} --outtype bf16 --outfile draft.gguf",
        f"llama-server -m target.gguf --spec-draft-model draft.gguf --spec-type {method} --spec-draft-n-max {depth}",
    ]
