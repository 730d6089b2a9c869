"""A draft model for llama.cpp: a directory that its converter takes, checked against what its loader will ask.

A draft model is an ordinary causal LM, so the files are copied as they are and compared bit for bit. What would only
show when llama-server starts is said here: an architecture that the converter does not know, pickled weights, a
tokenizer that is not the target's.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from ..heads.checkpoint import local_directory
from ..heads.convert import detect_layout
from .exporters.llamacpp import ORIGIN, commands_for

# Of TEXT_MODEL_MAP in conversion/__init__.py, at the commit that exporters/llamacpp.py names.
ARCHITECTURES = (
    "CohereForCausalLM",
    "Ernie4_5_ForCausalLM",
    "Exaone4ForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "GraniteForCausalLM",
    "InternLM2ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Olmo2ForCausalLM",
    "OlmoForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
)
FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "*.jinja",
)
# common/speculative.cpp: ids below this are not compared, and sizes may differ by this much.
FIRST_COMPARED, SIZE_SLACK = 5, 128


@dataclass(frozen=True)
class Copied:
    """What was copied, and how it is used."""

    tensors: int
    commands: list[str]
    notes: list[str]


def is_draft_model(path_or_repo: str | Path, *, revision: str | None = None, token: str | bool | None = None) -> bool:
    """Whether this is a whole causal LM and no head: its architecture says so, and its tensors are in no head layout.

    Args:
        path_or_repo: A directory or a Hub repo.
        revision: Of the repo.
        token: Hub token.
    """
    path = local_copy(path_or_repo, revision=revision, token=token, patterns=["*.json", "*.safetensors"])
    source = read_json(path / "config.json")
    names = [name for file in sorted(path.glob("*.safetensors")) for name in names_in(file)]
    architectures = source.get("architectures") or [""]
    if "draft_vocab_size" in source or not architectures[0].endswith(("ForCausalLM", "LMHeadModel")):
        return False
    try:
        detect_layout(source, names)
    except ValueError:
        return bool(names)
    return False


def export_draft_model(
    draft: str | Path,
    staging: Path,
    output: str,
    *,
    target: str | None,
    revision: str | None,
    token: str | bool | None,
) -> Copied:
    """Copy a draft model to a directory, compare the copy, and say how llama.cpp uses it.

    Args:
        draft: Directory or Hub repo.
        staging: Existing directory to fill.
        output: Where it will lie in the end, for the commands.
        target: Name or directory of the target; its tokenizer is compared where it can be had.
        revision: Of the draft's repo.
        token: Hub token.

    Raises:
        ValueError: If the converter does not know the architecture, a file is missing, or the tokenizers differ.
    """
    path = local_copy(draft, revision=revision, token=token, patterns=list(FILES))
    architectures = read_json(path / "config.json").get("architectures") or []
    if not architectures or architectures[0] not in ARCHITECTURES:
        raise ValueError(
            f"The draft's architecture is {architectures}; the converter of {ORIGIN.name} was checked for "
            f"{', '.join(ARCHITECTURES)}."
        )
    if not (path / "tokenizer.json").is_file() and not (path / "tokenizer.model").is_file():
        raise ValueError(
            f"{draft} has no tokenizer.json or tokenizer.model, which the converter needs; save the tokenizer there."
        )
    for pattern in FILES:
        for file in path.glob(pattern):
            shutil.copyfile(file, staging / file.name)
    tensors = compare_copies(path, staging)
    notes = tokenizer_notes(str(path), target, token)
    depth = 8
    commands = commands_for(target or "<target>", output, "draft-simple", depth, with_target=False)
    return Copied(tensors, commands, notes)


def tokenizer_notes(draft: str, target: str | None, token: str | bool | None) -> list[str]:
    """Compare the tokenizers as llama-server will, as far as the target's can be had.

    Raises:
        ValueError: If they differ, naming the first id.
    """
    if target is None:
        return [
            "The target was not given: the tokenizers were not compared; llama-server refuses a draft with another."
        ]
    try:
        theirs = AutoTokenizer.from_pretrained(target, token=token)
    except (OSError, ValueError) as error:
        return [f"The target's tokenizer cannot be had ({type(error).__name__}); it was not compared."]
    ours = AutoTokenizer.from_pretrained(draft)
    problem = tokenizer_problem(ours, theirs)
    if problem:
        raise ValueError(f"llama-server would refuse this draft: {problem}.")
    sizes = [int(AutoConfig.from_pretrained(name).get_text_config().vocab_size) for name in (draft, target)]
    if abs(sizes[0] - sizes[1]) > SIZE_SLACK:
        raise ValueError(
            f"llama-server would refuse this draft: vocabularies of {sizes[0]} and {sizes[1]} rows differ by more "
            f"than {SIZE_SLACK}."
        )
    return []


def tokenizer_problem(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """Say how two tokenizers differ in the ids that llama.cpp compares, or None."""
    for index in range(FIRST_COMPARED, min(len(ours), len(theirs))):
        mine, other = ours.convert_ids_to_tokens(index), theirs.convert_ids_to_tokens(index)
        if mine != other:
            return f"token {index} is {mine!r} in the draft and {other!r} in the target"
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name} is {getattr(ours, name)} in the draft and {getattr(theirs, name)} in the target"
    return None


def compare_copies(source: Path, copy: Path) -> int:
    """Return the number of tensors, all equal in both directories.

    Raises:
        ValueError: If there are none, or one differs.
    """
    count = 0
    for file in sorted(copy.glob("*.safetensors")):
        with safe_open(source / file.name, framework="pt") as ours, safe_open(file, framework="pt") as theirs:
            for name in ours.keys():  # noqa: SIM118  # a safetensors handle is no mapping
                if not torch.equal(ours.get_tensor(name), theirs.get_tensor(name)):
                    raise ValueError(f"Nothing was exported: {name} differs after copying {file.name}.")
                count += 1
    if not count:
        raise ValueError(f"{source} holds no safetensors; save the model with save_pretrained first.")
    return count


def local_copy(
    path_or_repo: str | Path, *, revision: str | None, token: str | bool | None, patterns: list[str]
) -> Path:
    """Return a directory: the given one, or a download of the files that match.

    Raises:
        ValueError: If a path is given that is no directory.
    """
    path = local_directory(path_or_repo)
    if path is None:
        path = Path(snapshot_download(str(path_or_repo), revision=revision, token=token, allow_patterns=patterns))
    return path


def names_in(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file; [] if it cannot be read (load_head says why)."""
    try:
        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    except (SafetensorError, OSError):
        return []


def read_json(file: Path) -> dict[str, Any]:
    """Return a parsed JSON object; {} if there is none (load_head says so)."""
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
