"""Where checkpoints come from: directories, the Hub, and pickles only when they are asked for."""

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from spechead.heads import checkpoint, load_head
from tests.unit.heads.targets import DRAFT, make_head, make_target


@pytest.fixture
def target():
    return make_target(layers=8)


def test_pickles_with_more_than_tensors_are_refused(target, tmp_path):
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1}', encoding="utf-8")
    torch.save({"0.0.linear.weight": [1, 2]}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="state dict of tensors"):
        load_head(tmp_path, target, allow_pickle=True)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match="tensors alone"):
        load_head(tmp_path, target, allow_pickle=True)


def test_paths_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="no directory"):
        load_head(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="no weights"):
        load_head(tmp_path)


def test_hub_repos_are_downloaded_without_pickles_or_code(target, tmp_path, monkeypatch):
    make_head("eagle", target).save_pretrained(tmp_path)
    asked = {}

    def download(repo, **kwargs):
        asked.update(kwargs, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    load_head("org/head", target, revision="v1", token="secret", cache_dir="elsewhere")
    assert [asked[name] for name in ("repo", "revision", "token", "cache_dir")] == [
        "org/head",
        "v1",
        "secret",
        "elsewhere",
    ]
    assert asked["allow_patterns"] == ["*.json", "*.safetensors"]
    load_head("org/head", target, allow_pickle=True)
    assert asked["allow_patterns"] == ["*.json", "*.safetensors", "medusa_lm_head.pt", "pytorch_model*.bin"]


def test_offline_and_not_cached_is_an_error():
    with pytest.raises(LocalEntryNotFoundError):
        load_head("org/a-head-that-is-not-cached")


def test_loading_leaves_the_random_state_alone(target, tmp_path):
    make_head("eagle3", target, draft_vocab_size=DRAFT).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    load_head(tmp_path, target)
    assert torch.equal(torch.get_rng_state(), before)
