"""`spechead inspect`: what it says of sound and broken heads, and its exit code."""

import json

import pytest
import typer
from typer.testing import CliRunner

from spechead.cli.inspect import inspect
from spechead.hub.inspect import inspect_head
from tests.unit.heads.published_layouts import eagle3_config, eagle3_tensors
from tests.unit.heads.targets import DRAFT, VOCAB, make_head, make_target, write

app = typer.Typer()
app.command()(inspect)


@pytest.fixture
def target():
    return make_target(layers=8)


@pytest.mark.parametrize(
    ("kind", "overrides", "expected"),
    [
        ("medusa", {}, {"kind": "Medusa, 4 heads of 1 residual block(s)", "taps": "8 (after the final norm)"}),
        ("eagle", {}, {"kind": "EAGLE-1/2 draft, 1 layer(s), llama style", "draft cache": "32 values"}),
        (
            "eagle3",
            {"draft_vocab_size": DRAFT},
            {"vocabulary": "16 of 48, d2t holds offsets, ascending", "taps": "2, 4, 5"},
        ),
    ],
)
def test_facts_of_own_heads(target, tmp_path, kind, overrides, expected):
    head = make_head(kind, target, **overrides)
    head.save_pretrained(tmp_path)
    report = inspect_head(tmp_path, target.config)
    assert not report.broken
    assert report.traps == ()
    for label, text in expected.items():
        assert text in report.facts[label]
    parameters = sum(parameter.numel() for parameter in head.parameters())
    assert f"{parameters / 1e6:.2f} M parameters (" in report.facts["memory"]
    assert report.flags["share_lm_head"] == str(head.config.share_lm_head)


def test_a_pair_that_does_not_fit_is_broken(target, tmp_path):
    make_head("eagle3", target).save_pretrained(tmp_path)
    report = inspect_head(tmp_path, make_target(layers=8, vocab_size=VOCAB + 2).config)
    assert report.broken
    assert [trap.name for trap in report.traps] == ["pair"]


def test_published_head_without_a_target(tmp_path):
    write(tmp_path, eagle3_config(), eagle3_tensors())
    report = inspect_head(tmp_path)
    assert not report.broken
    assert report.facts["taps"] == "default: 2, n//2, n-3 of a target of n layers"
    assert report.facts["layout"].startswith("EAGLE-3 with midlayer")


def test_command_prints_the_report_and_exits_by_it(target, tmp_path):
    make_head("eagle3", target, draft_vocab_size=DRAFT).save_pretrained(tmp_path / "head")
    target.save_pretrained(tmp_path / "target")
    run = CliRunner()
    sound = run.invoke(app, [str(tmp_path / "head"), "--target", str(tmp_path / "target")])
    assert sound.exit_code == 0, sound.output
    assert "sound" in sound.output
    assert "EAGLE-3 draft" in sound.output
    write(tmp_path / "broken", eagle3_config(tie_word_embeddings=True), eagle3_tensors())
    broken = run.invoke(app, [str(tmp_path / "broken")])
    assert broken.exit_code == 1
    assert "[tied-head]" in broken.output
    as_json = run.invoke(app, [str(tmp_path / "broken"), "--json"])
    assert as_json.exit_code == 1
    report = json.loads(as_json.stdout)
    assert report["broken"] is True
    assert report["traps"][0]["name"] == "tied-head"
    missing = run.invoke(app, [str(tmp_path / "nowhere")])
    assert isinstance(missing.exception, ValueError)  # the group in cli/main.py turns it into one line
    assert "no directory" in str(missing.exception)
