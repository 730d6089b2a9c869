"""scripts/gpu_check.py on tiny shapes: what it reports, and that it says what it ran on."""

import json

import pytest
import torch

from scripts import gpu_check


@pytest.fixture
def few_repeats(monkeypatch):
    monkeypatch.setattr(gpu_check, "REPEATS", 3)
    monkeypatch.setattr(gpu_check, "NODES", (1, 8))


def run(capsys, *arguments):
    code = gpu_check.main(["--device", "cpu", "--tiny", "--new-tokens", "16", *arguments])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


@pytest.mark.usefixtures("few_repeats")
def test_tiny_shapes_are_checked_and_the_report_says_that_it_was_no_accelerator(capsys):
    code, report, shown = run(capsys)
    assert code == 0
    assert report["ran_on"]["kind"] == "cpu"
    assert report["ran_on"]["torch"] == torch.__version__
    assert report["remark"].startswith("run on the CPU, so nothing here tells how an accelerator behaves; tiny shapes")
    assert report["remark"][:10] in shown
    assert list(report["shapes"]) == ["llama tiny", "qwen3 tiny"]
    for shape in report["shapes"].values():
        assert [(cell["method"], cell["rows"]) for cell in shape["equality"]] == [
            (method, rows) for method in ("copy as draft", "EAGLE-3", "Medusa") for rows in (1, 4)
        ]
        for cell in shape["equality"]:
            assert (cell["identical"], cell["bugs"]) == (cell["rows"], 0)
            assert cell["acceptance_length"] > (4 if cell["method"] == "copy as draft" else 0.99)
        assert [row["nodes"] for row in shape["steps"]] == [1, 8]
        for row in shape["steps"]:
            assert row["step_ms"] > row["target_ms"] > 0
            assert 0 < row["not_the_targets"] < 1
            assert row["host_synchronisations"] is None
            assert row["peak_bytes"] is None


@pytest.mark.usefixtures("few_repeats")
def test_a_different_output_is_a_bug_and_the_exit_code_says_so(capsys, monkeypatch):
    judged = gpu_check.first_difference
    monkeypatch.setattr(
        gpu_check, "first_difference", lambda plain, ours: judged(plain, [(ours[0] + 1) % 256, *ours[1:]])
    )
    code, report, _ = run(capsys)
    assert code == 1
    assert report["shapes"]["llama tiny"]["equality"][0]["bugs"] == 1


def test_what_the_time_does_not_allow_is_named(capsys):
    code, report, shown = run(capsys, "--minutes", "-1")
    assert code == 0
    assert all(shape["not_run"].startswith("not run: 0 of -60 seconds") for shape in report["shapes"].values())
    assert "not run" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_claimed(capsys):
    assert gpu_check.main([]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing was checked" in captured.err


def test_the_full_shapes_are_of_the_promised_sizes():
    sizes = {}
    for name, config in gpu_check.shapes(tiny=False):
        with torch.device("meta"):
            sizes[name] = gpu_check.AutoModelForCausalLM.from_config(config).num_parameters() / 1e9
    assert {name: round(size, 1) for name, size in sizes.items()} == {
        "llama 1B": 1.2, "qwen3 1.7B": 1.7, "llama 8B": 8.0, "qwen3 8B": 8.2,
    }  # fmt: skip
