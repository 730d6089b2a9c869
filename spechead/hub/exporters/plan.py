"""What an exporter is given and what it gives back: a `Request`, and a `Plan` of the files to write.

An exporter writes nothing: export.py writes the plan, reads it back and compares. `Origin` names the source in which
the format's facts were read, and is printed beside every command.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...heads.base import Head
from ..target_parts import TargetParts


@dataclass(frozen=True)
class Origin:
    """Where the facts of a format were read.

    Attributes:
        project: Its name.
        version: Its release, or None where a commit is all there is.
        commit: The commit, at least nine digits of it.
        files: The files that say how a checkpoint is loaded and run.
        flags: The file that the serve command's flags were read from.
    """

    project: str
    version: str | None
    commit: str
    files: tuple[str, ...]
    flags: str

    @property
    def name(self) -> str:
        """Project, version and commit in one phrase."""
        return f"{self.project}{f' {self.version}' if self.version else ''} (commit {self.commit})"


@dataclass(frozen=True)
class Request:
    """What an exporter works from.

    Attributes:
        head: The head, not bound to a target.
        parts: The target's own tensors, for formats that hold a copy of what the head shares.
        directory: Where the result will lie, for the printed commands.
        target: The target's name or directory for the printed commands; None = not known.
    """

    head: Head
    parts: TargetParts
    directory: str
    target: str | None

    @property
    def depth(self) -> int:
        """Tokens drafted a step in the printed commands: the head's measured best, else 3."""
        return int(self.head.config.num_draft_tokens or 3)

    @property
    def target_argument(self) -> str:
        """The target in a printed command."""
        return self.target or "<target>"


@dataclass
class Plan:
    """The files of an export.

    Attributes:
        layout: The layout of `heads/convert.py` that the result is in.
        config: config.json.
        tensors: Tensors under the format's names.
        weights: Name of the file of tensors.
        added: Tensors under own names that the head does not hold and the format needs: copies of the target's parts,
            zero biases.
        changed: Fields of the head's config that read back otherwise because of `added`.
        commands: Shell commands that use the result.
        notes: What a user of the engine should know.
    """

    layout: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str = "model.safetensors"
    added: Mapping[str, Tensor] = field(default_factory=dict)
    changed: Mapping[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
