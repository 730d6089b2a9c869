"""`publish` against the stand-in, with the real client: what is sent, what is not, and what a fault leaves behind."""

import json
import re

import pytest
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file

from spechead import publish
from spechead.bench import results as results_file
from spechead.heads import load_head
from spechead.hub.hub_errors import PublishError
from tests.hub.heads import FILES, REPO, results_for, send
from tests.hub.standin import Repo


def writes(requests: list[str]) -> list[str]:
    return [request for request in requests if request.startswith(("POST", "PUT")) and "validate-yaml" not in request]


def tune(head):
    """Give a head another default drafting, and figures of it."""
    config = json.loads((head / "config.json").read_text()) | {"num_draft_tokens": 7}
    (head / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    results_file.save(results_for(load_head(head)), head / "results.json")


def test_a_new_repo_holds_exactly_the_head(hub, head):
    report = send(head, private=True)
    repo = hub.repos[REPO]
    files = repo.commits[report.commit]
    assert set(files) == FILES == set(report.files)
    assert repo.private
    for name in ("config.json", "model.safetensors", "results.json", "recipe.yaml"):
        assert files[name] == (head / name).read_bytes()
    assert b"# tiny-eagle3" in files["README.md"]  # our card, not the library's template
    assert f'HEAD = "{REPO}"'.encode() in files["custom_generate/generate.py"]
    assert report.url.endswith(report.commit)
    assert not report.folder.exists()
    assert [message for message in repo.messages if message != "initial commit"] == ["Publish head with spechead"]


def test_what_was_published_is_what_loads(hub, head):
    report = send(head)
    downloaded = load_head(REPO, revision=report.commit, token=None)
    ours = load_file(head / "model.safetensors")
    for name, tensor in downloaded.state_dict().items():
        assert tensor.equal(ours[name]), name


def test_publishing_again_sends_only_what_changed(hub, head):
    first = send(head)
    seen = len(hub.requests)
    second = send(head)
    assert second.commit is None
    assert second.difference.empty
    assert writes(hub.requests[seen:]) == []

    results = results_file.load(head / "results.json")
    results.cells[0].tokens_per_second = 99.0
    results_file.save(results, head / "results.json")
    third = send(head)
    assert third.difference.added == ()
    assert third.difference.changed == ("results.json",)  # plain's own speed is on no card
    assert set(third.difference.kept) == FILES - {"results.json"}
    repo = hub.repos[REPO]
    assert repo.commits[third.commit]["model.safetensors"] == repo.commits[first.commit]["model.safetensors"]
    assert sum(request.startswith("PUT /large/") for request in hub.requests) == 1


def test_other_files_of_the_repo_stay_and_stale_weights_go(hub, head):
    hub.add(REPO, {"LICENSE": b"text", "model-00001-of-00002.safetensors": b"old", ".gitattributes": b"*"})
    report = send(head)
    files = hub.repos[REPO].commits[report.commit]
    assert set(files) == FILES | {"LICENSE", ".gitattributes"}
    assert "- model-00001-of-00002.safetensors" in report.lines


def test_a_dry_run_writes_the_folder_shows_the_difference_and_sends_nothing(hub, head, tmp_path):
    report = send(head, dry_run=True, output=tmp_path / "out")
    assert {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")} == FILES
    assert writes(hub.requests) == []
    assert REPO not in hub.repos
    assert len(report.difference.added) == len(FILES)

    send(head)
    seen = len(hub.requests)
    tune(head)
    report = send(head, dry_run=True, output=tmp_path / "out")
    assert writes(hub.requests[seen:]) == []
    assert set(report.difference.changed) == {"README.md", "config.json", "results.json"}
    assert any(re.fullmatch(r'    \+ +"num_draft_tokens": 7,', line) for line in report.lines)
    assert any(line.startswith("    +| default drafting | num_draft_tokens 7") for line in report.lines)


def test_a_dry_run_without_the_hub_says_so(hub, head, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    report = send(head, dry_run=True, output=tmp_path / "out")
    assert report.difference is None
    assert any("was not compared: HF_HUB_OFFLINE is set" in note for note in report.notes)
    assert (tmp_path / "out" / "README.md").is_file()
    with pytest.raises(ValueError, match=r"say where \(--output\)"):
        send(head, dry_run=True)
    (tmp_path / "out" / "stray.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"holds stray.bin"):
        send(head, dry_run=True, output=tmp_path / "out")


def test_what_lies_there_may_be_no_text(hub, head):
    hub.add(REPO, {"README.md": b"\xff\xfe bad"})
    report = send(head)
    assert "README.md" in report.difference.changed
    assert hub.repos[REPO].commits[report.commit]["README.md"].startswith(b"---")


def test_metadata_that_cannot_be_read_are_named(hub, head):
    (head / "README.md").write_text("---\nlicense: [broken\n---\n# x\n")
    with pytest.raises(ValueError, match=r"README\.md begins with metadata that cannot be read"):
        publish(REPO, head, allow_unmeasured=True)


def test_branches_pull_requests_and_messages_are_the_librarys(hub, head):
    branch = send(head, revision="v2", commit_message="second version")
    repo = hub.repos[REPO]
    assert repo.refs["v2"] == branch.commit
    assert repo.commits[repo.refs["main"]] == {}
    assert repo.messages[-1] == "second version"
    pull = send(head, create_pr=True)
    assert pull.url.endswith("/discussions/1")
    assert repo.refs["refs/pr/1"] == pull.commit
    assert repo.commits[repo.refs["main"]] == {}
    assert load_head(REPO, revision="refs/pr/1").config.draft_vocab_size == 16


@pytest.mark.parametrize(
    ("method", "path", "how", "said"),
    [
        ("POST", "/api/repos/create", 401, r"does not accept the token \(401\).*hf auth login.*nothing was published"),
        ("POST", "/api/repos/create", 403, r"may not write there \(403\).*nothing was published"),
        ("POST", "/api/repos/create", 500, r"The Hub failed \(500\).*nothing was published"),
        ("GET", "/api/models/", 500, r"The Hub failed \(500\).*nothing was published"),
        ("GET", "/api/models/", "cut", r"connection to the Hub broke.*nothing was published"),
        ("POST", "/preupload/", 500, r"The Hub failed \(500\).*whole or not at all"),
        ("POST", "/info/lfs/objects/batch", 404, r"\(404\).*whole or not at all"),
        ("PUT", "/large/", 500, r"The Hub failed \(500\).*whole or not at all"),
        ("PUT", "/large/", "cut", r"connection to the Hub broke.*whole or not at all"),
        ("POST", "/commit/", 401, r"\(401\).*whole or not at all"),
        ("POST", "/commit/", 409, r"changed meanwhile \(409\); run the same command again"),
        ("POST", "/commit/", 412, r"changed since it was compared \(412\)"),
        ("POST", "/commit/", 500, r"The Hub failed \(500\).*the same command sends what is missing"),
        ("POST", "/commit/", "cut", r"connection to the Hub broke.*the same command sends what is missing"),
    ],
)
def test_every_fault_is_named_and_leaves_nothing_half_published(method, path, how, said, hub, head):
    hub.fail(method, path, how)
    with pytest.raises(PublishError, match=said):
        send(head)
    for repo in hub.repos.values():
        assert all(files == {} for files in repo.commits.values())
    hub.faults.clear()
    report = send(head)  # the same call, once the fault is gone
    assert set(hub.repos[REPO].commits[report.commit]) == FILES


def test_a_fault_on_a_published_repo_leaves_the_old_version(hub, head):
    first = send(head)
    tune(head)
    hub.fail("POST", "/commit/", "cut")
    with pytest.raises(PublishError):
        send(head)
    assert hub.repos[REPO].refs["main"] == first.commit


def test_a_commit_in_between_is_not_overwritten(hub, head, monkeypatch):
    send(head)
    tune(head)
    preupload = HfApi.preupload_lfs_files

    def meanwhile(self, *args, **kwargs):
        repo: Repo = hub.repos[REPO]
        repo.commit(repo.commits[repo.refs["main"]] | {"LICENSE": b"theirs"}, "main")
        return preupload(self, *args, **kwargs)

    monkeypatch.setattr(HfApi, "preupload_lfs_files", meanwhile)
    with pytest.raises(PublishError, match=r"changed since it was compared \(412\); run the same command again"):
        send(head)
    monkeypatch.undo()


def test_a_wrong_token_and_a_private_repo_of_others(hub, head, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(PublishError, match=r"\(401\)"):
        send(head)
    assert hub.repos == {}


def test_an_upload_that_arrives_damaged_is_found(hub, head):
    hub.fail("PUT", "/large/", "corrupt", times=1)
    with pytest.raises(PublishError, match=r"does not hold what was sent: model.safetensors. Publish again"):
        send(head)


def test_offline_is_said(hub, head, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PublishError, match="HF_HUB_OFFLINE is set"):
        send(head)
