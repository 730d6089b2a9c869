"""Loading a head by repo id from the stand-in: revisions, the cache offline, and one clear error for each damage."""

from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from spechead import enable_speculation
from spechead.heads import load_head
from tests.hub.heads import head_directory
from tests.unit.heads.targets import make_target

REPO = "user/tiny-eagle3"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    directory = head_directory(tmp_path / "head", draft_vocab_size=16)
    return {name: (directory / name).read_bytes() for name in ("config.json", "model.safetensors")}


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, files):
    repo = hub.add(REPO, files)
    first = repo.refs["main"]
    repo.refs["v1"] = first
    repo.commit(
        {**files, "config.json": files["config.json"].replace(b'"draft_vocab_size": 16', b'"draft_vocab_size": 17')},
        "main",
    )
    target = make_target(layers=8)
    for revision in ("v1", first):
        model = enable_speculation(make_target(layers=8), head=REPO, revision=revision)
        assert model.config.vocab_size == target.config.vocab_size
    with pytest.raises(ValueError, match="17"):
        load_head(REPO)


def test_a_wrong_revision_is_named(hub, files):
    hub.add(REPO, files)
    with pytest.raises(RevisionNotFoundError, match="nonesuch"):
        load_head(REPO, revision="nonesuch")


def test_an_unknown_repo_is_named(hub):
    with pytest.raises(RepositoryNotFoundError, match="user/nothing"):
        load_head("user/nothing")


def test_the_cache_is_used_offline_and_nothing_else(hub, files, monkeypatch):
    hub.add(REPO, files)
    load_head(REPO)
    seen = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_head(REPO).config.draft_vocab_size == 16
    assert hub.requests[seen:] == []
    with pytest.raises(LocalEntryNotFoundError):
        load_head("user/never-seen")


def test_a_corrupted_upload_is_an_error_that_names_it(hub, files):
    weights = files["model.safetensors"]
    hub.add(REPO, {**files, "model.safetensors": weights[: len(weights) // 2]})
    with pytest.raises(ValueError, match="cannot be read"):
        load_head(REPO)
    hub.add("user/noise", {**files, "model.safetensors": b"\xff" * len(weights)})
    with pytest.raises(ValueError, match="cannot be read"):
        load_head("user/noise")


def test_a_download_cut_in_the_middle_leaves_no_head_behind(hub, files):
    hub.add(REPO, files)
    hub.fail("GET", "/resolve/.*model.safetensors", "half")
    with pytest.raises(Exception, match=r"(?i)incomplete|peer closed|consistency|connection|transfer"):
        load_head(REPO)
    hub.faults.clear()
    assert load_head(REPO).config.draft_vocab_size == 16


def test_a_repo_without_safetensors_is_refused_and_its_pickle_is_not_fetched(hub, files):
    hub.add(REPO, {"config.json": files["config.json"], "pytorch_model.bin": b"pickle"})
    with pytest.raises(ValueError, match=r"holds no weights; expected model.safetensors"):
        load_head(REPO)
    assert not any("pytorch_model" in request for request in hub.requests)


def test_code_in_the_repo_is_never_fetched_by_load_head(hub, files):
    hub.add(REPO, {**files, "custom_generate/generate.py": b"raise SystemExit", "modeling.py": b"raise SystemExit"})
    load_head(REPO)
    assert not any(".py" in request for request in hub.requests)


def test_a_head_for_another_target_is_refused(hub, files):
    hub.add(REPO, files)
    with pytest.raises(ValueError, match="trained for a target of 8 layers"):
        enable_speculation(make_target(layers=6), head=REPO)
    with pytest.raises(ValueError, match="vocabulary of 48 ids"):
        enable_speculation(make_target(layers=8, vocab_size=40), head=REPO)
