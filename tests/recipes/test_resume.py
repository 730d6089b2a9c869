"""A run that is killed and resumed equals a straight one bit for bit: noise on, in mid-epoch and mid-accumulation."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from spechead.training.run import train_eagle
from spechead.training.trainer import HeadTrainer

STEPS = 8


@pytest.fixture
def settings(common):
    return common | {
        "method": "eagle",
        "noise": "0.2",
        "gradient_accumulation_steps": "2",
        "max_steps": STEPS,
        "save_steps": "3",
        "eval_steps": "3",
        "tokens_per_batch": "256",
        "load_best_model_at_end": "false",
        "learning_rate": "1e-2",
    }


def weights_and_losses(directory):
    log = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return load_file(directory / "model.safetensors"), {line["step"]: line["loss"] for line in log if "loss" in line}


def test_a_straight_run_spans_epochs(settings, flags, tmp_path):
    outcome = train_eagle(flags(settings))
    summary = json.loads((outcome.head / "training.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["epochs"] > 1.5  # the kill below lies in the second epoch


@pytest.mark.parametrize(
    "die_at", [15, 16]
)  # micro-batches of step 8, in the second epoch; 16 is in the middle of its accumulation
def test_killed_and_resumed_equals_straight(settings, flags, tmp_path, monkeypatch, die_at):
    straight = train_eagle(flags(settings | {"output_dir": str(tmp_path / "straight")})).head
    seen = []
    plain = HeadTrainer.training_step

    def dying(self, *args, **kwargs):
        seen.append(1)
        if len(seen) == die_at:
            raise KeyboardInterrupt
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(HeadTrainer, "training_step", dying)
    with pytest.raises(KeyboardInterrupt):
        train_eagle(flags(settings | {"output_dir": str(tmp_path / "killed")}))
    monkeypatch.setattr(HeadTrainer, "training_step", plain)
    torch.manual_seed(99)
    resumed = train_eagle(flags(settings | {"output_dir": str(tmp_path / "killed")})).head
    first, second = weights_and_losses(straight), weights_and_losses(resumed)
    assert first[0].keys() == second[0].keys()
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert first[1] == second[1]
    assert len(first[1]) == STEPS


def test_a_run_resumed_between_the_depths_equals_a_straight_one(settings, flags, tmp_path, monkeypatch):
    eagle3 = settings | {"method": "eagle3", "depths": "3", "first_depth_share": "0.6"}  # steps 1 to 5 of 8
    del eagle3["noise"]
    straight = train_eagle(flags(eagle3 | {"output_dir": str(tmp_path / "straight")})).head
    trained, plain = [], HeadTrainer.training_step

    def dying(self, model, *args, **kwargs):
        trained.append(model.trained_depths)
        if len(trained) == 14:  # in step 7; the last checkpoint is step 6's
            raise KeyboardInterrupt
        return plain(self, model, *args, **kwargs)

    monkeypatch.setattr(HeadTrainer, "training_step", dying)
    with pytest.raises(KeyboardInterrupt):
        train_eagle(flags(eagle3 | {"output_dir": str(tmp_path / "killed")}))
    assert trained == [1] * 10 + [3] * 4
    trained.clear()
    resumed = train_eagle(flags(eagle3 | {"output_dir": str(tmp_path / "killed")})).head
    assert trained == [3] * 4
    first, second = weights_and_losses(straight), weights_and_losses(resumed)
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert first[1] == second[1]


@pytest.mark.parametrize("limit", [{}, {"save_total_limit": "1", "load_best_model_at_end": "true"}])
def test_sigterm_saves_and_stops_and_the_same_command_goes_on(settings, flags, tmp_path, monkeypatch, limit):
    settings |= limit
    straight = train_eagle(flags(settings | {"output_dir": str(tmp_path / "straight")})).head
    seen = []
    plain = HeadTrainer.training_step

    def asked(self, *args, **kwargs):
        seen.append(1)
        if len(seen) == 7:  # in the middle of the fourth step's accumulation
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(HeadTrainer, "training_step", asked)
    stopped = train_eagle(flags(settings | {"output_dir": str(tmp_path / "asked")}))
    assert stopped.head is None
    assert "goes on" in stopped.lines[0]
    assert (tmp_path / "asked" / "checkpoint-4").is_dir()
    monkeypatch.setattr(HeadTrainer, "training_step", plain)
    resumed = train_eagle(flags(settings | {"output_dir": str(tmp_path / "asked")})).head
    first, second = load_file(straight / "model.safetensors"), load_file(resumed / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
