"""Where a head comes from: its recipe, the Hub datasets it names, and paths in it that should not be published.

Read by card.py and publish.py from `recipe.yaml`, which training writes beside the head: whatever differs from the
recipes' defaults, so that `--config recipe.yaml` repeats the run.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

RECIPE_FILE = "recipe.yaml"
PROMPTS_FILE = "training_prompts.txt"  # a digest a line
HUB_DATASET = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.\[\]%-]+)?")
LOCAL_FILE = re.compile(r"\.(jsonl?|parquet|csv|txt|yaml)$")


def read_recipe(directory: Path) -> dict[str, Any]:
    """Return a head's recipe, {} where it has none.

    Raises:
        ValueError: If the file is no YAML mapping.
    """
    file = directory / RECIPE_FILE
    if not file.is_file():
        return {}
    try:
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is no YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{file} holds a {type(recipe).__name__}; a recipe is a mapping of arguments.")
    return recipe


def hub_datasets(recipe: dict[str, Any]) -> list[str]:
    """Return the Hub datasets that a recipe trains on, without their splits; files and directories are left out."""
    data = recipe.get("data") or []
    entries = [data] if isinstance(data, str) else [str(entry) for entry in data]
    found = [entry.split(":")[0] for entry in entries if HUB_DATASET.fullmatch(entry) and not is_local(entry)]
    return list(dict.fromkeys(found))


def is_local(entry: str) -> bool:
    """Whether a data source is a file or directory of the training machine."""
    return bool(LOCAL_FILE.search(entry.split(":")[0])) or Path(entry).exists()


def local_paths(recipe: dict[str, Any]) -> list[str]:
    """Return the recipe's values that name absolute or home paths: they tell strangers about the training machine."""
    found = []
    for name, value in recipe.items():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str) and (part.startswith("~") or Path(part).is_absolute()):
                found.append(f"{name}: {part}")
    return found


def read_digests(file: Path) -> set[str]:
    """Return the digests in a `PROMPTS_FILE`."""
    return set(file.read_text(encoding="utf-8").split())


def write_digests(digests: Iterable[str], directory: Path) -> None:
    """Write the `PROMPTS_FILE` of a head's directory, sorted."""
    (directory / PROMPTS_FILE).write_text("".join(f"{digest}\n" for digest in sorted(digests)), encoding="utf-8")


def carry_on(sources: Sequence[Path], output: Path, note: str) -> None:
    """Give a head that was made of others their provenance: the first one's recipe, the digests of all.

    Args:
        sources: directories of the heads it was made of. Unless all have digests, none are written: an incomplete
            file would call prompts unseen that were trained on.
        output: its own directory.
        note: how it was made, the recipe's first line.
    """
    recipe = sources[0] / RECIPE_FILE
    if recipe.is_file():
        (output / RECIPE_FILE).write_text(f"# {note}\n{recipe.read_text(encoding='utf-8')}", encoding="utf-8")
    digests = [read_digests(source / PROMPTS_FILE) for source in sources if (source / PROMPTS_FILE).is_file()]
    if len(digests) == len(sources):
        write_digests(set().union(*digests), output)


def trained_on(directory: Path, digests: Mapping[str, str]) -> list[str]:
    """Return the prompts that a head was trained on, of some that it was measured on.

    Args:
        directory: the head's.
        digests: prompt id -> digest, of a results file.
    """
    file = directory / PROMPTS_FILE
    seen = read_digests(file) if file.is_file() else set()
    return [prompt for prompt, digest in digests.items() if digest in seen]
