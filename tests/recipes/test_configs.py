"""Every shipped config runs: two steps on a tiny target, with the losses that `curves.json` pins.

After a wanted change: python -m pytest tests/recipes/test_configs.py --update-curves
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from spechead.heads.load import load_head
from spechead.training.arguments import HeadTrainingArguments
from spechead.training.draft import DraftArguments, DraftTrainingArguments, distill_draft
from spechead.training.generate import BackendArguments, GenerateArguments, generate_data
from spechead.training.recipe import (
    DataArguments,
    EagleArguments,
    MedusaArguments,
    RunArguments,
    parse,
)
from spechead.training.run import train_eagle, train_medusa

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
MODEL_CARDS = ROOT / "model_cards"
CURVES = Path(__file__).parent / "curves.json"
NEVER_RUN = ("qwen3-8b", "llama-3.1-8b", "llama-3.3-70b")


def losses(directory):
    log = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in log if "loss" in line]


def compare(name, found, update):
    curves = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    if update:
        CURVES.write_text(json.dumps(curves | {name: found}, indent=1, sort_keys=True) + "\n")
        return
    assert found == pytest.approx(curves[name], rel=2e-3)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_two_steps_of_every_config(path, common, flags, tmp_path, request):
    kind = path.stem.rsplit("-", 1)[-1]
    sampled = {"softmax_rows": "100"} if "softmax_rows" in path.read_text() else {}  # of the tiny target's 288
    small = common | sampled | {"max_steps": "2", "eval_steps": "2", "save_steps": "2", "resume": "false"}
    if kind == "data":
        small = {name: common[name] for name in ("target", "data", "dtype", "output_dir", "use_cpu")}
        generate_data(["--config", str(path), *flags(small | {"limit": "3", "max_new_tokens": "4"})])
        assert (tmp_path / "out" / "part-00000.jsonl").read_text().count("\n") >= 3
        return
    if kind == "draft":
        names = ("target", "data", "dtype", "output_dir", "use_cpu", "bf16", "max_steps", "logging_steps", "report_to")
        small = {name: small[name] for name in names} | {
            "max_completion_length": "6",
            "per_device_train_batch_size": "2",
            "answers": common["data"],
        }
        outcome = distill_draft(["--config", str(path), *flags(small)])
    else:
        train = train_medusa if "medusa" in path.stem else train_eagle
        before = yaml.safe_load(path.read_text()).get("init_head")
        if before is not None:  # the head of the config of that name, or for a shipped one the quickest
            first = small | {"output_dir": str(tmp_path / "first")}
            earlier = "smollm2-135m-eagle3-quick" if before.startswith("model_cards/") else Path(before).name
            warm_up = path.with_name(f"{earlier}.yaml")
            small["init_head"] = str(train(["--config", str(warm_up), *flags(first)]).head)
        outcome = train(["--config", str(path), *flags(small)])
    found = losses(outcome.head)
    assert len(found) == 2
    compare(path.stem, found, request.config.getoption("--update-curves"))
    if kind != "draft":
        assert load_head(outcome.head).config.target_fingerprint
        assert (outcome.head / "recipe.yaml").exists()
        assert (outcome.head / "loss_curve.png").stat().st_size > 1000
    assert "spechead generate" in outcome.lines[1]
    assert "ublish" in outcome.lines[2]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_accepted_as_it_stands(path, tmp_path):
    kind = path.stem.rsplit("-", 1)[-1]
    training = (DataArguments, RunArguments, EagleArguments, HeadTrainingArguments)
    if "medusa" in path.stem:
        training = (DataArguments, RunArguments, MedusaArguments, HeadTrainingArguments)
    classes = {"data": (GenerateArguments, BackendArguments), "draft": (DraftArguments, DraftTrainingArguments)}
    on_cpu = [] if kind == "data" else ["--bf16", "false"]
    parse(classes.get(kind, training), ["--config", str(path), "--use_cpu", "true", *on_cpu])


@pytest.mark.parametrize("path", sorted(MODEL_CARDS.glob("*/recipe.yaml")), ids=lambda path: path.parent.name)
def test_the_recipe_beside_a_shipped_head_is_accepted(path):
    kind = MedusaArguments if "medusa" in path.parent.name else EagleArguments
    data, _, method, _ = parse(
        (DataArguments, RunArguments, kind, HeadTrainingArguments), ["--config", str(path), "--bf16", "false"]
    )
    assert data.target == json.loads((path.parent / "config.json").read_text())["target_name"]
    assert method.init_head


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_that_was_never_run_at_its_size_says_so(path):
    said = " ".join(line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))
    assert ("Never run at this size here" in said) == path.stem.startswith(NEVER_RUN)
    assert f"recipes/configs/{path.name}" in said  # the command to run it
    assert yaml.safe_load(path.read_text())["target"]
