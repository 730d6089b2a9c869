"""A run goes on from its own checkpoints alone: those of other settings or data are refused, half-written ones passed
over; a dry run leaves nothing behind; published heads can be gone on with."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spechead import MedusaConfig, MedusaHeads, load_head
from spechead.hub.export import export_head
from spechead.training import run as run_module
from spechead.training.checkpoints import SETTINGS_FILE, whole_checkpoints
from spechead.training.run import train_eagle, train_medusa


@pytest.fixture
def settings(common):
    return common | {"method": "eagle3", "depths": "2", "draft_vocab_size": "24"}


@pytest.fixture
def own_chats(chats, tmp_path):
    """A copy of the chats that a test may add to."""
    path = tmp_path / "own.jsonl"
    shutil.copy(chats, path)
    return path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "5e-4"),
        ("depths", "3"),
        ("draft_vocab_size", "16"),
        ("tokens_per_batch", "300"),
        ("seed", "7"),
        ("gradient_accumulation_steps", "2"),
        ("max_steps", "6"),
    ],
)
def test_checkpoints_of_other_settings_are_refused_by_name(settings, flags, name, value):
    head = train_eagle(flags(settings)).head
    before = (head / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"checkpoint-4 of another run") as refused:
        train_eagle(flags(settings | {name: value}))
    assert name.replace("gradient_accumulation_steps", "micro_batches") in str(refused.value)
    assert (head / "model.safetensors").read_bytes() == before


def test_grown_data_is_another_run(settings, flags, own_chats):
    told = settings | {"data": [str(own_chats)]}
    train_eagle(flags(told))
    with own_chats.open("a") as file:
        turn = [{"role": "user", "content": "zebra"}, {"role": "assistant", "content": "quick brown zebras jump"}]
        file.write(json.dumps({"id": "more", "messages": turn * 2}) + "\n")
    with pytest.raises(ValueError, match="rows was"):
        train_eagle(flags(told))


def test_what_changes_no_weight_may_change(settings, flags):
    train_eagle(flags(settings))
    again = train_eagle(flags(settings | {"logging_steps": "2", "save_total_limit": "3"}))
    assert again.head is not None


def test_a_best_by_one_metric_is_no_best_by_another(settings, flags):
    train_eagle(flags(settings))
    with pytest.raises(ValueError, match="metric_for_best_model was 'eval_expected_length'"):
        train_eagle(flags(settings | {"acceptance_prompts": "2"}))


@pytest.mark.parametrize("best", ["true", "false"])
def test_the_same_command_after_the_end_takes_no_step(settings, flags, tmp_path, best):
    told = settings | {"load_best_model_at_end": best, "lr_scheduler_type": "constant"}
    first = train_eagle(flags(told))
    weights, summary = (first.head / "model.safetensors").read_bytes(), (first.head / "training.json").read_text()
    second = train_eagle(flags(told))
    assert (second.head / "model.safetensors").read_bytes() == weights
    before, after = json.loads(summary), json.loads((second.head / "training.json").read_text())
    assert {name: after[name] for name in ("steps", "step", "best")} == {
        name: before[name] for name in ("steps", "step", "best")
    }
    assert second.lines == first.lines
    assert [path.name for path in whole_checkpoints(tmp_path / "out")] == ["checkpoint-2", "checkpoint-4"]
    said = "best eval_expected_length" if best == "true" else "step 4, the last"
    assert said in first.lines[0]


def test_a_store_of_other_weights_is_not_taken(settings, flags, tiny, tmp_path):
    mine = tmp_path / "target"
    shutil.copytree(tiny, mine)
    stored = settings | {"features": "store", "target": str(mine)}
    first = train_eagle(flags(stored)).head
    model = AutoModelForCausalLM.from_pretrained(mine)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(mine)
    second = train_eagle(flags(stored | {"output_dir": str(tmp_path / "second")})).head
    assert len(list((tmp_path / "cache").glob("features-*/index.json"))) == 2
    prints = [json.loads((head / "config.json").read_text())["target_fingerprint"] for head in (first, second)]
    assert prints[0] != prints[1]
    train_eagle(flags(stored | {"output_dir": str(tmp_path / "third")}))
    assert len(list((tmp_path / "cache").glob("features-*/index.json"))) == 2


def test_without_resume_earlier_checkpoints_are_in_the_way(settings, flags, tmp_path):
    train_eagle(flags(settings | {"resume": "false"}))
    with pytest.raises(ValueError, match="resume=false"):
        train_eagle(flags(settings | {"resume": "false"}))
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    assert train_eagle(flags(settings | {"resume": "false"})).head is not None


@pytest.mark.parametrize("state", [None, "", '{"global_step": 4'])
def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(settings, flags, tmp_path, state):
    straight = load_file(
        train_eagle(flags(settings | {"output_dir": str(tmp_path / "straight")})).head / "model.safetensors"
    )
    train_eagle(flags(settings))
    newest = tmp_path / "out" / "checkpoint-4"
    (newest / "trainer_state.json").unlink()
    (newest / "optimizer.pt").unlink()
    if state is not None:
        (newest / "trainer_state.json").write_text(state)
    assert [path.name for path in whole_checkpoints(tmp_path / "out")] == ["checkpoint-2"]
    resumed = load_file(train_eagle(flags(settings)).head / "model.safetensors")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert [path.name for path in whole_checkpoints(tmp_path / "out")] == ["checkpoint-2", "checkpoint-4"]


def test_settings_lie_beside_the_head(settings, flags):
    head = train_eagle(flags(settings)).head
    told = json.loads((head / SETTINGS_FILE).read_text())
    assert told["learning_rate"] == 1e-3
    assert told["depths"] == 2
    assert "cache" not in told


def test_a_dry_run_writes_no_store_and_says_how_large_it_will_be(settings, flags, tmp_path):
    stored = settings | {"features": "store"}
    outcome = train_eagle(flags(stored | {"dry_run": "true"}))
    text = "\n".join(outcome.lines)
    assert "Feature store:" in text
    assert "not written yet" in text
    assert not list((tmp_path / "cache").glob("features-*"))
    assert not list((tmp_path / "out").glob("*"))
    planned = next(line for line in outcome.lines if line.startswith("Disk:"))
    train_eagle(flags(stored))
    assert list((tmp_path / "cache").glob("features-*/index.json"))
    again = train_eagle(flags(stored | {"dry_run": "true", "output_dir": str(tmp_path / "other")}))
    assert "not written yet" not in "\n".join(again.lines)
    assert next(line for line in again.lines if line.startswith("Disk:")) == planned


def test_a_whole_store_with_a_started_head_loads_no_target(settings, flags, tmp_path, monkeypatch):
    stored = settings | {"features": "store", "write_store": "true"}
    train_eagle(flags(stored))
    monkeypatch.setattr("spechead.training.sources.load_target", lambda *given, **named: pytest.fail("target loaded"))
    train_eagle(flags(stored))
    head = train_eagle(flags(stored | {"write_store": "false"})).head
    assert head is not None


def test_a_published_head_that_names_no_taps_is_gone_on_with(common, flags, tiny, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(tiny)
    torch.manual_seed(1)
    heads = MedusaHeads(MedusaConfig.for_target(target.config, num_heads=2)).bind(target)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    heads.save_pretrained(tmp_path / "own")
    export_head(tmp_path / "own", "vllm", tmp_path / "published")
    start = load_head(tmp_path / "published")
    assert start.config.taps is None
    told = common | {"init_head": str(tmp_path / "published"), "max_steps": "1", "learning_rate": "1e-12"}
    trained = load_head(train_medusa(flags(told)).head)
    assert list(trained.taps) == [4]
    assert trained.config.num_heads == 2
    for name, weight in start.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], weight.float(), atol=1e-6, rtol=0)


def test_a_published_head_of_another_target_is_refused_first(common, flags, tiny, tmp_path):
    config = AutoModelForCausalLM.from_pretrained(tiny).config
    config.vocab_size = 290
    MedusaHeads(MedusaConfig.for_target(config)).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="290 ids"):
        train_medusa(flags(common | {"init_head": str(tmp_path / "other")}))


def test_acceptance_is_measured_over_all_sources(settings, flags, tmp_path, tiny, monkeypatch):
    files = []
    for name in ("ash", "elm", "oak"):
        files.append(tmp_path / f"{name}.jsonl")
        turns = [
            [{"role": "user", "content": f"{name} {n}"}, {"role": "assistant", "content": "a b c"}] for n in range(20)
        ]
        files[-1].write_text(
            "".join(json.dumps({"id": f"{name}{n}", "messages": t}) + "\n" for n, t in enumerate(turns))
        )
    seen = []
    kept = run_module.MeasureAcceptance

    def noting(target, head, prompts, tokens):
        seen.extend(prompts)
        return kept(target, head, prompts, tokens)

    monkeypatch.setattr(run_module, "MeasureAcceptance", noting)
    train_eagle(
        flags(settings | {"data": [str(f) for f in files], "acceptance_prompts": "6", "acceptance_new_tokens": "4"})
    )
    from transformers import AutoTokenizer

    texts = AutoTokenizer.from_pretrained(tiny).batch_decode(seen)
    assert len(texts) == 6
    assert all(any(name in text for text in texts) for name in ("ash", "elm", "oak"))
