"""Medusa training reads the states that decoding reads and predicts the tokens that decoding proposes."""

from __future__ import annotations

import pytest
import torch

from spechead.heads.config import MedusaConfig
from spechead.heads.medusa import MedusaHeads
from spechead.training.batch import collate
from spechead.training.dataset import OnlineFeatures
from spechead.training.medusa import MedusaObjective


@pytest.fixture
def heads(target):
    torch.manual_seed(4)
    made = MedusaHeads(MedusaConfig.for_target(target.config, num_heads=3)).bind(target, match_dtype=False)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(std=0.3)
    return made


def batch_of(rows, target, ends, taps):
    batch = collate(rows)
    batch.pop("numbers")
    return OnlineFeatures(target, ends)(batch, taps)


def test_the_loss_is_the_divergence_of_each_heads_law_from_the_targets(target, ends, heads, rows):
    objective = MedusaObjective(heads, ends, decay=0.8)
    batch = batch_of(rows, target, ends, objective.taps)
    result = objective(**batch)
    expected, counts = torch.zeros(3), torch.zeros(3)
    for row in rows:
        with torch.no_grad():
            output = target(input_ids=torch.tensor([row["input_ids"]]), output_hidden_states=True)
        laws = torch.log_softmax(output.logits[0], -1)
        own = torch.log_softmax(heads(output.hidden_states[-1][0]), -1)  # [K, L, V]
        answers = {place for start, stop in row["spans"] for place in range(start, stop)}
        for head in range(3):
            for place in range(len(row["input_ids"])):
                # read at `place`, token place+1 known, proposes place+2+head: an unbroken run of answer tokens
                if all(step in answers for step in range(place + 1, place + 3 + head)):
                    p = laws[place + 1 + head]
                    expected[head] += (p.exp() * (p - own[head, place])).sum()
                    counts[head] += 1
    assert torch.equal(result["tried"].float(), counts)
    torch.testing.assert_close(result["loss_by_depth"], expected, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(result["loss"], (expected * 0.8 ** torch.arange(3)).sum(), atol=1e-3, rtol=1e-4)


def test_only_the_heads_train(target, ends, heads, rows):
    objective = MedusaObjective(heads, ends)
    objective(**batch_of(rows, target, ends, objective.taps))["loss"].backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in heads.parameters())
    assert all(weight.grad is None for weight in target.parameters())
    assert {name for name, _ in objective.named_parameters()} == {
        f"head.{name}" for name, _ in heads.named_parameters()
    }


def test_a_sampled_softmax_has_the_gradient_of_the_whole_one_on_average(target, ends, heads, rows):
    whole = MedusaObjective(heads, ends)
    batch = batch_of(rows, target, ends, whole.taps)

    def gradient(objective):
        heads.zero_grad()
        objective(**batch)["loss"].backward()
        return torch.cat([weight.grad.flatten() for weight in heads.parameters()])

    wanted = gradient(whole)
    sampled = MedusaObjective(heads, ends, kept=range(0, 64, 2))
    torch.manual_seed(0)
    found = torch.stack([gradient(sampled) for _ in range(40)])
    assert not torch.equal(found[0], found[1])  # other rows each time
    similarity = torch.nn.functional.cosine_similarity(found.mean(0), wanted, dim=0)
    assert similarity > 0.95


def test_evaluation_takes_all_rows_and_counts_the_targets_choice(target, ends, heads, rows):
    objective = MedusaObjective(heads, ends, kept=range(8))
    batch = batch_of(rows, target, ends, objective.taps)
    with torch.no_grad():
        first, second = objective(**batch), objective(**batch)
    assert torch.equal(first["loss"], second["loss"])
    correct = torch.zeros(3)
    for row in rows:
        with torch.no_grad():
            output = target(input_ids=torch.tensor([row["input_ids"]]), output_hidden_states=True)
            guesses = heads(output.hidden_states[-1][0]).argmax(-1)
        answers = {place for start, stop in row["spans"] for place in range(start, stop)}
        for head in range(3):
            for place in range(len(row["input_ids"]) - 2 - head):
                if all(step in answers for step in range(place + 1, place + 3 + head)):
                    correct[head] += guesses[head, place] == output.logits[0, place + 1 + head].argmax()
    assert torch.equal(first["correct"].float(), correct)
