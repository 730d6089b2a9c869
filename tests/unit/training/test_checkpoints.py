"""Which checkpoints a run goes on from: those that hold all of it."""

from __future__ import annotations

import pytest

from spechead.training.checkpoints import whole_checkpoints

HEAD = {
    "model.safetensors": "w",
    "optimizer.pt": "o",
    "scheduler.pt": "s",
    "trainer_state.json": "{}",
}


def write(directory, files):
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def names(directory):
    return [path.name for path in whole_checkpoints(directory)]


def test_the_newest_is_last_by_its_step(tmp_path):
    for step in (9, 10, 2):
        write(tmp_path / f"checkpoint-{step}", HEAD)
    write(tmp_path / "checkpoint-best", HEAD)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-9", "checkpoint-10"]
    assert names(tmp_path / "missing") == []


@pytest.mark.parametrize("name", HEAD)
@pytest.mark.parametrize("how", ["missing", "empty"])
def test_a_checkpoint_without_one_of_its_parts_is_passed_over(tmp_path, name, how):
    write(tmp_path / "checkpoint-1", HEAD)
    write(tmp_path / "checkpoint-2", HEAD)
    part = tmp_path / "checkpoint-2" / name
    part.unlink()
    if how == "empty":
        part.touch()
    assert names(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize(
    "weights",
    [
        {"adapter_model.safetensors": "w"},
        {
            "model-00001-of-00002.safetensors": "w",
            "model-00002-of-00002.safetensors": "w",
            "model.safetensors.index.json": "{}",
        },
    ],
)
def test_adapters_shards_and_the_other_optimizer_file_are_taken(tmp_path, weights):
    rest = {"optimizer.bin": "o", "scheduler.pt": "s", "trainer_state.json": "{}"}
    write(tmp_path / "checkpoint-3", weights | rest)
    assert names(tmp_path) == ["checkpoint-3"]


def test_an_empty_shard_is_one_that_was_not_written(tmp_path):
    shards = {"model-00001-of-00002.safetensors": "w", "model-00002-of-00002.safetensors": ""}
    rest = {"optimizer.pt": "o", "scheduler.pt": "s", "trainer_state.json": "{}"}
    write(tmp_path / "checkpoint-3", shards | rest)
    assert names(tmp_path) == []
