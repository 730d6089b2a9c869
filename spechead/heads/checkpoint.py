"""Read a head checkpoint from a directory or the Hub: its config.json and its tensors, no code, no pickle unasked.

Called by `load_head` and `spechead inspect`. Safetensors are read where there are any; the pickled files of older
checkpoints only with `allow_pickle=True`, and then with torch's `weights_only=True`.
"""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import logging

from .convert import detect_layout, to_own, wanted_names

logger = logging.get_logger(__name__)

SAFE_PATTERNS = ["*.json", "*.safetensors"]
PICKLE_PATTERNS = ["medusa_lm_head.pt", "pytorch_model*.bin"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read: where from, which layout, config.json, tensors under own names."""

    path: Path
    layout: str
    source: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def local_directory(path_or_repo: str | Path) -> Path | None:
    """Return a directory, or None for what can only be a Hub repo.

    Raises:
        ValueError: If a path is given that is no directory.
    """
    path, text = Path(path_or_repo).expanduser(), str(path_or_repo)
    if path.is_dir():
        return path
    if path.exists() or text.startswith((".", "~")) or path.is_absolute() or text.count("/") > 1:
        raise ValueError(f"{text} is no directory; give a directory with config.json and weights, or a Hub repo id.")
    return None


def resolve(
    path_or_repo: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    allow_pickle: bool = False,
    **hub_kwargs: Any,
) -> Path:
    """Return a local directory: the given one, or a download of a Hub repo (honours HF_HUB_OFFLINE and HF_TOKEN).

    Args:
        path_or_repo: A directory, or a repo id.
        revision: Branch, tag or commit of the repo.
        token: Hub token.
        allow_pickle: Whether pickled weights are downloaded too.
        **hub_kwargs: More of `huggingface_hub.snapshot_download`'s arguments.

    Raises:
        ValueError: If a path is given that is no directory.
    """
    path, text = local_directory(path_or_repo), str(path_or_repo)
    if path is not None:
        return path
    patterns = SAFE_PATTERNS + (PICKLE_PATTERNS if allow_pickle else [])
    try:
        return Path(snapshot_download(text, revision=revision, token=token, allow_patterns=patterns, **hub_kwargs))
    except (OSError, HTTPError, HFValidationError):
        logger.error("%s is no directory here, so it was looked up on the Hub, which failed:", text)
        raise


def read_checkpoint(path: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Read config.json and the head's tensors, on the CPU, under own names.

    Args:
        path: A directory.
        allow_pickle: Whether pickled weights may be read where there are no safetensors.

    Raises:
        ValueError: If a file is missing or cannot be read, or the layout is not known.
    """
    source = read_config(path)
    safe = [file for file in sorted(path.glob("*.safetensors")) if not file.name.startswith("adapter_")]
    if safe:
        return read_safetensors(path, source, safe)
    pickles = sorted({file for pattern in PICKLE_PATTERNS for file in path.glob(pattern)})
    if not pickles:
        raise ValueError(f"{path} holds no weights; expected model.safetensors or medusa_lm_head.safetensors.")
    names = ", ".join(file.name for file in pickles)
    if not allow_pickle:
        raise ValueError(
            f"{path} holds its weights only as pickles ({names}), which can run code when they are opened. If you "
            "trust it, pass allow_pickle=True: torch.load then reads tensors alone (weights_only=True)."
        )
    tensors: dict[str, Tensor] = {}
    for file in pickles:
        tensors |= read_pickle(file)
    layout = detect_layout(source, tensors)
    wanted = {name: tensors[name] for name in wanted_names(layout, tensors)}
    return Checkpoint(path, layout, source, to_own(layout, wanted))


def read_config(path: Path) -> dict[str, Any]:
    """Return the parsed config.json of a directory.

    Raises:
        ValueError: If there is none, or it is not a JSON object.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} has no config.json; a head checkpoint is a directory with config.json and weights.")
    try:
        source = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(source, dict):
        raise ValueError(f"{file} holds a {type(source).__name__}; it must hold one JSON object.")
    return source


def read_safetensors(path: Path, source: dict[str, Any], files: list[Path]) -> Checkpoint:
    """Read the head's tensors out of safetensors files (of a merged checkpoint only the head's)."""
    where: dict[str, Path] = {}
    try:
        for file in files:
            with safe_open(file, framework="pt") as handle:
                where |= dict.fromkeys(handle.keys(), file)
        layout = detect_layout(source, where)
        tensors: dict[str, Tensor] = {}
        for file in files:
            with safe_open(file, framework="pt") as handle:
                for name in wanted_names(layout, where):
                    if where[name] == file:
                        tensors[name] = handle.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"A safetensors file in {path} cannot be read: {error}.") from error
    return Checkpoint(path, layout, source, to_own(layout, tensors))


def read_pickle(file: Path) -> dict[str, Tensor]:
    """Return the state dict in a pickled file.

    Raises:
        ValueError: If it holds anything but tensors under names.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file} cannot be read as a file of tensors alone: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} does not hold a state dict of tensors.")
    return state
