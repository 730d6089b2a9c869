"""Acceptance at an evaluation: nothing that is decoded stops a training or leaves the other processes waiting."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from spechead.training import acceptance
from spechead.training.acceptance import METRIC, MeasureAcceptance, acceptance_length

PROMPTS = [[5, 6, 7], [8, 9]]


def test_answers_of_one_token_count_as_one_token_a_step(target, eagle):
    assert acceptance_length(target, eagle, PROMPTS, 8) >= 1.0
    target.generation_config.eos_token_id = list(range(64))
    assert acceptance_length(target, eagle, PROMPTS, 8) == 1.0


def evaluated(callback, broadcast, monkeypatch):
    """The metrics after an evaluation as one of two processes."""
    monkeypatch.setattr(acceptance.distributed, "broadcast", broadcast)
    metrics: dict[str, float] = {}
    args = SimpleNamespace(device=torch.device("cpu"), world_size=2)
    callback.on_evaluate(args, TrainerState(), TrainerControl(), metrics=metrics)
    return metrics


def test_the_others_get_the_first_processs_figure(target, eagle, monkeypatch):
    sent = []
    first = evaluated(
        MeasureAcceptance(target, eagle, PROMPTS, 8), lambda figure, src: sent.append(figure.item()), monkeypatch
    )
    assert first[METRIC] == sent[0] >= 1.0
    second = evaluated(
        MeasureAcceptance(None, eagle, PROMPTS, 8), lambda figure, src: figure.fill_(sent[0]), monkeypatch
    )
    assert second == first


def test_a_first_process_that_fails_says_why_and_frees_the_others(target, eagle, monkeypatch):
    def failing(*args):
        raise ValueError("no memory")

    monkeypatch.setattr(acceptance, "acceptance_length", failing)
    sent = []
    with pytest.raises(ValueError, match="no memory"):
        evaluated(
            MeasureAcceptance(target, eagle, PROMPTS, 8), lambda figure, src: sent.append(figure.item()), monkeypatch
        )
    assert len(sent) == 1
    assert math.isnan(sent[0])
    with pytest.raises(RuntimeError, match="first process could not decode"):
        evaluated(MeasureAcceptance(None, eagle, PROMPTS, 8), lambda figure, src: figure.fill_(sent[0]), monkeypatch)
