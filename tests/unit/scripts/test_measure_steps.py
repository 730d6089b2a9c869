"""scripts/measure_steps.py on a tiny target: the results file, the page made of it, and its refusals."""

import json

import pytest

from scripts import measure_steps
from tests import tiny


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A results file and a page of a tiny target."""
    directory = tmp_path_factory.mktemp("steps")
    tiny.fresh_model("llama").save_pretrained(directory / "target")
    files = {"results": directory / "results" / "costs.json", "page": directory / "page.md"}
    arguments = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    call = ["--target", str(directory / "target"), "--dtype", "float32", "--threads", "1", "--prompt-tokens", "12"]
    assert measure_steps.main([*arguments, *call, "--repeats", "3"]) == 0
    return files, arguments


def test_every_part_is_measured(measured):
    results = json.loads(measured[0]["results"].read_text())
    assert list(results["target_forward"]) == [str(nodes) for nodes in measure_steps.NODES]
    assert results["settings"]["repeats"] == 3
    assert list(results["steps"]) == ["EAGLE-3 tree", "EAGLE-3 chain", "Medusa tree", "nothing drafted"]
    assert results["eagle_draft_level"]["median"] > 0
    for name, row in results["steps"].items():
        assert row["whole"] == pytest.approx(row["draft"] + row["target"] + row["verify"] + row["keep"])
        assert row["overhead"] == pytest.approx(1 - row["target"] / row["whole"])
        assert row["emitted"] >= (1 if name == "nothing drafted" else measure_steps.KEPT + 1)
    assert results["steps"]["EAGLE-3 tree"]["nodes"] == pytest.approx(measure_steps.TREE_NODES, abs=2)


def test_the_page_holds_the_measured_figures_and_is_rendered_again_as_it_was(measured):
    files, arguments = measured
    page, results = files["page"].read_text(), json.loads(files["results"].read_text())
    for row in results["steps"].values():
        assert f"| {measure_steps.milliseconds(row['whole'])} | {100 * row['overhead']:.0f} % |" in page
    assert "random weights" in page
    assert "{" not in page
    files["page"].unlink()
    assert measure_steps.main([*arguments, "--render"]) == 0
    assert files["page"].read_text() == page


def test_without_a_target_or_a_file_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECHEAD_CACHE", str(tmp_path))
    files = ["--results", str(tmp_path / "none.json"), "--page", str(tmp_path / "page.md")]
    assert measure_steps.main(files) == 1
    assert "scripts/fetch_demo_target.py" in capsys.readouterr().err.replace("\n", " ")
    assert measure_steps.main([*files, "--render"]) == 1
    assert "leave --render out" in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "page.md").exists()
