"""How a training run starts: on the machine's device, in its arithmetic; what would stop it later stops it at once."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml

from spechead.heads.load import load_head
from spechead.training import acceptance
from spechead.training.objective import Objective
from spechead.training.run import train_eagle, train_medusa
from spechead.training.trainer import HeadTrainer


@pytest.fixture
def settings(common):
    return common | {"method": "eagle3", "depths": "2", "draft_vocab_size": "64", "learning_rate": "5e-3"}


def log_of(directory):
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


def test_a_pair_that_cannot_be_decoded_stops_the_run_before_its_first_step(settings, flags, monkeypatch):
    def refusing(*args, **kwargs):
        raise ValueError("this target cannot be decoded")

    monkeypatch.setattr(acceptance, "enable_speculation", refusing)
    monkeypatch.setattr(HeadTrainer, "training_step", lambda *args, **kwargs: pytest.fail("trained first"))
    with pytest.raises(ValueError, match="cannot be decoded"):
        train_eagle(flags(settings | {"acceptance_prompts": "2"}))


@pytest.mark.parametrize("metric", ["eval_acuracy_1", "accuracy_3", "eval_acceptance_length"])
def test_a_metric_that_is_not_measured_is_refused_before_the_first_step(settings, flags, metric, monkeypatch):
    monkeypatch.setattr(HeadTrainer, "training_step", lambda *args, **kwargs: pytest.fail("trained first"))
    with pytest.raises(ValueError, match=f"metric_for_best_model='{metric}' is not measured; .*eval_accuracy_2"):
        train_eagle(flags(settings | {"metric_for_best_model": metric}))


def test_rows_shorter_than_the_depths_are_trained(settings, flags, tmp_path):
    path = tmp_path / "short.jsonl"
    rows = [{"id": n, "prompt_ids": [1, 2], "response_ids": [4, 5, 6 + n % 3][: 2 + n % 2]} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = {"data": [str(path)], "max_steps": "2", "rows_per_batch": "2", "draft_vocab_size": "4"}
    head = train_eagle(flags(settings | few | {"depths": "5"})).head
    assert len([line for line in log_of(head) if "loss" in line]) == 2
    medusa = {name: value for name, value in (settings | few).items() if name not in ("method", "depths")}
    medusa.pop("draft_vocab_size")
    head = train_medusa(flags(medusa | {"num_heads": "8", "output_dir": str(tmp_path / "medusa")})).head
    assert len([line for line in log_of(head) if "loss" in line]) == 2


def test_what_exceeds_learned_positions_is_refused_before_the_first_step(settings, flags, learned, monkeypatch):
    monkeypatch.setattr(HeadTrainer, "training_step", lambda *args, **kwargs: pytest.fail("trained first"))
    told = settings | {"target": str(learned), "method": "eagle3"}
    with pytest.raises(ValueError, match=r"exceed the target's 96 positions; lower max_length"):
        train_eagle(flags(told))
    with pytest.raises(ValueError, match=r"exceed the target's 96 positions; lower acceptance_new_tokens"):
        train_eagle(flags(told | {"max_length": "90", "acceptance_prompts": "2", "acceptance_new_tokens": "90"}))


def test_ids_beyond_the_vocabulary_are_refused_before_the_first_step(settings, flags, tmp_path, monkeypatch):
    monkeypatch.setattr(HeadTrainer, "training_step", lambda *args, **kwargs: pytest.fail("trained first"))
    path = tmp_path / "other.jsonl"
    rows = [{"id": n, "prompt_ids": [1, 2 if n else 400], "response_ids": [4, 5, 6]} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"400.*288"):
        train_eagle(flags(settings | {"data": [str(path)]}))


def test_the_targets_own_generation_config_does_not_choose_the_head(settings, flags, tiny, tmp_path):
    told = settings | {"acceptance_prompts": "4", "acceptance_new_tokens": "16", "max_steps": "2"}
    plain = log_of(train_eagle(flags(told)).head)
    shutil.copytree(tiny, tmp_path / "strict")
    config = json.loads((tmp_path / "strict" / "generation_config.json").read_text())
    config |= {"repetition_penalty": 3.0, "num_beams": 3, "min_new_tokens": 5}
    (tmp_path / "strict" / "generation_config.json").write_text(json.dumps(config))
    strict = log_of(
        train_eagle(flags(told | {"target": str(tmp_path / "strict"), "output_dir": str(tmp_path / "o2")})).head
    )
    figures = [
        [line["eval_acceptance_length"] for line in log if "eval_acceptance_length" in line] for log in (plain, strict)
    ]
    assert figures[0] == figures[1] != []


def test_the_least_divergence_is_the_best(settings, flags):
    head = train_eagle(flags(settings | {"metric_for_best_model": "eval_divergence_1", "max_steps": "6"})).head
    figures = [line["eval_divergence_1"] for line in log_of(head) if "eval_divergence_1" in line]
    assert len(set(figures)) == 3
    assert json.loads((head / "training.json").read_text())["best"]["value"] == min(figures)


@pytest.mark.parametrize(
    "kind",
    [
        {"method": "eagle3", "depths": "2", "draft_vocab_size": "64"},
        {"method": "eagle"},
        {"num_heads": "2"},
        {"num_heads": "2", "head": '{"share_lm_head": false}'},
    ],
    ids=["eagle3", "eagle", "medusa", "medusa-own-lm-heads"],
)
def test_two_steps_in_bfloat16_arithmetic_on_float32_weights(common, flags, kind, monkeypatch):
    seen = []
    lm_heads, step = Objective.lm_heads, HeadTrainer.training_step
    arithmetic = []

    def watched_forward(self):
        if torch.is_grad_enabled():
            arithmetic.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        return lm_heads(self)

    def watched_step(self, model, *args, **rest):
        loss = step(self, model, *args, **rest)
        parameters = list(model.parameters())
        seen.append(loss.item())
        assert {weight.dtype for weight in parameters} == {torch.float32}
        assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in parameters)
        assert any(weight.grad.any() for weight in parameters)
        assert all(weight.grad is None and not weight.requires_grad for weight in self.features.target.parameters())
        return loss

    monkeypatch.setattr(Objective, "lm_heads", watched_forward)
    monkeypatch.setattr(HeadTrainer, "training_step", watched_step)
    train = train_eagle if "method" in kind else train_medusa
    settings = common | kind | {"bf16": "true", "dtype": "bfloat16", "max_steps": "2", "acceptance_prompts": "2"}
    head = train(flags(settings | {"acceptance_new_tokens": "4"})).head
    assert arithmetic == [torch.bfloat16] * 2
    assert len(seen) == 2
    assert all(0 < loss < 20 for loss in seen)
    assert {weight.dtype for weight in load_head(head).parameters()} == {torch.bfloat16}
    assert any("eval_acceptance_length" in line for line in log_of(head))


def test_a_recipe_needs_no_word_about_the_device(common, flags):
    settings = {name: value for name, value in common.items() if name not in ("use_cpu", "bf16")}
    head = train_medusa(
        flags(settings | {"num_heads": "2", "max_steps": "1", "eval_steps": "1", "save_steps": "1"})
    ).head
    recipe = yaml.safe_load((head / "recipe.yaml").read_text())
    assert "use_cpu" not in recipe
    assert recipe["bf16"] in (True, False)
