"""The check at the start of a training finds a head that sees the future, and nothing else."""

from __future__ import annotations

import pytest
import torch

from spechead.heads.config import MedusaConfig
from spechead.heads.medusa import MedusaHeads
from spechead.training import eagle as eagle_module
from spechead.training.dataset import OnlineFeatures, RowDataset
from spechead.training.eagle import Eagle3Objective, EagleObjective
from spechead.training.medusa import MedusaObjective
from spechead.training.probe import check_causality

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_an_honest_objective_passes(target, ends, eagle, eagle3, rows, kind):
    medusa = MedusaHeads(MedusaConfig.for_target(target.config, num_heads=2)).bind(target, match_dtype=False)
    objective = {
        "eagle": EagleObjective(eagle, ends, noise=0.3),
        "eagle3": Eagle3Objective(eagle3, ends, 3),
        "medusa": MedusaObjective(medusa, ends),
    }[kind]
    check_causality(objective, RowDataset(rows, range(6)), OnlineFeatures(target, ends), CPU)
    assert objective.training


def test_a_later_depth_that_sees_true_entries_too_far_is_found(target, ends, eagle3, rows, monkeypatch):
    plain = eagle_module.depth_mask
    monkeypatch.setattr(eagle_module, "depth_mask", lambda index, *rest: plain(index, *rest) * 0)
    with pytest.raises(ValueError, match="sees the future"):
        check_causality(
            Eagle3Objective(eagle3, ends, 3), RowDataset(rows, range(6)), OnlineFeatures(target, ends), CPU
        )


def test_inputs_shifted_by_one_are_found(target, ends, eagle, rows, monkeypatch):
    plain = eagle_module.unroll

    def shifted(head, tokens, features, gathered):
        return plain(head, tokens.roll(-1, dims=1), features.roll(-1, dims=1), gathered)

    monkeypatch.setattr(eagle_module, "unroll", shifted)
    with pytest.raises(ValueError, match="sees the future"):
        check_causality(EagleObjective(eagle, ends), RowDataset(rows, range(6)), OnlineFeatures(target, ends), CPU)
