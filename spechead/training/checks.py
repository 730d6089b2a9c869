"""What a recipe's values are checked for, before anything is loaded: their types in YAML, counts, dtypes, fields.

argparse converts what the command line says and strings alone of what a file says, so a value of another type in YAML
would reach the run as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError

from .arguments import default_of

TRUTHS = ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0")  # as the library's parser reads them
WIDER = ("fsdp",)  # the library takes more than it annotates: true and lists
WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text (in quotes, where YAML reads it as something else, such as no or 5)",
    list: "a list",
    dict: "a mapping",
    NoneType: "null",
}


def check_types(said: Mapping[str, Any], classes: Sequence[type], where: str) -> None:
    """Check the values of a YAML file against the annotations of the dataclasses that they are for.

    Args:
        said: the file's names and values.
        classes: the dataclasses.
        where: the file, for the error.

    Raises:
        ValueError: for a value of a type that its field does not take.
    """
    for cls in classes:
        hints = get_type_hints(cls)
        for entry in dataclasses.fields(cls):
            if entry.name not in said or entry.name in WIDER:
                continue
            value = said[entry.name]
            left_open = value is None and default_of(entry) is None  # what the machine decides
            if not left_open and not takes(hints[entry.name], value):
                allowed = in_words(hints[entry.name])
                raise ValueError(
                    f"{where} sets {entry.name}={value!r}, which must be {allowed}. Mend the line, or leave it out "
                    "for the default if there is one."
                )


def takes(annotation: Any, value: Any) -> bool:
    """Say whether a field of this annotation takes a YAML value; one that cannot be judged takes all."""
    origin = get_origin(annotation) or annotation
    if origin in (Union, UnionType):
        return any(takes(part, value) for part in get_args(annotation))
    if origin is list:
        parts = get_args(annotation) or (Any,)
        alone = parts[0] is str and isinstance(value, str)  # one source may stand alone
        return alone or (isinstance(value, list) and all(takes(parts[0], part) for part in value))
    if origin is bool:
        return isinstance(value, bool) or (isinstance(value, str) and value.lower() in TRUTHS)
    if origin in (int, float):
        return is_number(origin, value)
    return isinstance(value, origin) if origin in WORDS else True


def is_number(kind: type[int] | type[float], value: Any) -> bool:
    """Say whether a value is such a number, or text that reads as one: YAML 1.1 reads 1e-3 as text."""
    if isinstance(value, str):
        try:
            kind(value)
        except ValueError:
            return False
        return True
    return isinstance(value, (int, kind)) and not isinstance(value, bool)


def in_words(annotation: Any) -> str:
    """Return what a field of this annotation takes, for an error."""
    origin = get_origin(annotation) or annotation
    if origin in (Union, UnionType):
        return " or ".join(in_words(part) for part in get_args(annotation))
    if origin is list and get_args(annotation):
        return f"a list, each of it {in_words(get_args(annotation)[0])}"
    return WORDS.get(origin, str(annotation))


def check_dtype(dtype: str) -> None:
    """Raise ValueError unless torch has a dtype of that name."""
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype={dtype!r} is none of torch's; give bfloat16, float16 or float32.")


def as_sources(data: Sequence[str] | str) -> list[str]:
    """Return sources, of which one may stand alone, as a list.

    Raises:
        ValueError: if there is none.
    """
    if not data:
        raise ValueError("data is empty; name at least one file, directory or Hub dataset.")
    return [data] if isinstance(data, str) else list(data)


def at_least_one(**counts: int | None) -> None:
    """Raise ValueError for a count below 1; None leaves it open."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} leaves nothing to do; give at least 1.")


def check_decay(decay: float) -> None:
    """Raise ValueError unless each depth weighs something, and no more than the one before."""
    if not 0.0 < decay <= 1.0:
        raise ValueError(f"decay={decay} must be above 0 and at most 1.")


def check_head(kind: type, said: Mapping[str, Any]) -> None:
    """Check what is said of a head's config, field by field; whether its sizes fit, the target's config will show.

    Args:
        kind: the config's class.
        said: fields of it.

    Raises:
        ValueError: for a value that its field does not take.
    """
    for name, value in said.items():
        try:
            kind(**{name: value})
        except (StrictDataclassFieldValidationError, ZeroDivisionError) as error:
            why = " ".join(str(error.__cause__ or error).split())
            raise ValueError(f"head: {name}={value!r} cannot be: {why}. Mend it, or leave it out.") from error
        except ValueError:
            continue  # a size beside the default ones, or a name that is refused with the target's config
