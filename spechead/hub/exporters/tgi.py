"""Text Generation Inference: Medusa heads.

Read in huggingface/text-generation-inference at v3.3.7-1 (commit db931fcf): server/text_generation_server/models/
__init__.py (`medusa_num_heads` makes it a Medusa repo; the target is `base_model_name_or_path` at revision main),
layers/speculative.py (heads are used only if config.json has no `architectures` at all), layers/medusa.py (V1: blocks
and an LM head a head; if those are missing V2: one block a head and the target's LM head; a bias on every block in
both; 128 tokens in a step at most), launcher/src/main.rs (`--speculate`).
"""

import shlex
from typing import Any

from torch import Tensor

from ...heads.config import MedusaConfig
from ...heads.convert import from_own
from .fields import state_of, zero_biases
from .plan import Origin, Plan, Request

ORIGIN = Origin(
    "text-generation-inference",
    "3.3.7",
    "db931fcf",
    ("server/text_generation_server/layers/medusa.py", "server/text_generation_server/layers/speculative.py"),
    "launcher/src/main.rs",
)
RUNS = {"medusa": frozenset({"layers"})}
WEIGHTS = "medusa_lm_head.safetensors"


def origin(kind: str) -> Origin:
    """Return where the facts for a kind of head were read."""
    return ORIGIN


def plan(request: Request) -> Plan:
    """Plan the export of Medusa heads: V2 where the LM head is shared and heads have one block, else V1.

    Raises:
        ValueError: If no target is named, which TGI takes from the file.
    """
    config = request.head.config
    if request.target is None:
        raise ValueError(
            "TGI takes the target from the exported config.json, and the head's config names none; give it with "
            "--target <name>."
        )
    plain = medusa_plan(request, copy_lm_head=config.num_hidden_layers > 1, needed_by="TGI's Medusa format (V1)")
    plain.weights = WEIGHTS
    plain.notes = [
        f"TGI loads the target {request.target} at revision main, whatever revision the head was trained for "
        f"({config.target_revision or 'not said'}).",
        "Steps with more than 128 tokens are not speculated.",
    ]
    directory = shlex.quote(request.directory)
    plain.commands = [f"text-generation-launcher --model-id {directory} --speculate {config.num_heads}"]
    return plain


def medusa_plan(request: Request, *, copy_lm_head: bool, needed_by: str) -> Plan:
    """Plan heads in FasterDecoding's layout, with a zero bias where a block has none.

    Args:
        request: The request; its head is MedusaHeads.
        copy_lm_head: Whether a shared LM head is written out once a head (v1), instead of left out (v2).
        needed_by: Who needs that copy, for errors.
    """
    config = request.head.config
    if not isinstance(config, MedusaConfig):
        raise TypeError(f"{type(config).__name__} is no MedusaConfig.")
    state = state_of(request.head)
    added: dict[str, Tensor] = {}
    changed: dict[str, Any] = {}
    if not config.bias:
        names = [name.removesuffix("weight") + "bias" for name in state if ".linear." in name]
        added |= zero_biases(request.head, names, config.hidden_size)
        changed["bias"] = True
    vocab_size = config.vocab_size
    if config.share_lm_head and copy_lm_head:
        table = request.parts.lm_head(needed_by)
        added |= {f"lm_heads.{index}.weight": table.clone() for index in range(config.num_heads)}
        vocab_size = len(table)
        changed |= {"share_lm_head": False, "vocab_size": vocab_size}
    with_lm_heads = copy_lm_head or not config.share_lm_head
    fields = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_hidden_layers,
        "base_model_name_or_path": request.target,
        "hidden_size": config.hidden_size,
        "vocab_size": vocab_size,
    }
    if not with_lm_heads:
        fields["version"] = "2"
    return Plan("medusa", fields, from_own("medusa", state | added), added=added, changed=changed)
