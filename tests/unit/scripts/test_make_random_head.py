"""scripts/make_random_head.py: another head's shape and vocabulary, and nothing that it learnt."""

from pathlib import Path

import pytest
import torch

from scripts import make_random_head
from spechead import load_head
from tests.tiny import tiny_model
from tests.tiny_heads import KINDS, make_head


@pytest.mark.parametrize("kind", KINDS)
def test_config_and_vocabulary_stay_and_weights_are_new(kind: str, tmp_path: Path) -> None:
    settings = {"draft_vocab_size": 40} if kind == "eagle3" else {}
    old = make_head(kind, tiny_model("llama"), **settings)
    old.save_pretrained(tmp_path / "old")
    assert make_random_head.main([str(tmp_path / "old"), "--output", str(tmp_path / "new")]) == 0
    new = load_head(tmp_path / "new", tiny_model("llama"))
    assert new.config.to_dict() == load_head(tmp_path / "old").config.to_dict()
    if kind == "eagle3":
        assert torch.equal(new.draft_to_target, old.draft_to_target)
    matrices = {name: value for name, value in new.state_dict().items() if value.ndim > 1}
    assert matrices
    for name, value in matrices.items():
        before = old.state_dict()[name]
        mixed = torch.stack([value.flatten(), before.flatten()]).float()
        assert abs(torch.corrcoef(mixed)[0, 1]) < 0.5, name
        assert value.std() == pytest.approx(float(before.std()), rel=0.5)
