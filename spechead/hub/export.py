"""Export a head, or a draft model, to the format of another server, and prove it before saying so.

    report = export_head("<directory or repo>", "vllm", Path("out"))

What an engine cannot run is refused by name before anything is written. The result is written beside its destination,
read back through the same reader as any published checkpoint, compared bit for bit with the head, and only then
renamed. Called by `spechead export`; the formats are in `exporters/`.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..heads.base import Head
from ..heads.base_config import HeadConfig
from ..heads.load import load_head
from .draft_model import export_draft_model, is_draft_model
from .exporters import FORMATS
from .exporters.features import kind_of, problems_of
from .exporters.plan import Origin, Plan, Request
from .roundtrip import differences
from .target_parts import TargetParts


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Attributes:
        path: The directory.
        format: The format's name.
        kind: "medusa", "eagle", "eagle3" or "draft model".
        files: Its files, with their sizes in bytes.
        tensors: Number of tensors, all equal to the head's when read back.
        added: Tensors that the head itself does not hold: copies of the target's, zero biases (own names).
        commands: Shell commands that use it.
        notes: What a user of the engine should know.
        origin: Where the format's facts and the command's flags were read.
    """

    path: Path
    format: str
    kind: str
    files: dict[str, int]
    tensors: int
    added: tuple[str, ...]
    commands: tuple[str, ...]
    notes: tuple[str, ...]
    origin: Origin


def export_head(
    head: str | Path | Head,
    to: str,
    output: Path,
    *,
    target: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    taps: Sequence[int] | None = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
) -> ExportReport:
    """Write a head, or a draft model, in another format.

    Args:
        head: A head, or a directory or Hub repo of one in any layout that `load_head` reads; for llama.cpp also the
            directory or repo of a draft model.
        to: The format: vllm, sglang, tgi, speculators, llamacpp, eagle or medusa.
        output: Directory to create.
        target: Name or directory of the target; None = as the head's config says.
        revision: Branch, tag or commit of the head's repo.
        token: Hub token.
        taps: Taps of a published EAGLE-3 head whose config is ambiguous about them.
        allow_pickle: Whether weights that exist only as pickles may be read.
        overwrite: Whether an existing output directory is replaced.

    Returns:
        The report.

    Raises:
        ValueError: If the format cannot hold the head, the engine cannot run it, a shared part cannot be had, or the
            result does not read back equal.
    """
    if to not in FORMATS:
        raise ValueError(f"--to {to!r} is no format; give one of {', '.join(FORMATS)}.")
    check_output(output, None if isinstance(head, Head) else Path(head), overwrite)
    if not isinstance(head, Head):
        if is_draft_model(head, revision=revision, token=token):
            return draft_model_report(head, to, output, target=target, revision=revision, token=token)
        head = load_head(head, revision=revision, token=token, taps=taps, allow_pickle=allow_pickle)
    refuse_unrunnable(head.config, to)
    parts = TargetParts(head.config, target, token)
    module = FORMATS[to]
    plan = module.plan(Request(head, parts, str(output), parts.name))
    files = write_plan(plan, head, output)
    kind = kind_of(head.config)
    return ExportReport(
        path=output,
        format=to,
        kind=kind,
        files=files,
        tensors=len(plan.tensors),
        added=tuple(plan.added),
        commands=tuple(plan.commands),
        notes=tuple(plan.notes),
        origin=module.origin(kind),
    )


def check_output(output: Path, head: Path | None, overwrite: bool) -> None:
    """Raise ValueError if something may not be replaced by an export: a file, what is there, the head itself."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; give a directory.")
    if output.exists() and not overwrite and any(output.iterdir()):
        raise ValueError(f"{output} exists; give another directory, or allow it to be replaced (--overwrite).")
    if head is None or not head.expanduser().is_dir():
        return
    source, place = head.expanduser().resolve(), output.resolve()
    if place == source or place in source.parents:
        raise ValueError(f"{output} is, or holds, the head itself and would be replaced; give another directory.")


def refuse_unrunnable(config: HeadConfig, to: str) -> None:
    """Raise ValueError, naming what can run the head, if the format's engine cannot."""
    problems = problems_of(config, FORMATS[to].RUNS)
    if not problems:
        return
    able = [name for name, module in FORMATS.items() if not problems_of(config, module.RUNS)]
    others = f"What can run it: {', '.join(able)}." if able else "No format here runs it; spechead itself does."
    read_in = FORMATS[to].origin(kind_of(config)).name
    raise ValueError(f"--to {to} is refused: {'; '.join(problems)} (read in {read_in}). {others}")


def write_plan(plan: Plan, head: Head, output: Path) -> dict[str, int]:
    """Write a plan beside its destination, read it back, compare, then rename it.

    Returns:
        File names and sizes.

    Raises:
        ValueError: If what reads back differs from the head in any bit.
    """
    with staging_for(output) as staging:
        text = json.dumps(plan.config, indent=2, sort_keys=True) + "\n"
        (staging / "config.json").write_text(text, encoding="utf-8")
        write_tensors(plan.tensors, staging / plan.weights)
        wrong = differences(staging, plan, head)
        if wrong:
            raise ValueError(f"Nothing was exported: it does not read back as the head ({'; '.join(wrong)}).")
        return {file.name: file.stat().st_size for file in sorted(staging.iterdir())}


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors: safetensors, or for a `.pt` a pickle of them alone."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    if path.suffix == ".pt":
        torch.save(plain, path)
    else:
        save_file(plain, path, metadata={"format": "pt"})


@contextlib.contextmanager
def staging_for(output: Path) -> Iterator[Path]:
    """A hidden directory on the destination's file system, renamed to it when the body ends well, else removed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield staging
        staging.chmod(0o755)
        if output.exists():
            foreign = sorted({file.name for file in output.iterdir()} - {file.name for file in staging.iterdir()})
            if foreign:
                raise ValueError(
                    f"{output} also holds {', '.join(foreign)}, which this export does not write and would remove; "
                    "give another directory, or delete it first."
                )
            shutil.rmtree(output)
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def draft_model_report(
    draft: str | Path, to: str, output: Path, *, target: str | None, revision: str | None, token: str | bool | None
) -> ExportReport:
    """Export a draft model: llama.cpp alone needs it in another form.

    Raises:
        ValueError: If another format is asked for, or the draft does not fit.
    """
    if to != "llamacpp":
        raise ValueError(
            f"{draft} is a whole model, not a head, and needs no export to {to}: vLLM (method draft_model) and SGLang "
            "(--speculative-algorithm STANDALONE) take a draft model's directory as it is, the other formats take no "
            "draft models. llama.cpp needs a file of its own: --to llamacpp."
        )
    with staging_for(output) as staging:
        done = export_draft_model(draft, staging, str(output), target=target, revision=revision, token=token)
        files = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
    return ExportReport(
        path=output,
        format=to,
        kind="draft model",
        files=files,
        tensors=done.tensors,
        added=(),
        commands=tuple(done.commands),
        notes=tuple(done.notes),
        origin=FORMATS[to].origin("draft model"),
    )
