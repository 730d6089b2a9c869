"""What a training run does besides its steps: dry run, store, acceptance, the best head, going on from a head,
refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from spechead import enable_speculation
from spechead.bench.prompts import encode
from spechead.heads.fingerprint import prompt_digest
from spechead.heads.load import load_head
from spechead.training import acceptance, run
from spechead.training.run import train_eagle, train_medusa
from spechead.training.trainer import HeadTrainer


@pytest.fixture
def settings(common):
    return common | {"method": "eagle3", "depths": "2", "draft_vocab_size": "64", "learning_rate": "5e-3"}


def log_of(directory):
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


def test_the_dry_run_shows_the_spans_and_stops(settings, flags, tmp_path, monkeypatch):
    monkeypatch.setattr(HeadTrainer, "train", lambda *args, **kwargs: pytest.fail("the dry run trained"))
    outcome = train_eagle(flags(settings | {"dry_run": "true"}))
    said = "\n".join(outcome.lines)
    assert outcome.head is None
    for word in ("answers", "<|im_start|>assistant", "supervised", "hours", "Disk", "Peak memory"):
        assert word in said
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("given", "steps", "batch"),
    [({"max_steps": "3"}, 3, None), ({"rows_per_batch": "1", "max_steps": "-1", "num_train_epochs": "2"}, None, 1)],
)
def test_the_dry_run_plans_the_run_that_was_asked_for(settings, flags, given, steps, batch, monkeypatch):
    seen = []
    plain = HeadTrainer.compute_loss

    def watched(self, model, inputs, **rest):
        seen.append(len(inputs["input_ids"]))
        return plain(self, model, inputs, **rest)

    monkeypatch.setattr(HeadTrainer, "compute_loss", watched)
    said = "\n".join(train_eagle(flags(settings | given | {"dry_run": "true"})).lines)
    planned, tokens = (
        int(part.replace(",", "")) for part in re.search(r"([\d,]+) steps, ([\d,]+) sup", said).groups()
    )
    rows = int(re.search(r"\((\d+) to train on\)", said).group(1))
    assert tokens > 0
    assert planned == (steps or 2 * rows)
    assert batch is None or seen == [batch, batch]


def test_a_trained_head_drafts_for_its_target(settings, flags, tiny):
    outcome = train_eagle(flags(settings))
    target = AutoModelForCausalLM.from_pretrained(tiny).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    model = enable_speculation(target, head=str(outcome.head))
    drafted = model.generate(
        ids, max_new_tokens=12, do_sample=False, speculative="eagle", return_dict_in_generate=True
    )
    assert torch.equal(drafted.sequences, plain)
    assert drafted.stats.drafted_tokens > 0
    digests = (outcome.head / "training_prompts.txt").read_text().split()
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    asked = [json.loads(line)["messages"][:1] for line in Path(settings["data"][0]).read_text().splitlines()]
    benched = {prompt_digest(encode(tokenizer, messages)) for messages in asked}
    assert set(digests) == benched


def test_a_head_drafts_as_far_as_what_it_started_from_was_trained(settings, flags, tiny, tmp_path):
    reach = AutoModelForCausalLM.from_pretrained(tiny).config.max_position_embeddings

    def trained(train, **changes):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        return load_head(train(flags(settings | changes | {"output_dir": str(directory)})).head).config

    eagle = trained(train_eagle)
    assert eagle.trained_positions == reach
    assert 20 < trained(train_eagle, init_from_target="false").trained_positions < reach, "its longest row"
    assert trained(train_eagle, init_from_target="false", max_length="40").trained_positions == 40
    medusa = {name: value for name, value in settings.items() if name not in ("method", "depths", "draft_vocab_size")}
    assert load_head(train_medusa(flags(medusa)).head).config.trained_positions is None


def test_features_from_a_store_give_the_losses_of_online_ones(settings, flags, tmp_path):
    online = train_eagle(flags(settings | {"output_dir": str(tmp_path / "online")})).head
    stored = train_eagle(flags(settings | {"output_dir": str(tmp_path / "stored"), "features": "store"})).head
    first, second = ([line["loss"] for line in log_of(where) if "loss" in line] for where in (online, stored))
    assert first == pytest.approx(second, rel=1e-4)


def test_a_written_store_is_trained_from_without_the_target(settings, flags, tmp_path, monkeypatch):
    settings |= {"features": "store", "store": str(tmp_path / "store")}
    wrote = train_eagle(flags(settings | {"write_store": "true"}))
    assert wrote.head is None
    assert "Feature store written" in wrote.lines[0]
    expected = train_eagle(flags(settings | {"output_dir": str(tmp_path / "with")})).head
    monkeypatch.setattr(
        "spechead.training.sources.load_target", lambda *args, **kwargs: pytest.fail("loaded the target")
    )
    monkeypatch.setattr(run.HeadTrainingArguments, "world_size", property(lambda self: 1))
    found = train_eagle(flags(settings | {"output_dir": str(tmp_path / "without")})).head
    first, second = load_file(expected / "model.safetensors"), load_file(found / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_medusa_trains_from_the_store_that_eagle3_wrote(settings, flags, tmp_path, monkeypatch):
    settings |= {"features": "store"}
    train_eagle(flags(settings | {"write_store": "true"}))
    monkeypatch.setattr("spechead.training.sources.write_store", lambda *args: pytest.fail("wrote a second store"))
    others = ("method", "depths", "draft_vocab_size")
    medusa = {name: value for name, value in settings.items() if name not in others}
    stored = train_medusa(flags(medusa | {"num_heads": "2", "output_dir": str(tmp_path / "stored")})).head
    online = train_medusa(
        flags(medusa | {"num_heads": "2", "output_dir": str(tmp_path / "online"), "features": "online"})
    ).head
    first, second = ([line["loss"] for line in log_of(where) if "loss" in line] for where in (online, stored))
    assert first == pytest.approx(second, rel=1e-4)


def test_several_processes_do_not_write_one_store(settings, flags, monkeypatch):
    plain = run.open_sources

    def as_two(data, rows, config, taps, device, world_size, **rest):
        return plain(data, rows, config, taps, device, 2, **rest)

    monkeypatch.setattr(run, "open_sources", as_two)
    with pytest.raises(ValueError, match="--write_store true"):
        train_eagle(flags(settings | {"features": "store"}))


def test_acceptance_is_decoded_and_chooses_the_best_head(settings, flags, tmp_path, monkeypatch):
    lengths = iter([1.5, 1.2, 1.1])
    measured = []
    plain = acceptance.acceptance_length

    def counted(target, head, prompts, new_tokens):
        real = plain(target, head, prompts, new_tokens)
        if new_tokens == 2:  # the trial before the first step
            return real
        measured.append((real, len(prompts), head.training))
        return next(lengths)

    monkeypatch.setattr(acceptance, "acceptance_length", counted)
    outcome = train_eagle(
        flags(settings | {"acceptance_prompts": "3", "acceptance_new_tokens": "8", "max_steps": "6"})
    )
    logged = [line["eval_acceptance_length"] for line in log_of(outcome.head) if "eval_acceptance_length" in line]
    assert logged == [1.5, 1.2, 1.1]
    assert all(1.0 <= real <= 9.0 and count == 3 for real, count, _ in measured)
    summary = json.loads((outcome.head / "training.json").read_text())
    assert (summary["best"]["metric"], summary["best"]["value"], summary["step"]) == (
        "eval_acceptance_length",
        1.5,
        2,
    )
    shipped = load_file(outcome.head / "model.safetensors")
    best = load_file(outcome.head / "checkpoint-2" / "model.safetensors")
    last = load_file(outcome.head / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(shipped[name], best[name]) for name in shipped)
    assert not torch.equal(shipped["fc.weight"], last["fc.weight"])


def test_measuring_leaves_training_as_it_was(settings, flags, tmp_path):
    with_it = train_eagle(
        flags(
            settings
            | {"output_dir": str(tmp_path / "a"), "acceptance_prompts": "2", "metric_for_best_model": "eval_loss"}
        )
    ).head
    without = train_eagle(
        flags(settings | {"output_dir": str(tmp_path / "b"), "metric_for_best_model": "eval_loss"})
    ).head
    first, second = load_file(with_it / "model.safetensors"), load_file(without / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_init_head_goes_on_and_keeps_its_vocabulary(settings, flags, tmp_path):
    first = train_eagle(flags(settings | {"output_dir": str(tmp_path / "first")})).head
    digests = (first / "training_prompts.txt").read_text()
    (first / "training_prompts.txt").write_text(digests + "0" * 16 + "\n")  # of other data
    further = settings | {"output_dir": str(tmp_path / "second"), "init_head": str(first), "learning_rate": "0"}
    with pytest.raises(ValueError, match="draft_vocab_size=64: init_head keeps its own"):
        train_eagle(flags(further))
    del further["draft_vocab_size"]
    again = train_eagle(flags(further)).head
    one, two = load_file(first / "model.safetensors"), load_file(again / "model.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert load_head(again).config.draft_vocab_size == 64
    assert {*digests.split(), "0" * 16} == set((again / "training_prompts.txt").read_text().split())
    others = ("method", "depths", "draft_vocab_size")
    medusa = {name: value for name, value in settings.items() if name not in others} | {"init_head": str(first)}
    with pytest.raises(ValueError, match="trains a MedusaHeads"):
        train_medusa(flags(medusa))


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_rows(settings, flags, monkeypatch):
    plain = HeadTrainer._prepare_inputs
    steps = []

    def poisoned(self, inputs):
        inputs = plain(self, inputs)
        steps.append(inputs["numbers"].tolist())
        if len(steps) == 2:
            inputs["states"] = inputs["states"] * float("nan")
        return inputs

    monkeypatch.setattr(HeadTrainer, "_prepare_inputs", poisoned)
    with pytest.raises(ValueError, match="loss is nan at step 2") as error:
        train_eagle(flags(settings))
    assert str(steps[1]) in str(error.value)


def test_a_seed_gives_the_same_head_twice(settings, flags, tmp_path):
    heads = [train_eagle(flags(settings | {"output_dir": str(tmp_path / name)})).head for name in "ab"]
    first, second = (load_file(head / "model.safetensors") for head in heads)
    assert all(torch.equal(first[name], second[name]) for name in first)
