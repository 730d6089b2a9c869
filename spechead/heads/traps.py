"""The known traps of head checkpoints, each with its own name: mistakes that load in some engine and draft badly.

`find_traps` looks at a checkpoint without building it. `load_head` raises on errors and logs warnings; `spechead
inspect` shows all. Reports behind the checks: SafeAILab/EAGLE, vLLM, SGLang, speculators and SpecForge issues.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from . import vocab
from .base_config import HeadConfig
from .config import Eagle3Config, EagleConfig, MedusaConfig
from .convert import OWN
from .published import ambiguous_taps

Level = Literal["error", "warning", "note"]
SGLANG_ARCHITECTURES = {
    "eagle": "LlamaForCausalLMEagle",
    "eagle3": "LlamaForCausalLMEagle3",
    "eagle3-midlayer": "LlamaForCausalLMEagle3",
}


@dataclass(frozen=True)
class Trap:
    """One finding: its name, how bad it is, and what to do."""

    name: str
    level: Level
    message: str


def find_traps(
    layout: str,
    source: Mapping[str, Any],
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    *,
    taps_stated: bool = False,
) -> list[Trap]:
    """List the traps in a checkpoint.

    Args:
        layout: Its layout (see `convert.LAYOUTS`).
        source: Its config.json.
        config: The own config made for it.
        tensors: Its tensors under own names.
        taps_stated: Whether the caller said the taps, so that the file's own cannot mislead.
    """
    traps = [*_architectures(layout, source)]
    if isinstance(config, MedusaConfig):
        return [*traps, *_medusa(layout, source, config, tensors)]
    traps += _bias(layout, source, config, tensors)
    if isinstance(config, Eagle3Config):
        if layout != OWN and not taps_stated:
            ambiguous = ambiguous_taps(source, config.target_num_layers)
            traps += [Trap("tap-convention", "error", ambiguous)] if ambiguous else []
        traps += _flags(layout, source)
        traps += _lm_head(layout, source, config, tensors)
        traps += _vocabulary(config, tensors)
    return traps


def _architectures(layout: str, source: Mapping[str, Any]) -> Iterator[Trap]:
    names = list(source.get("architectures") or ())
    if layout == "medusa" and names:
        yield Trap(
            "tgi-architectures",
            "warning",
            f"config.json has architectures={names}: TGI then ignores the Medusa heads without a word. Leave the "
            "field out for TGI.",
        )
    if layout == "medusa-vllm" and names not in ([], ["MedusaModel"]):
        yield Trap(
            "vllm-architectures",
            "warning",
            f'config.json has architectures={names}: vLLM would build that model; it needs ["MedusaModel"].',
        )
    wanted = SGLANG_ARCHITECTURES.get(layout)
    if wanted and names and wanted not in names:
        yield Trap(
            "sglang-architectures",
            "note",
            f"config.json has architectures={names}; SGLang loads this head only as {wanted}.",
        )


def _medusa(
    layout: str, source: Mapping[str, Any], config: MedusaConfig, tensors: Mapping[str, Tensor]
) -> Iterator[Trap]:
    stated = source.get("medusa_num_heads", source.get("num_heads"))
    held = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    if stated is not None and stated != held:
        message = f"config.json says {stated} Medusa heads, the file holds {held}; "
        # The published FasterDecoding configs say 2 and their files hold 5; their own loader ignores the config.
        if layout == "medusa":
            yield Trap("head-count", "warning", message + "the file decides.")
        else:
            yield Trap("head-count", "error", message + "make them agree.")
    if layout == "medusa-vllm" and config.bias and not source.get("medusa_fc_bias"):
        yield Trap(
            "medusa-bias-dropped",
            "warning",
            "The file has biases but config.json lacks medusa_fc_bias=true: vLLM drops them, spechead keeps them.",
        )


def _bias(
    layout: str, source: Mapping[str, Any], config: EagleConfig | Eagle3Config, tensors: Mapping[str, Tensor]
) -> Iterator[Trap]:
    held = "fc.bias" in tensors
    stated = config.fc_bias if layout == OWN else source.get("bias")
    if stated is True and not held:
        yield Trap(
            "fc-bias-missing",
            "error",
            "config.json says that fc has a bias, the file has no fc.bias; the reference loader would leave it at "
            "random values. Say that there is none, or add the tensor.",
        )
    elif stated is False and held:
        yield Trap(
            "fc-bias-present",
            "error",
            "config.json says that fc has no bias, the file has fc.bias; some loaders would drop it. Say that there "
            "is one, or remove the tensor.",
        )
    elif layout == "eagle" and held:
        yield Trap(
            "fc-bias-engines", "note", "fc has a bias: vLLM versions that build fc without one drop it without a word."
        )
    elif layout == "eagle" and stated is None:
        yield Trap(
            "fc-bias-unstated",
            "warning",
            "The file has no fc.bias and config.json does not say bias=false: EAGLE's own loader and SGLang would use "
            "a random one. spechead uses none.",
        )


def _flags(layout: str, source: Mapping[str, Any]) -> Iterator[Trap]:
    if layout == "speculators" and "norm_before_residual" not in source:
        yield Trap(
            "norm-before-residual-unstated",
            "warning",
            "config.json does not say norm_before_residual: vLLM takes true, speculators false. spechead takes false, "
            "as the format's own library.",
        )
    if layout == "eagle3-midlayer" and source.get("norm_output"):
        yield Trap(
            "norm-output-meaning",
            "warning",
            "norm_output=true: SpecForge's flag of this name says that the LM head reads the normed state; vLLM and "
            "speculators also hand the normed state to the next depth. spechead does as they do.",
        )


def _lm_head(
    layout: str, source: Mapping[str, Any], config: Eagle3Config, tensors: Mapping[str, Tensor]
) -> Iterator[Trap]:
    if source.get("tie_word_embeddings"):
        yield Trap(
            "tied-head",
            "error",
            f"tie_word_embeddings=true: transformers and SGLang would replace the head's LM head "
            f"({config.draft_vocab_size} rows) by the embedding ({config.vocab_size} rows). Set it to false.",
        )
    # SGLang takes a null draft_vocab_size to mean that the target's LM head is used.
    stated = source.get("share_lm_head") if layout == OWN else source.get("draft_vocab_size", 0) is None
    if "lm_head.weight" not in tensors and not (config.share_lm_head and stated):
        yield Trap(
            "lm-head-missing",
            "error",
            "The file has no lm_head.weight and its config does not say that the target's is shared; engines would "
            f"draft from random logits. Add the tensor ({config.draft_vocab_size} rows).",
        )


def _vocabulary(config: Eagle3Config, tensors: Mapping[str, Tensor]) -> Iterator[Trap]:
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    size, pruned = config.draft_vocab_size, config.draft_vocab_size < config.vocab_size
    if d2t is None:
        if pruned:
            yield Trap(
                "d2t-missing",
                "error",
                f"The draft vocabulary has {size} of {config.vocab_size} ids and the file has no d2t; engines would "
                "take the first ids. Add d2t.",
            )
        return
    if len(d2t) != size:
        yield Trap("d2t-length", "error", f"d2t has {len(d2t)} entries, draft_vocab_size is {size}; make them agree.")
        return
    try:
        vocab.check_maps(d2t, t2d, config.vocab_size)
    except ValueError as error:
        absolute = vocab.looks_absolute(d2t, t2d, config.vocab_size)
        yield Trap("d2t-absolute" if absolute else "d2t-broken", "error", str(error))
        return
    if pruned and not d2t.any():
        yield Trap(
            "d2t-unset",
            "warning",
            f"d2t is all zeros: the head drafts only the first {size} ids of the target, as a map that was never set.",
        )
