"""`spechead bench` and `spechead demo` on a tiny target: what they write, print and refuse."""

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

from spechead.bench import results as results_file
from spechead.bench.differences import Judge
from spechead.bench.prompts import KINDS
from spechead.bench.results import Difference, Record
from spechead.cli import demo as demo_command
from spechead.cli import demo_heads as demo_heads_module
from spechead.stats import DecodeStats
from tests.cli.conftest import Run
from tests.tiny_heads import make_head

FAST = ["--max-new-tokens", "12", "--dtype", "float32"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [
        {"id": "a", "group": "count", "messages": [{"role": "user", "content": "w4 w5 w6 w7"}]},
        {"id": "b", "group": "count", "messages": [{"role": "user", "content": "w6 w7"}]},
        {"id": "c", "group": "long", "messages": [{"role": "user", "content": "w8 w9"}]},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_a_run_writes_figures_of_every_group_and_method(run: Run, target_directory: str, prompts: str) -> None:
    arguments = ["--prompts", prompts, "--num-draft-tokens", "4", "--with-transformers", *FAST]
    result = run("bench", "--target", target_directory, *arguments)
    assert result.exit_code == 0, result.output
    results = results_file.load(Path("results.json"))
    assert results.complete
    assert list(results.methods) == ["plain", "prompt_lookup", "transformers_prompt_lookup"]
    assert results.methods["transformers_prompt_lookup"] == {"prompt_lookup_num_tokens": 4}
    assert results.prompts == {"count": ["a", "b"], "long": ["c"]}
    assert results.source == "log.jsonl"
    assert results.models[0].name == "tiny-target"
    assert {(cell.group, cell.method) for cell in results.cells} == {
        (group, method) for group in ("count", "long", "mean") for method in results.methods
    }
    cell = next(cell for cell in results.cells if (cell.group, cell.method) == ("count", "prompt_lookup"))
    assert cell.acceptance_length > 2
    assert cell.identical == 1
    for text in ("prompt_lookup", "ratio to plain", "mean"):
        assert text in result.stdout


def test_an_interrupted_run_goes_on(
    run: Run, target_directory: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["bench", "--target", target_directory, "--prompts", prompts, *FAST]
    saved = results_file.save

    def interrupted(results: results_file.Results, path: Path) -> None:
        saved(results, path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(results_file, "save", interrupted)
        assert run(*arguments).exit_code != 0
    part = results_file.load(Path("results.json"))
    assert not part.complete
    assert {record.prompts[0] for record in part.records} == {"a"}
    result = run(*arguments)
    assert result.exit_code == 0
    whole = results_file.load(Path("results.json"))
    assert whole.complete
    assert whole.records[: len(part.records)] == part.records
    assert [record.prompts[0] for record in whole.records] == ["a", "a", "b", "b", "c", "c"]


def test_a_finished_run_goes_on_with_more_prompts(run: Run, target_directory: str, prompts: str) -> None:
    arguments = ["bench", "--target", target_directory, "--prompts", prompts, *FAST]
    assert run(*arguments, "--per-group", "1").exit_code == 0
    part = results_file.load(Path("results.json"))
    assert part.complete
    assert [record.prompts[0] for record in part.records] == ["a", "a", "c", "c"]
    assert run(*arguments).exit_code == 0
    whole = results_file.load(Path("results.json"))
    assert whole.complete
    assert whole.records[: len(part.records)] == part.records
    assert [record.prompts[0] for record in whole.records[len(part.records) :]] == ["b", "b"]
    assert whole.prompts == {"count": ["a", "b"], "long": ["c"]}
    assert whole.digests.keys() == {"a", "b", "c"}
    fewer = run(*arguments, "--per-group", "1")
    assert fewer.exit_code == 2, "what was measured is not thrown away"
    assert "holds another run" in fewer.stderr


def test_a_multiple_of_the_prompts_holds_those_that_were_asked(
    run: Run, target_directory: str, tmp_path: Path
) -> None:
    path = tmp_path / "six.jsonl"
    rows = [{"id": f"p{n}", "messages": [{"role": "user", "content": f"w{4 + n} w{5 + n}"}]} for n in range(6)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    arguments = ["bench", "--target", target_directory, "--prompts", str(path), *FAST]
    assert run(*arguments, "--per-group", "2").exit_code == 0
    before = results_file.load(Path("results.json"))
    assert list(before.digests) == ["p0", "p3"]
    other = run(*arguments, "--per-group", "3")
    assert other.exit_code == 2, "p3 is not among p0, p2, p4"
    assert run(*arguments, "--per-group", "4").exit_code == 0
    whole = results_file.load(Path("results.json"))
    assert whole.complete
    assert list(whole.digests) == ["p0", "p1", "p3", "p4"]
    assert whole.records[: len(before.records)] == before.records
    assert [record.prompts[0] for record in whole.records[len(before.records) :]] == ["p1", "p1", "p4", "p4"]


def test_larger_batches_do_not_go_on_with_more_prompts(run: Run, target_directory: str, prompts: str) -> None:
    arguments = ["bench", "--target", target_directory, "--prompts", prompts, *FAST, "--batch-size", "2"]
    assert run(*arguments, "--per-group", "1").exit_code == 0
    result = run(*arguments)
    assert result.exit_code == 2
    assert "holds another run" in result.stderr


def test_a_file_of_another_run_is_not_overwritten(run: Run, target_directory: str, prompts: str) -> None:
    arguments = ["bench", "--target", target_directory, "--prompts", prompts, "--per-group", "1"]
    assert run(*arguments, "--max-new-tokens", "4").exit_code == 0
    before = Path("results.json").read_text()
    result = run(*arguments, "--max-new-tokens", "5")
    assert result.exit_code == 2
    assert "holds another run" in result.stderr
    assert Path("results.json").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "nowhere"], "nowhere"),
        (["--group", "poems"], "no prompt is of group poems"),
        (["--method", "guessing"], "'guessing' is no method"),
        (["--method", "medusa"], "needs a head"),
        (["--with-transformers", "--batch-size", "2"], "--batch-size 1"),
    ],
)
def test_wrong_requests_are_usage_errors(run: Run, target_directory: str, arguments: list[str], message: str) -> None:
    result = run("bench", "--target", target_directory, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not Path("results.json").exists()


def test_batches_and_a_draft_model(run: Run, target_directory: str, prompts: str) -> None:
    arguments = ["--prompts", prompts, "--batch-size", "2", "--draft-model", target_directory, *FAST]
    result = run("bench", "--target", target_directory, "--group", "count", *arguments)
    assert result.exit_code == 0, result.output
    results = results_file.load(Path("results.json"))
    assert [record.prompts for record in results.records] == [["a", "b"]] * 3
    assert [model.role for model in results.models] == ["target", "draft"]
    drafted = results.cells[2]
    assert (drafted.method, drafted.identical, drafted.rows) == ("draft_model", 1, 2)
    assert drafted.acceptance_rate == 1


def test_the_demo_shows_methods_side_by_side(run: Run, target_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_command, "DTYPE_TOKENS", 2)
    result = run("demo", "--target", target_directory, "--max-new-tokens", "8")
    assert result.exit_code == 0, result.output
    assert "float32" in result.stdout
    assert "bfloat16" in result.stdout
    assert "Taking " in result.stdout
    lines = [line for line in result.stdout.splitlines() if "tokens/s   prompt_lookup" in line]
    assert len(lines) == len(KINDS)
    assert all("same text" in line or "first tie at token" in line for line in lines)
    assert "accepted in green" in result.stdout
    assert "ratio to plain" in result.stdout


def test_the_demo_takes_the_dtype_it_is_given(run: Run, target_directory: str) -> None:
    result = run("demo", "--target", target_directory, "--max-new-tokens", "4", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "Taking " not in result.stdout


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (None, "1.50x, same text"),
        (Difference(7, 1, 2, 0.0, 0.5, "tie"), "first tie at token 7, float32 gap 0"),
        (Difference(3, 1, None, verdict="bug"), "first bug at token 3)"),
    ],
)
def test_a_prompts_line_says_what_differs(difference: Difference | None, text: str) -> None:
    plain = Record(0, "plain", ["x"], "chat", 0, 3.0, 0.1, 12)
    other = Record(0, "prompt_lookup", ["x"], "chat", 0, 2.0, 0.1, 12, differences=[difference] if difference else [])
    assert text in demo_command.describe([plain, other])
    other.stats = DecodeStats(method="prompt_lookup", row_steps=5, emitted_tokens=11).to_dict()
    assert "1.50x, 2.20 tokens a step, " in demo_command.describe([plain, other])


def test_an_output_that_rounding_does_not_explain_fails_the_demo(
    run: Run, target_directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(self: Judge, difference: Difference, prompt: list[int], plain: list[int]) -> Difference:
        return Difference(difference.position, difference.plain_token, difference.token, 9.0, 0.1, "bug")

    monkeypatch.setattr("spechead.bench.timing.first_difference", lambda plain, tokens: Difference(0, 1, 2))
    monkeypatch.setattr(Judge, "judge", spoil)
    result = run("demo", "--target", target_directory, "--max-new-tokens", "4", "--dtype", "float32")
    assert result.exit_code == 1
    assert "more than rounding explains" in result.stderr


def test_a_sweep_is_one_run_of_several_loads_and_draft_lengths(run: Run, target_directory: str, prompts: str) -> None:
    lengths = [part for length in ("2", "4") for part in ("--num-draft-tokens", length)]
    loads = ["--batch-size", "1", "--batch-size", "3", "--batch-prompts", "1"]
    heats = ["--temperature", "0", "--temperature", "1"]
    result = run("bench", "--target", target_directory, "--prompts", prompts, *lengths, *loads, *heats, *FAST)
    assert result.exit_code == 0, result.output
    results = results_file.load(Path("results.json"))
    assert results.complete
    assert list(results.methods) == ["plain", "prompt_lookup K=2", "prompt_lookup K=4"]
    assert results.methods["prompt_lookup K=2"]["speculative"]["num_draft_tokens"] == 2
    assert [(load.batch_size, load.temperature) for load in results.loads] == [(1, 0.0), (3, 0.0), (1, 1.0), (3, 1.0)]
    batched = [record.prompts for record in results.records if record.load == 1 and record.method == "plain"]
    assert batched == [["a", "a", "a"], ["c", "c", "c"]], "one prompt a group, repeated to fill the batch"
    assert {(peak.load, peak.method) for peak in results.peaks} == {
        (load, method) for load in range(4) for method in results.methods
    }
    assert all(peak.bytes > 10_000 for peak in results.peaks)
    for text in ("verdict:", "peak memory", "latency", "batch 3, temperature 1"):
        assert text in result.stdout
    page = Path("results.html").read_text()
    assert page.count("data:image/png;base64") > 2
    assert "Speed by batch size, greedy" in page
    (sample, *_) = [sample for sample in results.samples if sample.method == "prompt_lookup K=4"]
    assert any(sample.drafted)
    assert "".join(sample.pieces) == " ".join(["<answer>"] * 12), "the target repeats the last token of its template"


def test_auto_and_a_report_elsewhere(run: Run, target_directory: str, prompts: str) -> None:
    arguments = ["--prompts", prompts, "--method", "auto", "--report", "out/page.html", "--no-peak-memory", *FAST]
    result = run("bench", "--target", target_directory, *arguments)
    assert result.exit_code == 0, result.output
    results = results_file.load(Path("results.json"))
    assert list(results.methods) == ["plain", "auto"]
    assert results.peaks == []
    assert "Verdicts" in Path("out/page.html").read_text()


def test_an_interrupt_leaves_figures_and_a_page(
    run: Run, target_directory: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = results_file.save
    calls = []

    def interrupted(results: results_file.Results, path: Path) -> None:
        saved(results, path)
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(results_file, "save", interrupted)
    result = run("bench", "--target", target_directory, "--prompts", prompts, *FAST)
    assert result.exit_code != 0
    assert "goes on where it stopped" in result.stderr
    assert "verdict:" in result.stdout
    assert "interrupted" in Path("results.html").read_text()


@pytest.fixture
def tiny_heads(target_directory: str, tmp_path: Path) -> list[str]:
    target = AutoModelForCausalLM.from_pretrained(target_directory)
    paths = []
    for number, name in enumerate(("medusa-a", "eagle3-a", "eagle3-b")):
        kind = "medusa" if name.startswith("medusa") else "eagle3"
        make_head(kind, target, seed=number + 1).save_pretrained(tmp_path / name)
        paths.append(str(tmp_path / name))
    return paths


def test_several_heads_of_a_kind_and_trees_run_side_by_side(
    run: Run, target_directory: str, prompts: str, tiny_heads: list[str]
) -> None:
    heads = [part for path in tiny_heads for part in ("--head", path)]
    methods = [part for name in ("medusa", "eagle", "eagle:chain") for part in ("--method", name)]
    arguments = ["--prompts", prompts, "--per-group", "1", "--no-peak-memory", *heads, *methods, *FAST]
    result = run("bench", "--target", target_directory, *arguments)
    assert result.exit_code == 0, result.output
    results = results_file.load(Path("results.json"))
    eagles = ["eagle eagle3-a", "eagle eagle3-b", "eagle chain eagle3-a", "eagle chain eagle3-b"]
    assert list(results.methods) == ["plain", "medusa", *eagles]
    assert results.methods["eagle chain eagle3-b"]["speculative"] == {
        "method": "eagle",
        "num_draft_tokens": None,
        "tree": "chain",
        "head": "eagle3-b",
    }
    assert [model.role for model in results.models] == ["target", "head", "head", "head"]
    for record in results.records:
        if record.method != "plain":
            assert record.stats is not None
            assert record.stats["drafted_tokens"] > 0
            assert record.differences == []
    widths = {
        record.method: record.stats["nodes_fed"] / record.stats["steps"] for record in results.records if record.stats
    }
    assert widths["eagle chain eagle3-a"] < widths["eagle eagle3-a"]


def test_heads_of_one_name_are_told_apart_by_their_directories(
    run: Run, target_directory: str, prompts: str, tiny_heads: list[str]
) -> None:
    same = [
        shutil.copytree(path, Path(path).parent / name / "best")
        for path, name in zip(tiny_heads[1:], "ab", strict=True)
    ]
    heads = [part for path in same for part in ("--head", str(path))]
    arguments = ["--prompts", prompts, "--per-group", "1", "--no-peak-memory", "--method", "eagle", *FAST]
    result = run("bench", "--target", target_directory, *heads, *arguments)
    assert result.exit_code == 0, result.output
    assert list(results_file.load(Path("results.json")).methods) == ["plain", "eagle a/best", "eagle b/best"]
    twice = run("bench", "--target", target_directory, *heads[:2], *heads[:2], *arguments, "--output", "other.json")
    assert twice.exit_code == 2
    assert "a head is given twice" in twice.stderr
    assert "give each once" in twice.stderr


@pytest.mark.parametrize("tree", ["bush", ""])
def test_a_tree_that_is_no_tree_is_refused(run: Run, target_directory: str, tiny_heads: list[str], tree: str) -> None:
    result = run("bench", "--target", target_directory, "--head", tiny_heads[1], "--method", f"eagle:{tree}")
    assert result.exit_code == 2
    assert "'chain', 'static', 'dynamic'" in result.stderr


def test_the_demo_takes_the_clones_heads_and_says_so(
    tiny_heads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_heads_module, "REPOS", ("nobody/medusa-a", "nobody/missing", "nobody/eagle3-a"))
    said = Console(record=True, width=200)
    (tmp_path / "missing").mkdir()
    shutil.copy(Path(tiny_heads[0]) / "config.json", tmp_path / "missing")  # a clone without its large files
    assert demo_heads_module.demo_heads(said, tmp_path) == [tiny_heads[0], tiny_heads[1]]
    text = said.export_text()
    assert f"nobody/medusa-a: not to be had from the Hub, so from {tmp_path.name}/medusa-a" in text
    assert "nobody/missing: neither on the Hub nor" in text
    monkeypatch.setattr(demo_heads_module, "snapshot_download", lambda repo, **_: f"/hub/{repo}")
    assert demo_heads_module.demo_heads(said, tmp_path) == [f"/hub/{repo}" for repo in demo_heads_module.REPOS]
    assert "nobody/missing: from the Hub" in said.export_text()


def test_prompts_of_several_sources_are_one_run(run: Run, target_directory: str, prompts: str, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "z", "group": "more", "messages": [{"role": "user", "content": "w5"}]}\n')
    sources = ["--prompts", prompts, "--prompts", str(other), "--per-group", "1", "--no-peak-memory"]
    result = run("bench", "--target", target_directory, *sources, *FAST)
    assert result.exit_code == 0, result.output
    results = results_file.load(Path("results.json"))
    assert results.source == "log.jsonl, other.jsonl"
    assert results.prompts == {"count": ["a"], "long": ["c"], "more": ["z"]}
    assert sorted(results.digests) == ["a", "c", "z"]
    again = run("bench", "--target", target_directory, "--prompts", prompts, "--prompts", prompts)
    assert again.exit_code == 2
    assert "several rows have the id 'a'" in again.stderr


def test_batches_may_ask_more_prompts_than_single_runs(run: Run, target_directory: str, prompts: str) -> None:
    loads = ["--batch-size", "1", "--batch-size", "2", "--per-group", "1", "--batch-prompts", "2"]
    result = run("bench", "--target", target_directory, "--prompts", prompts, *loads, *FAST)
    assert result.exit_code == 0, result.output
    results = results_file.load(Path("results.json"))
    asked = [
        {name for record in results.records if record.load == load for name in record.prompts if name in ("a", "b")}
        for load in range(2)
    ]
    assert [len(names) for names in asked] == [1, 2]
