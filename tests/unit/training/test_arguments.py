"""What the machine decides unless it is said, that a process has one device, and what a head's training ignores."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import TrainingArguments

from spechead.bench.hardware import native_bfloat16
from spechead.training import arguments, sources
from spechead.training.arguments import IGNORED, HeadTrainingArguments, said_of, warn_of_slow_dtype
from spechead.training.recipe import DataArguments, parse, save_recipe
from tests.tiny import tiny_model

TRAINING = ["--output_dir", "unused"]


def machine(monkeypatch, accelerator=None, bfloat16=()):
    """A machine with this accelerator, whose device types named in `bfloat16` have such arithmetic."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator is not None)
    found = None if accelerator is None else SimpleNamespace(type=accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(arguments, "native_bfloat16", lambda device_type: device_type in bfloat16)


@pytest.mark.parametrize(
    ("capabilities", "native"),
    [
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"avx512_bf16": True}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"neon": True, "bf16": True}, True),
        ({"neon": True}, False),
    ],
)
def test_a_cpu_has_bfloat16_where_it_has_instructions_for_it(capabilities, native, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert native_bfloat16("cpu") is native


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_is_asked_without_emulation(supported, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or supported
    )
    assert native_bfloat16("cuda") is supported


@pytest.mark.parametrize("native", [True, False])
def test_without_an_accelerator_a_run_is_on_the_cpu_in_its_own_arithmetic(native, monkeypatch):
    machine(monkeypatch, None, ("cpu",) if native else ())
    (training,) = parse((HeadTrainingArguments,), TRAINING)
    assert (training.use_cpu, training.bf16, training.device.type) == (True, native, "cpu")
    assert HeadTrainingArguments(output_dir="unused", bf16=not native).bf16 is not native
    assert HeadTrainingArguments(output_dir="unused", fp16=True).bf16 is False


def test_with_an_accelerator_a_run_is_there_unless_told_otherwise(monkeypatch):
    machine(monkeypatch, "cuda", ("cpu",))  # an old GPU
    (training,) = parse((HeadTrainingArguments,), TRAINING)
    assert (training.use_cpu, training.bf16) == (False, False)
    (training,) = parse((HeadTrainingArguments,), [*TRAINING, "--use_cpu"])
    assert (training.use_cpu, training.bf16) == (True, True)
    machine(monkeypatch, "cuda", ("cuda",))
    (training,) = parse((HeadTrainingArguments,), [*TRAINING, "--use_cpu", "true"])
    assert training.bf16 is False
    with pytest.raises(ValueError, match="use_cpu"):  # the library's: bf16 was decided by the GPU that is not here
        parse((HeadTrainingArguments,), TRAINING)


@pytest.mark.parametrize(("said", "saved"), [([], None), (["--use_cpu", "true"], True)])
@pytest.mark.parametrize("native", [True, False])
def test_a_saved_recipe_holds_the_arithmetic_always_and_the_device_only_if_said(
    said, saved, native, tmp_path, monkeypatch
):
    machine(monkeypatch, None, ("cpu",) if native else ())
    save_recipe(tmp_path / "recipe.yaml", *parse((HeadTrainingArguments,), [*TRAINING, *said]))
    written = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert written["bf16"] is native
    assert written.get("use_cpu") is saved
    machine(monkeypatch, None, () if native else ("cpu",))
    (again,) = parse((HeadTrainingArguments,), ["--config", str(tmp_path / "recipe.yaml")])
    assert again.bf16 is native


def test_one_process_has_one_device_however_many_gpus_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    given = {"output_dir": "unused", "use_cpu": False, "bf16": False}
    assert TrainingArguments(**given).n_gpu == 4, "the library counts no longer: is the override still needed?"
    training = HeadTrainingArguments(**given)
    assert training.n_gpu == 1
    assert training.parallel_mode.value == "not_parallel"
    assert HeadTrainingArguments(output_dir="unused", use_cpu=True).n_gpu == 0


OTHER = {
    "neftune_noise_alpha": 5.0,
    "train_sampling_strategy": "sequential",
    "label_smoothing_factor": 0.1,
    "include_for_metrics": ["inputs"],
    "resume_from_checkpoint": "there",
    "average_tokens_across_devices": False,
    "eval_accumulation_steps": 2,
    "dataloader_prefetch_factor": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
}


@pytest.mark.parametrize("name", IGNORED)
def test_what_a_heads_training_does_not_read_is_refused(name):
    value = OTHER.get(name, True)
    with pytest.raises(ValueError, match=f"{name}=.* is not for heads: "):
        HeadTrainingArguments(output_dir="unused", use_cpu=True, **{name: value})
    assert not said_of(HeadTrainingArguments(output_dir="unused", use_cpu=True), name)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_steps": 0}, "max_steps=0 trains nothing"),
        ({"max_steps": -2}, "max_steps=-2 trains nothing"),
        ({"num_train_epochs": 0.0}, r"num_train_epochs=0\.0 trains nothing"),
        ({"num_train_epochs": float("nan")}, "num_train_epochs=nan trains nothing"),
    ],
)
def test_a_run_without_steps_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        HeadTrainingArguments(output_dir="unused", use_cpu=True, **given)
    HeadTrainingArguments(output_dir="unused", use_cpu=True, **{"num_train_epochs": 0, "max_steps": 2})


def test_a_recipe_that_says_what_earlier_versions_saved_is_taken(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("activation_checkpointing: false\ngradient_checkpointing: false\nuse_cpu: true\n")
    (training,) = parse((HeadTrainingArguments,), ["--config", str(recipe)])
    save_recipe(tmp_path / "again.yaml", training)
    assert "checkpointing" not in (tmp_path / "again.yaml").read_text()


@pytest.mark.parametrize(
    ("dtype", "device", "native", "warned"),
    [
        ("bfloat16", "cpu", False, 1),
        ("bfloat16", "cpu", True, 0),
        ("bfloat16", "cuda", False, 0),
        ("float32", "cpu", False, 0),
    ],
)
def test_a_target_in_bfloat16_on_a_cpu_without_it_is_warned_of_once(dtype, device, native, warned, monkeypatch):
    said = []
    monkeypatch.setattr(arguments.logger, "warning_once", said.append)
    machine(monkeypatch, None, (device,) if native else ())
    warn_of_slow_dtype(dtype, device)
    assert len(said) == warned
    assert all("--dtype float32" in text for text in said)


def test_every_recipe_that_loads_a_target_says_so(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(sources, "warn_of_slow_dtype", lambda dtype, device: seen.append((dtype, device)))
    tiny_model("llama").save_pretrained(tmp_path)
    data = DataArguments(target=str(tmp_path), data=["a"])
    assert sources.load_target(data, torch.device("cpu")).dtype == torch.bfloat16
    assert seen == [("bfloat16", "cpu")]
