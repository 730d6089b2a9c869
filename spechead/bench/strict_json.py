"""JSON files made of strict dataclasses: written whole or not at all, read with every field checked."""

import json
import os
import tempfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write a JSON file; the old one is replaced only once the new one is whole on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path, schema: int) -> dict[str, Any]:
    """Read a JSON object of this schema; anything else is a ValueError."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(raw, dict) or raw.get("schema") != schema:
        found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        raise ValueError(f"its schema is {found}, this version reads {schema}")
    return raw


def build(kind: type[T], raw: dict[str, Any]) -> T:
    """Make a strict dataclass, and those inside it, of what JSON holds.

    Raises:
        ValueError: for a field that the dataclass does not have.
        TypeError: for one that it lacks.
        StrictDataclassError: for one of another type.
    """
    hints = get_type_hints(kind)
    if unknown := set(raw) - {item.name for item in fields(kind)}:  # type: ignore[arg-type]  # kind is a dataclass
        raise ValueError(f"{kind.__name__} has no field {sorted(unknown)[0]!r}")
    values = {}
    for name, value in raw.items():
        inner = _dataclass_in(hints[name])
        if inner is None or value is None:
            values[name] = value
        else:
            values[name] = [build(inner, each) for each in value] if isinstance(value, list) else build(inner, value)
    return kind(**values)


def _dataclass_in(hint: Any) -> type | None:
    """Return the dataclass that a type hint is, or holds in a union or a list."""
    if is_dataclass(hint):
        return hint if isinstance(hint, type) else None
    return next((found for part in get_args(hint) if (found := _dataclass_in(part)) is not None), None)
