"""Two processes on a CPU, started by the launcher and config that the README names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spechead.training.run import train_eagle

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "two_processes.py"


EAGLE3 = {"method": "eagle3", "depths": "3", "draft_vocab_size": "32"}
MEDUSA = {"num_heads": "3"}


@pytest.fixture
def settings(common):
    # What the device is goes unsaid: the launcher's own CPU mode would start one process.
    return {name: value for name, value in common.items() if name != "use_cpu"} | {
        "max_steps": "3",
        "learning_rate": "1e-2",
        "tokens_per_batch": "256",
        "acceptance_prompts": "1",
        "acceptance_new_tokens": "4",
    }


def launch(processes, where, starve, arguments):
    """Run the script under accelerate's launcher and return what each process saw, and the losses."""
    where.mkdir(exist_ok=True)
    config = ROOT / "recipes" / "accelerate" / ("cpu_2proc.yaml" if processes == 2 else "one_gpu.yaml")
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(config),
        "--main_process_port",
        "0",
        str(SCRIPT),
        str(where),
        "starve" if starve else "feed",
        *arguments,
        "--output_dir",
        str(where / "out"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    reports = [json.loads((where / f"seen-{rank}.json").read_text()) for rank in range(processes)]
    log = [json.loads(line) for line in (where / "out" / "log.jsonl").read_text().splitlines()]
    return reports, [line["loss"] for line in log if "loss" in line], done.stderr


@pytest.mark.parametrize("kind", [EAGLE3, MEDUSA], ids=["eagle3", "medusa"])
def test_two_processes_see_other_rows_and_give_the_loss_of_one(settings, flags, tmp_path, kind):
    arguments = settings | kind | {"gradient_accumulation_steps": "1"}
    arguments.pop("output_dir")
    both, losses, said = launch(2, tmp_path / "two", False, flags(arguments))
    alone, expected, _ = launch(1, tmp_path / "one", False, flags(arguments | {"gradient_accumulation_steps": "2"}))
    assert [batch for pair in zip(both[0]["rows"], both[1]["rows"], strict=True) for batch in pair] == alone[0]["rows"]
    rows = [{number for batch in report["rows"] for number in batch} for report in both]
    assert rows[0]
    assert rows[1]
    assert not rows[0] & rows[1]
    assert f"Process 1 of 2: its first batch holds rows {both[1]['rows'][0]}" in said
    assert len(losses) == len(expected) == 3
    assert losses == pytest.approx(expected, abs=1e-5)
    assert both[0]["lines"]
    assert not both[1]["lines"]  # the head is written once


def test_two_processes_train_from_a_store_that_one_wrote(settings, flags, tmp_path):
    settings.pop("output_dir")
    store = settings | EAGLE3 | {"features": "store", "store": str(tmp_path / "store"), "acceptance_prompts": "0"}
    store |= {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": "false", "max_steps": "2"}
    wrote = train_eagle(flags(store | {"output_dir": str(tmp_path / "unused"), "write_store": "true"}))
    assert "Feature store written" in wrote.lines[0]
    _, losses, _ = launch(2, tmp_path / "two", False, flags(store))
    alone = train_eagle(flags(store | {"output_dir": str(tmp_path / "one"), "gradient_accumulation_steps": "2"}))
    log = [json.loads(line) for line in (alone.head / "log.jsonl").read_text().splitlines()]
    assert losses == pytest.approx([line["loss"] for line in log if "loss" in line], abs=1e-5)
    assert len(losses) == 2


def test_a_process_without_rows_does_not_hold_up_the_other(settings, flags, tmp_path):
    settings.pop("output_dir")
    reports, losses, _ = launch(2, tmp_path / "starved", True, flags(settings | EAGLE3))
    assert all(batch == [-1] for batch in reports[1]["rows"])
    assert len(reports[1]["rows"]) == len(reports[0]["rows"]) == 3
    assert len(losses) == 3


def test_two_processes_that_go_on_equal_two_that_never_stopped(settings, flags, tmp_path):
    settings.pop("output_dir")
    arguments = settings | {"method": "eagle", "noise": "0.2", "max_steps": "4", "load_best_model_at_end": "false"}
    _, straight, _ = launch(2, tmp_path / "straight", False, flags(arguments))
    stopped = tmp_path / "stopped" / "out"  # as a kill after the second step leaves it
    stopped.mkdir(parents=True)
    shutil.copytree(tmp_path / "straight" / "out" / "checkpoint-2", stopped / "checkpoint-2")
    reports, resumed, _ = launch(2, tmp_path / "stopped", False, flags(arguments))
    assert [len(report["rows"]) for report in reports] == [2, 2]
    assert len(straight) == 4
    assert resumed == straight[2:]
    first, second = (load_file(tmp_path / name / "out" / "model.safetensors") for name in ("straight", "stopped"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
