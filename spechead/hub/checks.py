"""What must hold before a head is published: it loads, it is its target's, its figures are its own and no bug.

Called by publish.py. A missing measurement can be waived by name (`allow_unmeasured`); a failed one cannot.
"""

import copy
from pathlib import Path

import torch

from ..bench.certificate import load as load_certificate
from ..bench.results import Model, Results
from ..heads.base import Head, check_pair
from ..heads.checkpoint import read_checkpoint
from ..heads.convert import OWN
from ..heads.fingerprint import compare_logits, describe_mismatch, head_identity
from ..heads.load import load_head
from .card import RESULTS, method_of, read_results
from .card_figures import head_methods
from .provenance import PROMPTS_FILE, RECIPE_FILE, local_paths, read_recipe, trained_on
from .target_parts import TargetParts, TargetUnavailable, is_here

WEIGHTS, CERTIFICATE = "model.safetensors", "verify.json"


def check_head(
    directory: Path, *, target: str | None, certificate: Path | None, allow_unmeasured: bool, token: str | bool | None
) -> list[str]:
    """Check a head's directory.

    Args:
        directory: The directory.
        target: The target to compare with; None = the one in the head's config, if it is on this machine.
        certificate: What `spechead verify` wrote; None = verify.json in the directory.
        allow_unmeasured: Whether results and certificate may be missing.
        token: Hub token.

    Returns:
        What the publisher should know.

    Raises:
        ValueError: Naming what does not hold.
    """
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is no directory; give the head's directory after the repo: <user>/<name> <directory>."
        )
    head = load_own(directory)
    notes = check_target(head, target, token)
    results = read_results(directory)
    certificate = certificate or directory / CERTIFICATE
    missing = [RESULTS] if results is None else []
    if certificate.is_file():
        check_certificate(certificate, head)
    else:
        missing.append(certificate.name)
    if missing and not allow_unmeasured:
        remedies = []
        if RESULTS in missing:
            remedies.append(f"measure it with `spechead bench --head {directory} --output {directory / RESULTS}`")
        if missing != [RESULTS]:
            remedies.append(
                f"prove it with `spechead verify --head {directory} --output {directory / CERTIFICATE}` (or name the "
                "certificate with --certificate)"
            )
        raise ValueError(
            f"{directory} has no {' and no '.join(missing)}: {', '.join(remedies)}, or publish the head as unmeasured "
            "(--allow-unmeasured)."
        )
    if results is not None:
        check_results(results, head)
        check_overlap(results, directory)
    paths = local_paths(read_recipe(directory))
    if paths:
        notes.append(f"{RECIPE_FILE} names places on this machine, which will be public: {'; '.join(paths)}.")
    return notes


def load_own(directory: Path) -> Head:
    """Load a head strictly, in spechead's own layout and in one file.

    Raises:
        ValueError: If it is broken, in another layout, or in several files.
    """
    layout = read_checkpoint(directory).layout
    if layout != OWN:
        raise ValueError(
            f"{directory} is in the layout {layout!r}; publish spechead's own: load_head({str(directory)!r}, "
            "target).save_pretrained(<directory>)."
        )
    files = sorted(file.name for file in directory.glob("*.safetensors"))
    if files != [WEIGHTS]:
        raise ValueError(f"{directory} holds {', '.join(files)}; a published head is one file, {WEIGHTS}.")
    return load_head(directory)


def check_target(head: Head, target: str | None, token: str | bool | None) -> list[str]:
    """Compare a head with its target, if that can be had without asking the Hub or was named.

    Returns:
        A note if the two were not compared.

    Raises:
        ValueError: If the target is another one than the head was trained for, or none is named.
    """
    config = head.config
    if config.target_name is None:
        raise ValueError("The head's config names no target (target_name); nobody could tell what it is for.")
    parts = TargetParts(config, target, token)
    where = parts.locate()
    if target is None and not is_here(where, config.target_revision):
        return [
            f"The target {config.target_name} is not on this machine: the head was not compared with it (--target)."
        ]
    try:
        if config.target_fingerprint:
            parts.model()  # loads, and checks pair and weights
            return []
        check_pair(config, parts.config())
        mismatch = describe_mismatch(config, parts.config())
    except TargetUnavailable as error:
        raise ValueError(f"--target: {error}") from error
    if mismatch and target is None:
        raise ValueError(f"The target {where} is not the head's: {mismatch}.")
    return ["The head holds no fingerprint of its target: only the sizes were compared."]


def check_certificate(path: Path, head: Head) -> None:
    """Raise ValueError unless a certificate of `spechead verify` says that this head, on its target, passed.

    A lossy rule is measured, not proved: the head's own method must have passed with the exact one.
    """
    proof = load_certificate(path)
    config = head.config
    method = method_of(config)
    failed = [check.method for check in proof.methods if check.passed is False]
    if failed or proof.passed is False:
        what = ", ".join(failed) or "a method"
        raise ValueError(f"{path} says that {what} did not pass; a head that fails its proof is not published.")
    model = recorded(proof.models, head)
    if model is None or not any(check.method == method and check.passed for check in proof.methods):
        raise ValueError(
            f"{path} is no proof of this head: it must hold a {config.model_type} head of {size_of(head)} parameters "
            f"and the method {method}, passed with --acceptance exact. Run `spechead verify --head <directory> "
            f"--output {path}`."
        )
    if "weights" in changed_since(model, head):
        raise ValueError(f"{path} was issued for other weights of this kind and size; run `spechead verify` again.")
    known, seen = config.target_fingerprint or {}, proof.models[0].fingerprint
    if known and seen:
        other = known.get("config") != seen.get("config")
        if other or compare_logits(known.get("logits") or [], seen.get("logits") or []):
            raise ValueError(
                f"{path} was issued on {proof.models[0].name}, which is not the target that the head was trained for "
                f"({config.target_name}): their fingerprints differ."
            )


def size_of(head: Head) -> int:
    """Return how many parameters a head has."""
    return sum(parameter.numel() for parameter in head.parameters())


def recorded(models: list[Model], head: Head) -> Model | None:
    """Return what a file of results or a certificate says of a head of this kind and size; None if it holds none."""
    mine = ("head", head.config.model_type, size_of(head))
    return next((model for model in models if (model.role, model.kind, model.parameters) == mine), None)


def changed_since(model: Model, head: Head) -> list[str]:
    """Return what of a head is not as it was recorded: "weights" by their digest, or names of its default drafting.

    Args:
        model: what was recorded; files of earlier versions hold no digest, and nothing is said of them.
        head: as it is now; compared in the dtype that it was recorded in.
    """
    now = head_identity(copy.deepcopy(head).to(getattr(torch, model.dtype)))
    return [name for name, value in model.fingerprint.items() if name in now and now[name] != value]


def check_results(results: Results, head: Head) -> None:
    """Raise ValueError unless results are complete, of this head, and free of outputs that differ beyond ties."""
    config = head.config
    names = head_methods(results, config.model_type)
    model = recorded(results.models, head)
    if model is None or not names:
        raise ValueError(
            f"{RESULTS} is not of this head: it holds no {config.model_type} head of {size_of(head)} parameters, or "
            f"no method that drafts with one (it has {', '.join(results.methods)})."
        )
    alike = [model.name for model in results.models if (model.role, model.kind) == ("head", config.model_type)]
    if len(alike) > 1:
        raise ValueError(
            f"{RESULTS} was measured with {len(alike)} heads of kind {config.model_type} ({', '.join(alike)}), "
            "and the card would show the figures of all as this one's: measure it without the others."
        )
    if changed := changed_since(model, head):
        raise ValueError(
            f"{RESULTS} was measured before this head got other {', '.join(changed)}: its figures are another's. "
            "Measure it again."
        )
    if not results.complete:
        raise ValueError(f"{RESULTS} is of a run that was interrupted; run its command again, it goes on.")
    bugs = sum(cell.bugs for cell in results.cells if cell.method in names and not cell.lossy)
    if bugs:
        raise ValueError(
            f"{RESULTS} records {bugs} output(s) that differ from plain's by more than a tie: find that first."
        )


def check_overlap(results: Results, directory: Path) -> None:
    """Raise ValueError if a head was measured on prompts that it was trained on, or nobody can tell."""
    asked = {prompt for ids in results.prompts.values() for prompt in ids}
    nameless = sorted(asked - results.digests.keys())
    if nameless and (directory / PROMPTS_FILE).is_file():
        raise ValueError(
            f"{RESULTS} has no digest of {', '.join(nameless[:5])}, so it cannot be compared with {PROMPTS_FILE}: "
            "measure again."
        )
    both = trained_on(directory, results.digests)
    if both:
        raise ValueError(
            f"{RESULTS} was measured on {len(both)} prompt(s) of {PROMPTS_FILE}, which the head was trained on: "
            f"{', '.join(both[:5])}. Measure it on others."
        )
