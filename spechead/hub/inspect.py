"""Say what a head checkpoint is and which known traps it holds, without trusting any of it.

Called by `spechead inspect`. The report is built from the same readers and checks as `load_head`, so what is called
sound here loads there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ..heads import vocab
from ..heads.base import check_pair
from ..heads.base_config import HeadConfig
from ..heads.checkpoint import Checkpoint, read_checkpoint, resolve
from ..heads.config import DraftLayerConfig, Eagle3Config, MedusaConfig
from ..heads.convert import OWN
from ..heads.fingerprint import describe_mismatch
from ..heads.load import build_head, make_config
from ..heads.published import complete
from ..heads.traps import Trap, find_traps

LAYOUT_NAMES = {
    OWN: "spechead",
    "medusa": "FasterDecoding Medusa",
    "medusa-vllm": "vLLM Medusa",
    "eagle": "EAGLE-1/2",
    "eagle3-midlayer": "EAGLE-3 with midlayer.* (EAGLE, SpecForge, SGLang)",
    "eagle3": "EAGLE-3 with layers.0.* (vLLM, ModelOpt)",
    "speculators": "speculators eagle3",
}


@dataclass(frozen=True)
class HeadReport:
    """What `inspect_head` found.

    Attributes:
        path: The directory that was read.
        facts: What the head is, in reading order: label to text.
        flags: The switches that change its computation.
        traps: Every trap found, errors first; a checkpoint that cannot be read has one.
    """

    path: Path
    facts: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    traps: tuple[Trap, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether `load_head` would refuse it."""
        return any(trap.level == "error" for trap in self.traps)


def inspect_head(
    path_or_repo: str | Path,
    target_config: PreTrainedConfig | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    allow_pickle: bool = False,
) -> HeadReport:
    """Inspect a head checkpoint.

    Args:
        path_or_repo: A directory or a Hub repo id.
        target_config: Config of the target to check the pair with; its weights are not needed.
        revision: Branch, tag or commit of the repo.
        token: Hub token.
        allow_pickle: Whether weights that exist only as pickles may be read (tensors alone).

    Returns:
        The report; broken checkpoints are reported, not raised.

    Raises:
        ValueError: If there is no such directory.
    """
    path = resolve(path_or_repo, revision=revision, token=token, allow_pickle=allow_pickle)
    try:
        checkpoint = read_checkpoint(path, allow_pickle=allow_pickle)
    except ValueError as error:
        return HeadReport(path, traps=(Trap("unreadable", "error", str(error)),))
    facts = {"layout": LAYOUT_NAMES[checkpoint.layout]}
    try:
        config = make_config(checkpoint, target_config)
    except ValueError as error:
        return HeadReport(path, facts, traps=(Trap("config", "error", str(error)),))
    traps = find_traps(checkpoint.layout, checkpoint.source, config, checkpoint.tensors)
    traps += build_problems(config, checkpoint)
    if target_config is not None:
        traps += pair_problems(config, target_config)
    order = {"error": 0, "warning": 1, "note": 2}
    facts |= describe(config, checkpoint)
    return HeadReport(path, facts, flags_of(config), tuple(sorted(traps, key=lambda trap: order[trap.level])))


def build_problems(config: HeadConfig, checkpoint: Checkpoint) -> list[Trap]:
    """Build the head as `load_head` does and report the tensors that do not fit."""
    try:
        build_head(config, complete(config, checkpoint.source, checkpoint.tensors), checkpoint.path.name)
    except ValueError as error:
        return [Trap("tensors", "error", str(error))]
    return []


def pair_problems(config: HeadConfig, target_config: PreTrainedConfig) -> list[Trap]:
    """Report why a head does not fit a target, or was trained for another one."""
    try:
        check_pair(config, target_config)
    except ValueError as error:
        return [Trap("pair", "error", str(error))]
    mismatch = describe_mismatch(config, target_config)
    return (
        [Trap("other-target", "warning", f"The head may draft badly with this target: {mismatch}.")]
        if mismatch
        else []
    )


def describe(config: HeadConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """Return what the head is, label to text."""
    tensors = checkpoint.tensors
    facts = {"kind": kind_of(config), "hidden size": str(config.hidden_size)}
    if isinstance(config, DraftLayerConfig):
        facts["attention"] = (
            f"{config.num_attention_heads} heads, {config.num_key_value_heads} key-value heads of {config.head_dim}"
        )
        facts["intermediate size"] = str(config.intermediate_size)
        facts["target hidden size"] = str(config.target_hidden_size)
    facts["taps"] = describe_taps(config)
    facts["vocabulary"] = describe_vocabulary(config, tensors)
    facts["trained positions"] = str(config.trained_positions or "not said")
    facts["trained for"] = config.target_name or "not said"
    parameters = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    facts["memory"] = (
        f"{checkpoint.size / 2**20:.1f} MiB as saved, {parameters / 1e6:.2f} M parameters ({', '.join(dtypes)})"
    )
    if isinstance(config, DraftLayerConfig):
        values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        facts["draft cache"] = f"{values} values a position (keys and values)"
    return facts


def kind_of(config: HeadConfig) -> str:
    """Return what kind of head a config describes, in words."""
    if isinstance(config, MedusaConfig):
        return f"Medusa, {config.num_heads} heads of {config.num_hidden_layers} residual block(s)"
    name = "EAGLE-3" if isinstance(config, Eagle3Config) else "EAGLE-1/2"
    return f"{name} draft, {config.num_hidden_layers} layer(s), {config.layer_style} style"


def describe_taps(config: HeadConfig) -> str:
    """Return the taps in words."""
    if config.taps is not None:
        last = config.target_num_layers
        return ", ".join(f"{tap} (after the final norm)" if tap == last else str(tap) for tap in config.taps)
    default = "2, n//2, n-3" if isinstance(config, Eagle3Config) else "n (after the final norm)"
    return f"default: {default} of a target of n layers"


def describe_vocabulary(config: HeadConfig, tensors: Mapping[str, Tensor]) -> str:
    """Return the vocabulary and what its map is like, in words."""
    if config.vocab_size == 0:
        return "the target's"
    if not isinstance(config, Eagle3Config) or config.draft_vocab_size == config.vocab_size:
        return f"{config.vocab_size}, the target's"
    sizes = f"{config.draft_vocab_size} of {config.vocab_size}"
    d2t = tensors.get("d2t")
    if d2t is None or d2t.numel() == 0:
        return f"{sizes}, no map"
    if vocab.looks_absolute(d2t, tensors.get("t2d"), config.vocab_size):
        return f"{sizes}, d2t holds absolute ids"
    ids = vocab.ids_from_offsets(d2t.long())
    problem = vocab.map_problem(ids, config.vocab_size)
    state = f"the map {problem}" if problem else f"ascending, target ids {int(ids[0])} to {int(ids[-1])}"
    mask = "t2d mask" if "t2d" in tensors else "no t2d"
    return f"{sizes}, d2t holds offsets, {state}, {mask}"


def flags_of(config: HeadConfig) -> dict[str, str]:
    """Return the switches of a config that change the computation."""
    names = ["share_lm_head", "logit_scale"]
    if isinstance(config, MedusaConfig):
        names += ["bias"]
    if isinstance(config, DraftLayerConfig):
        names += ["share_embeddings", "fc_bias", "attention_bias", "mlp_bias", "hidden_act", "rms_norm_eps"]
    if isinstance(config, Eagle3Config):
        names += ["norm_before_residual", "norm_output", "norm_before_fc", "fc_norm"]
    flags = {name: str(getattr(config, name)) for name in names}
    if isinstance(config, DraftLayerConfig):
        rope: dict[str, Any] = config.rope_parameters or {}
        flags["rope"] = ", ".join(f"{key}={value}" for key, value in sorted(rope.items()))
    return flags
