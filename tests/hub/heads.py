"""Directories of tiny heads as training and measuring leave them: config, weights, results, recipe, certificate."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from spechead.bench.certificate import Certificate, CheckSettings, MethodCheck
from spechead.bench.results import Cell, Hardware, Load, Model, Results, Versions, save
from spechead.bench.strict_json import write_json
from spechead.heads.fingerprint import head_identity
from spechead.hub.card import method_of
from spechead.hub.publish import PublishReport, publish
from tests.unit.heads.targets import make_head, make_target

TARGET = "org/tiny-target"
REPO = "user/tiny-eagle3"
FILES = {
    "README.md",
    "config.json",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
    "model.safetensors",
    "recipe.yaml",
    "results.json",
    "training_prompts.txt",
}


def cells(method: str) -> list[Cell]:
    """Figures of plain, of the head's method, and of another one, on two groups: one won, one lost."""

    def cell(group: str, name: str, ratio: float, length: float | None) -> Cell:
        return Cell(
            load=0,
            group=group,
            method=name,
            rows=4,
            tokens_per_second=20.0 * ratio,
            ratio=ratio,
            ratio_low=ratio - 0.11,
            ratio_high=ratio + 0.12,
            seconds_to_first_token=0.05,
            acceptance_length=length,
            acceptance_rate=None if length is None else 0.31,
            acceptance_rate_by_depth=[] if length is None else [0.5, 0.25],
            identical=None if name == "plain" else 0.75,
            ties=0 if name == "plain" else 1,
        )

    found = []
    for name, won, lost in (("plain", 1.0, 1.0), ("prompt_lookup", 1.1, 0.97), (method, 1.63, 0.84)):
        length = None if name == "plain" else 1.9
        found += [
            cell("chat", name, won, length),
            cell("maths", name, lost, length),
            cell("mean", name, (won + lost) / 2, length),
        ]
    return found


def results_for(head: Any, **changes: Any) -> Results:
    """A complete results file of a head."""
    method = method_of(head.config)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    values: dict[str, Any] = {
        "created": "2026-01-02T03:04:05+00:00",
        "command": ["spechead", "bench", "--head", "head"],
        "versions": Versions("3.11.7", "2.13.0", "5.24.0", "0.1.0"),
        "hardware": Hardware("Some processor", 16 * 2**30, 2, "x86_64"),
        "models": [
            Model("tiny-target", "target", "llama", 1000, "bfloat16", "sdpa"),
            Model("head", "head", head.config.model_type, parameters, "float32", fingerprint=head_identity(head)),
        ],
        "methods": {
            "plain": {},
            "prompt_lookup": {"speculative": {"method": "prompt_lookup"}},
            method: {"speculative": {"method": method, "num_draft_tokens": None}},
        },
        "loads": [Load(128)],
        "source": "builtin",
        "prompts": {"chat": ["a", "b"], "maths": ["c", "d"]},
        "digests": {"a": "00000000000a", "b": "00000000000b", "c": "00000000000c", "d": "00000000000d"},
        "cells": cells(method),
        "complete": True,
    }
    return Results(**(values | changes))


def prove(head: Any, directory: Path, **changes: Any) -> None:
    """Write a certificate that says the head passed."""
    method = method_of(head.config)
    measured = results_for(head)
    values: dict[str, Any] = {
        "created": "2026-01-02T03:04:05+00:00",
        "command": ["spechead", "verify", "--head", "head"],
        "versions": measured.versions,
        "hardware": measured.hardware,
        "models": measured.models,
        "source": "builtin",
        "prompts": {"chat": ["a"]},
        "settings": CheckSettings(),
        "methods": [MethodCheck("prompt_lookup", {}, False, True), MethodCheck(method, {}, False, True)],
        "passed": True,
    }
    write_json(asdict(Certificate(**(values | changes))), directory / "verify.json")


def head_directory(directory: Path, kind: str = "eagle3", target: Any = None, **overrides: Any) -> Path:
    """Write a head that passes every check of `publish`; returns its directory."""
    target = make_target(layers=8) if target is None else target
    head = make_head(kind, target, **overrides)
    head.config.target_name = head.config.target_name or TARGET
    head.save_pretrained(directory)
    save(results_for(head), directory / "results.json")
    recipe = "data:\n- org/answers:train\n- more.jsonl\nlearning_rate: 0.002\ntarget: org/tiny-target\n"
    (directory / "recipe.yaml").write_text(recipe, encoding="utf-8")
    (directory / "training_prompts.txt").write_text("0123456789ab\nba9876543210\n", encoding="utf-8")
    prove(head, directory)
    return directory


def saved_head(directory: Path, target: Any, kind: str, **overrides: Any) -> Any:
    """Write a head of a target that lies on disk; returns the head."""
    head = make_head(kind, target, **overrides)
    head.config.target_name = target.directory
    head.save_pretrained(directory)
    return head


def read_export(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what an exported directory holds: config and tensors."""
    config = json.loads((directory / "config.json").read_text())
    file = next(file for file in directory.iterdir() if file.suffix in (".safetensors", ".pt"))
    return config, torch.load(file, weights_only=True) if file.suffix == ".pt" else load_file(file)


def send(head: Path, **arguments: Any) -> PublishReport:
    """Publish a head to REPO with a licence."""
    return publish(REPO, head, **({"license": "apache-2.0"} | arguments))
