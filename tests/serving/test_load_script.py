"""scripts/load_test.py runs, alternates its servers and writes every figure."""

import json

import pytest

from scripts.load_test import MODES, Cell, main, verdict
from scripts.render_load import PAGE, ROOT, render
from tests.serving.loopback import byte_model, byte_tokenizer


def test_a_quick_load_writes_every_figure(tmp_path, capsys):
    directory = tmp_path / "tiny-target"
    byte_model(ends=False, positions=4096).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    out = tmp_path / "load.json"
    code = main(["--target", str(directory), "--out", str(out), "--quick", "--device", "cpu"])
    results = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    assert results["target"] == "tiny-target"
    assert results["fixed"] == "prompt_lookup"
    assert [(cell["concurrency"], cell["mode"]) for cell in results["cells"]] == [
        (c, m) for c in (1, 4) for m in MODES
    ]
    for cell in results["cells"]:
        assert (cell["requests"], cell["failures"], cell["tokens"]) == (8, [], 8 * 16)
        assert len(cell["round_tokens_per_second"]) == 2
        assert 0 < cell["time_to_first_token"]["median"] < cell["latency"]["median"] <= cell["latency"]["p95"]
        assert cell["tokens_per_second"] == pytest.approx(cell["tokens"] / cell["seconds"])
        assert 1 <= cell["mean_batch"] <= cell["concurrency"]
        assert (cell["acceptance_length"] == 1) == (cell["mode"] == "off" or not cell["acceptance_length"] > 1)
    assert [one["concurrency"] for one in results["verdicts"]] == [1, 4]
    page = render((ROOT / PAGE).read_text(), tmp_path / "nowhere")
    assert render(page, tmp_path / "nowhere") == page
    assert "No figures yet" in page
    shown = render("<!-- load: load.json -->\n<!-- /load -->", tmp_path)
    for cell in results["cells"]:
        assert f"| {cell['concurrency']} | {cell['mode']} | {cell['tokens_per_second']:.1f} |" in shown
    assert code == (0 if all(one["passed"] for one in results["verdicts"]) else 1)
    assert "tokens/s" in capsys.readouterr().out


def test_auto_is_held_to_the_better_of_the_other_two():
    def cells(auto, fixed, off, failures=()):
        speeds = {"auto": auto, "fixed": fixed, "off": off}
        return [
            Cell(4, mode, tokens=int(speed), seconds=1.0, round_tokens_per_second=[speed], failures=list(failures))
            for mode, speed in speeds.items()
        ]

    assert verdict(cells(96, 100, 50))["passed"]
    assert verdict(cells(96, 50, 100))["better"] == "off"
    assert not verdict(cells(94, 100, 50))["passed"]
    assert not verdict(cells(200, 100, 50, failures=["no"]))["passed"]
    assert verdict(cells(96, 100, 50))["round_ratios"] == [0.96]


def test_a_load_without_bounds_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--requests", "1000000"])
    assert "at most 10000 requests" in capsys.readouterr().err


def test_failed_requests_are_recorded_with_their_reason(tmp_path):
    """The byte tokenizer makes some prompts longer than a target of 1024 positions takes."""
    directory = tmp_path / "tiny-target"
    byte_model(ends=False).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    options = ["--requests", "8", "--concurrency", "2", "--rounds", "1", "--max-tokens", "2", "--device", "cpu"]
    assert main(["--target", str(directory), "--out", str(tmp_path / "load.json"), *options]) == 1
    results = json.loads((tmp_path / "load.json").read_text())
    for cell in results["cells"]:
        assert cell["requests"] == 8
        assert 0 < len(cell["failures"]) < 8
        assert "this server takes 1023" in cell["failures"][0]
