"""FasterDecoding's Medusa repository: heads in its v1 layout, for its own code and for TensorRT-LLM.

Read in FasterDecoding/Medusa at e2a5d20: medusa/model/medusa_model.py. Its loader opens `medusa_lm_head.pt` and
nothing else, builds five heads whatever the config says, one LM head a head, and aliases one block module for all
layers of a head, so that only single-block heads survive it. The file is a pickle of tensors alone.
"""

import shlex

from ...heads.config import MedusaConfig
from .plan import Origin, Plan, Request
from .tgi import medusa_plan

ORIGIN = Origin(
    "FasterDecoding/Medusa", None, "e2a5d20c0", ("medusa/model/medusa_model.py",), "medusa/inference/cli.py"
)
RUNS: dict[str, frozenset[str]] = {"medusa": frozenset()}
WEIGHTS, BUILT = "medusa_lm_head.pt", 5


def origin(kind: str) -> Origin:
    """Return where the facts for a kind of head were read."""
    return ORIGIN


def plan(request: Request) -> Plan:
    """Plan the export of Medusa heads as `medusa_lm_head.pt`; a shared LM head is copied once a head.

    Raises:
        ValueError: If no target is named, which the loader takes from the file.
    """
    config = request.head.config
    if request.target is None:
        raise ValueError(
            "Medusa's loader takes the target from the exported config.json, and the head's config names none; "
            "give it with --target <name>."
        )
    planned = medusa_plan(request, copy_lm_head=True, needed_by="Medusa's v1 layout")
    planned.weights = WEIGHTS
    planned.commands = [f"python -m medusa.inference.cli --model {shlex.quote(request.directory)}"]
    planned.notes = [
        "The file is a pickle, the only thing that Medusa's loader opens; spechead reads it back with "
        "load_head(..., allow_pickle=True)."
    ]
    if isinstance(config, MedusaConfig) and config.num_heads != BUILT:
        planned.notes.append(
            f"Medusa's loader builds {BUILT} heads whatever the config says; with {config.num_heads} heads "
            + ("the rest drop out." if config.num_heads > BUILT else "the others stay random and draft noise.")
        )
    return planned
