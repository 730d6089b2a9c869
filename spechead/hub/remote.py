"""What a published head's custom_generate/generate.py calls: speculation for a model that was never enabled.

The head is loaded from the repo and commit that the calling file is of, once a model, and attached for the call alone:
after it the model is of the class, and has the heads, that it had before.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..attach import SUPPORT_KEY, Speculation
from ..heads.load import load_head
from ..heads.medusa import MedusaHeads
from ..mixin import SpeculativeGenerationMixin, disable_speculation, enable_speculation

COMMIT = re.compile(r"[0-9a-f]{40}")
PUBLISHED_KEY = "_spechead_published"  # in the model's __dict__: what each published head needs, between calls


def generate_with_head(
    model: Any,
    head: str,
    *,
    code_file: str | None = None,
    speculative: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    **arguments: Any,
) -> Any:
    """Generate speculatively with a published head.

    Args:
        model: The target.
        head: Repo or directory of the head.
        code_file: The file that calls; its place in transformers' module cache tells the commit.
        speculative: A method's name or config; None = the head's own method.
        revision: Of the head; None = the commit of `code_file`, else the repo's default branch.
        token: Hub token.
        **arguments: As `generate` takes them.

    Returns:
        What `generate` returns.

    Raises:
        ValueError: If the head cannot be loaded, does not fit the model, or an argument cannot be honoured.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    with attached(model, head, revision or commit_of(code_file), token) as state:
        if speculative is None:
            speculative = "medusa" if isinstance(state.heads[0], MedusaHeads) else "eagle"
        return SpeculativeGenerationMixin.generate(model, speculative=speculative, **given)


@contextmanager
def attached(model: Any, head: str, revision: str | None, token: str | bool | None) -> Iterator[Speculation]:
    """A published head attached to a model for one call; everything is put back after it.

    Args:
        model: The target.
        head: Repo or directory.
        revision: Of the repo.
        token: Hub token.

    Raises:
        ValueError: If the head cannot be loaded or does not fit the model.
    """
    known = model.__dict__.setdefault(PUBLISHED_KEY, {})
    before, own = model.__dict__.get(SUPPORT_KEY), model.__dict__.get("generate")
    key = (head, revision)
    if key in known and known[key].target.model is model:
        model.__dict__[SUPPORT_KEY] = known[key]
        loaded = None
    else:
        loaded = load_head(head, model, revision=revision, token=token)
    try:
        enable_speculation(model, head=loaded)
        known[key] = model.__dict__[SUPPORT_KEY]
        yield known[key]
    finally:
        if before is None:
            disable_speculation(model)
        else:
            model.__dict__[SUPPORT_KEY] = before
        if own is not None:
            model.__dict__["generate"] = own


def commit_of(code_file: str | None) -> str | None:
    """Return the commit that a file in transformers' module cache is of, None for any other file.

    The cache lays a repo's code out as <user>/<repo>/<commit>/custom_generate/generate.py.
    """
    if code_file is None:
        return None
    folder = Path(code_file).resolve().parents[1].name
    return folder if COMMIT.fullmatch(folder) else None
