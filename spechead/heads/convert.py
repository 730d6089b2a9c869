"""Tensor names of the published head layouts, to spechead's own names and back. Pure functions over state dicts.

Names and shapes were read in the projects' own sources:
  medusa           FasterDecoding/Medusa e2a5d20 medusa/model/medusa_model.py (v1: an LM head per head, `.pt`; merged
                   checkpoints: prefix `medusa_head.`) and medusa/train/train_legacy.py (v2: residual blocks alone)
  medusa-vllm      vllm-project/vllm 01dbb08 vllm/model_executor/models/medusa.py
  eagle            SafeAILab/EAGLE cb7e084 eagle/model/cnets1.py (EAGLE-1 and EAGLE-2)
  eagle3-midlayer  SafeAILab/EAGLE cb7e084 eagle/model/cnets.py; sgl-project/sglang 03d5a77
                   python/sglang/srt/models/llama_eagle3.py; sgl-project/SpecForge a6b6b02
                   specforge/export/to_sglang.py
  eagle3           vllm-project/vllm 00bd149 vllm/model_executor/models/llama_eagle3.py;
                   NVIDIA/Model-Optimizer 0371364 modelopt/torch/export/plugins/hf_spec_export.py (no t2d)
  speculators      vllm-project/speculators c05b95b src/speculators/models/eagle3/{config,core}.py, model.py
Own names are those of the modules in this package: EAGLE-3 as vLLM writes it, Medusa `blocks.{head}.{layer}.linear.*`
and `lm_heads.{head}.weight`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

OWN = "spechead"
LAYOUTS = (OWN, "medusa", "medusa-vllm", "eagle", "eagle3-midlayer", "eagle3", "speculators")
MEDUSA_LAYOUTS = ("medusa", "medusa-vllm")
EAGLE3_LAYOUTS = ("eagle3-midlayer", "eagle3", "speculators")

MEDUSA_BLOCK = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
MEDUSA_LM_HEAD = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.weight")
VLLM_BLOCK = re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
VLLM_LM_HEAD = re.compile(r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight")
OWN_BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)")
OWN_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def detect_layout(config: Mapping[str, Any], names: Iterable[str]) -> str:
    """Say which layout a checkpoint is in, from its config and the names of its tensors.

    Args:
        config: The parsed config.json.
        names: Names of the tensors in the file.

    Returns:
        One of `LAYOUTS`.

    Raises:
        ValueError: If it is none of them, or a kind of head that spechead does not have.
    """
    names = set(names)
    if str(config.get("model_type", "")).startswith("spechead-"):
        return OWN
    kind = config.get("speculators_model_type")
    if kind is None and "dflash_config" in config:
        kind = "dflash"
    if kind not in (None, "eagle3"):
        raise ValueError(f"This is a {kind} checkpoint; spechead loads Medusa, EAGLE-1/2 and EAGLE-3 heads.")
    if kind == "eagle3":
        return "speculators"
    if any(VLLM_BLOCK.fullmatch(name) for name in names):
        return "medusa-vllm"
    if any(MEDUSA_BLOCK.fullmatch(name) for name in names):
        return "medusa"
    if any(name.startswith("midlayer.") for name in names):
        return "eagle3-midlayer"
    if "draft_vocab_size" in config or names & {"d2t", "norm.weight", "layers.0.hidden_norm.weight"}:
        return "eagle3"
    if any(name.startswith(("fc.", "layers.0.self_attn.")) for name in names):
        return "eagle"
    first = ", ".join(sorted(names)[:5]) or "no tensors"
    raise ValueError(
        f"The checkpoint is in no layout that spechead knows (it holds {first}). Known are: {', '.join(LAYOUTS)}."
    )


def wanted_names(layout: str, names: Iterable[str]) -> list[str]:
    """Return the tensors that belong to the head: all, but of a merged Medusa checkpoint those of the heads."""
    names = sorted(names)
    merged = [name for name in names if name.startswith("medusa_head.")]
    return merged if layout == "medusa" and merged else names


def to_own(layout: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a layout to spechead's own names; names it does not know stay as they are.

    Args:
        layout: One of `LAYOUTS`.
        tensors: Tensors under the layout's names.

    Returns:
        The same tensors under own names.

    Raises:
        ValueError: If two tensors would get the same name.
    """
    rename = _TO_OWN[layout]
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = rename(name)
        if own in renamed:
            raise ValueError(f"Two tensors of the checkpoint stand for {own!r}; the second is {name!r}.")
        renamed[own] = tensor
    return renamed


def from_own(layout: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename own tensors to a layout's names (the inverse of `to_own`).

    Args:
        layout: One of `LAYOUTS`.
        tensors: A head's state dict.

    Returns:
        The same tensors under the layout's names.
    """
    if layout == "medusa":
        layers = count_blocks(tensors)[1]
        return {_own_to_medusa(name, layers): tensor for name, tensor in tensors.items()}
    rename = _FROM_OWN[layout]
    return {rename(name): tensor for name, tensor in tensors.items()}


def count_blocks(tensors: Iterable[str]) -> tuple[int, int]:
    """Count the Medusa heads and the residual blocks of each, from own names.

    Returns:
        K and L; the published configs say other numbers than the files hold, so files decide.

    Raises:
        ValueError: If the heads are not numbered 0..K-1, or differ in their blocks.
    """
    found: dict[int, set[int]] = {}
    for name in tensors:
        match = OWN_BLOCK.fullmatch(name)
        if match and match[3] == "weight":
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    heads = sorted(found)
    layers = [sorted(found[head]) for head in heads]
    if not heads or heads != list(range(len(heads))) or any(row != list(range(len(layers[0]))) for row in layers):
        raise ValueError(
            f"The Medusa heads in the file are not complete: heads {heads} have blocks {layers}; both must be "
            "numbered from 0 without gaps, with equally many blocks a head."
        )
    return len(heads), len(layers[0])


def count_layers(tensors: Iterable[str]) -> int:
    """Count the decoder layers of an EAGLE head, from own names.

    Raises:
        ValueError: If they are not numbered from 0 without gaps.
    """
    found = sorted({int(name.split(".")[1]) for name in tensors if re.match(r"layers\.\d+\.", name)})
    if not found or found != list(range(len(found))):
        raise ValueError(f"The decoder layers in the file are numbered {found}; they must run from 0 without gaps.")
    return len(found)


def _medusa_to_own(name: str) -> str:
    block, lm_head = MEDUSA_BLOCK.fullmatch(name), MEDUSA_LM_HEAD.fullmatch(name)
    if block:
        return f"blocks.{block[1]}.{block[2]}.linear.{block[3]}"
    return f"lm_heads.{lm_head[1]}.weight" if lm_head else name


def _own_to_medusa(name: str, layers: int) -> str:
    block, lm_head = OWN_BLOCK.fullmatch(name), OWN_LM_HEAD.fullmatch(name)
    if block:
        return f"{block[1]}.{block[2]}.linear.{block[3]}"
    return f"{lm_head[1]}.{layers}.weight" if lm_head else name


def _vllm_to_own(name: str) -> str:
    block, lm_head = VLLM_BLOCK.fullmatch(name), VLLM_LM_HEAD.fullmatch(name)
    if block:
        return f"blocks.{block[1]}.{block[2]}.linear.{block[3]}"
    return f"lm_heads.{lm_head[1]}.weight" if lm_head else name


def _own_to_vllm(name: str) -> str:
    block = OWN_BLOCK.fullmatch(name)
    return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}" if block else name


def _same(name: str) -> str:
    return name


def _midlayer_to_own(name: str) -> str:
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _own_to_midlayer(name: str) -> str:
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


_TO_OWN: dict[str, Callable[[str], str]] = {
    OWN: _same,
    "medusa": _medusa_to_own,
    "medusa-vllm": _vllm_to_own,
    "eagle": _same,
    "eagle3-midlayer": _midlayer_to_own,
    "eagle3": _same,
    "speculators": _same,
}
_FROM_OWN: dict[str, Callable[[str], str]] = {
    OWN: _same,
    "medusa-vllm": _own_to_vllm,
    "eagle": _same,
    "eagle3-midlayer": _own_to_midlayer,
    "eagle3": _same,
    "speculators": _same,
}
