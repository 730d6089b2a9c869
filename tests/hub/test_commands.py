"""`spechead publish` and `spechead export`: what they print, and their exit codes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from spechead.cli.main import app
from tests.hub.heads import head_directory
from tests.unit.heads.targets import make_target


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return head_directory(tmp_path / "head", draft_vocab_size=16)


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_export_prints_the_command_its_source_and_that_it_was_not_run(head, tmp_path):
    code, shown = run("export", head, "--to", "vllm", "--output", tmp_path / "out")
    assert code == 0
    assert "15 tensors, read back and equal bit for bit" in shown
    assert "vllm serve org/tiny-target --speculative-config" in shown
    assert '"method": "eagle3"' in shown
    assert (
        "flags read in vLLM 0.33.0 (commit 4ba787ec9), vllm/config/speculative.py; not run against that server"
        in shown
    )


def test_export_refuses_with_exit_code_2(head, tmp_path):
    code, shown = run("export", head, "--to", "tgi", "--output", tmp_path / "out")
    assert code == 2
    assert "it takes no EAGLE-3 heads" in shown
    assert run("export", head, "--to", "vllm", "--output", tmp_path / "out", "--taps", "a,b")[0] == 2


def test_export_takes_the_target_for_shared_parts(head, tmp_path):
    make_target(layers=8).save_pretrained(tmp_path / "target")
    code, shown = run("export", head, "--to", "eagle", "--output", tmp_path / "out", "--target", tmp_path / "target")
    assert code == 0
    assert "beside the head's own: embed_tokens.weight" in shown


def test_publish_takes_repo_then_directory(hub, head):
    code, shown = run("publish", "user/tiny", head, "--license", "apache-2.0", "--private")
    assert code == 0
    assert "+ model.safetensors" in shown
    assert "published user/tiny: " in shown
    assert hub.repos["user/tiny"].private
    code, shown = run("publish", "user/tiny", head, "--license", "mit")
    assert code == 0
    assert "    -license: apache-2.0" in shown
    assert "    +license: mit" in shown


def test_the_printed_use_names_the_branch_or_pull_request(hub, head):
    shown = run("publish", "user/tiny", head, "--license", "mit", "--revision", "dev")[1]
    assert 'enable_speculation(target, head="user/tiny", revision="dev")' in shown
    shown = run("publish", "user/tiny", head, "--license", "mit", "--create-pr")[1]
    assert 'revision="refs/pr/1")' in shown
    shown = run("publish", "user/other", head, "--license", "mit")[1]
    assert 'enable_speculation(target, head="user/other")' in shown


@pytest.mark.parametrize("place", ["./nothing", "/no/such/directory", "a/b/c"])
def test_a_place_that_is_none_is_named(place, tmp_path):
    code, shown = run("export", place, "--to", "vllm", "--output", tmp_path / "out")
    assert code == 2
    assert f"{place} is no directory" in shown


def test_a_dry_run_says_that_nothing_was_sent(hub, head, tmp_path):
    code, shown = run("publish", "user/tiny", head, "--license", "mit", "--dry-run", "--output", tmp_path / "out")
    assert code == 0
    assert "dry run: nothing was sent" in shown
    assert hub.repos == {}


def test_exit_codes_of_publish(hub, head):
    assert run("publish", "user/tiny", head)[0] == 2  # no licence: asked wrongly
    hub.fail("POST", "/commit/", 500)
    code, shown = run("publish", "user/tiny", head, "--license", "mit")
    assert code == 1  # the Hub failed
    assert "The Hub failed (500)" in shown
