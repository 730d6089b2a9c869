"""The card: every figure comes from results.json, losing groups are shown, and a card that differs is found."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from spechead import load_head
from spechead.bench import results as results_file
from spechead.bench.results import Model
from spechead.hub.card import check_card, render_card, repo_of
from spechead.hub.checks import check_results
from spechead.hub.provenance import trained_on
from spechead.hub.publish import write_folder
from spechead.hub.remote_state import files_of
from tests.hub.heads import TARGET, head_directory, results_for

REPO = "user/tiny-eagle3"
MODEL_CARDS = Path(__file__).resolve().parents[2] / "model_cards"
PUBLISHED = {"README.md", "config.json", "model.safetensors", "results.json", "recipe.yaml", "training_prompts.txt"}
RESULTS = sorted((Path(__file__).resolve().parents[2] / "docs" / "results").glob("*.json"))


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return head_directory(tmp_path / "head", draft_vocab_size=16)


def card(head: Path, **arguments) -> str:
    return render_card(head, REPO, **({"license": "apache-2.0"} | arguments))


def front_matter(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_metadata_is_what_the_hub_reads(head):
    data = front_matter(card(head))
    assert data["base_model"] == TARGET
    assert data["base_model_relation"] == "adapter"
    assert data["library_name"] == "spechead"
    assert data["license"] == "apache-2.0"
    assert data["datasets"] == ["org/answers"]
    assert {"speculative-decoding", "eagle"} <= set(data["tags"])
    scores = data["model-index"][0]
    assert scores["name"] == REPO
    figures = {
        (result["dataset"]["config"], metric["type"]): metric["value"]
        for result in scores["results"]
        for metric in result["metrics"]
    }
    assert figures["eagle: maths", "speed_against_plain"] == 0.84  # the group that lost is there too
    assert figures["eagle: mean", "acceptance_length"] == 1.9


def test_every_figure_of_the_card_follows_the_results(head):
    before = card(head)
    assert "| maths | 4 | 0.84x (0.73–0.96) | 16.8 | 1.90 | 31% | 75% (1 tie) |" in before
    assert "Slower than plain: maths (0.84x)." in before
    assert "| prompt_lookup | 1.10x | 0.97x | 1.04x |" in before
    assert "Some processor (x86_64, 2 threads or devices, 16 GiB)" in before
    results = results_file.load(head / "results.json")
    results.cells = [
        replace(cell, ratio=2.5, ratio_low=2.4, ratio_high=2.6) if cell.group == "maths" else cell
        for cell in results.cells
    ]
    results_file.save(results, head / "results.json")
    after = card(head)
    assert "2.50x (2.40–2.60)" in after
    assert "No group was slower than plain." in after
    assert "0.84" not in after


def test_no_figure_stands_in_the_template():
    text = (Path(results_file.__file__).parents[1] / "hub" / "card_template.md").read_text()
    prose = re.sub(r"{{.*?}}|{%.*?%}|```.*?```|max_new_tokens=64", "", text, flags=re.S)
    assert not re.search(r"\d", prose)


def test_use_lines_name_repo_target_and_method(head, tmp_path):
    text = card(head)
    assert f'enable_speculation(model, head="{REPO}")' in text
    assert f'custom_generate="{REPO}", trust_remote_code=True' in text
    assert 'speculative="eagle"' in text
    assert "one of vllm, sglang, speculators, llamacpp, eagle;" in text
    medusa = render_card(head_directory(tmp_path / "medusa", "medusa"), REPO, license="mit")
    assert 'speculative="medusa"' in medusa
    assert "one of vllm, tgi, medusa;" in medusa
    alone = head_directory(tmp_path / "alone", fc_bias=True)
    assert "No other server runs this head." in render_card(alone, REPO, license="mit")


def test_an_interrupted_measurement_and_a_missing_recipe_are_said(head):
    results = results_file.load(head / "results.json")
    results.complete = False
    results_file.save(results, head / "results.json")
    (head / "recipe.yaml").unlink()
    text = card(head)
    assert "The measurement was interrupted" in text
    assert "No recipe was recorded" in text
    assert "datasets" not in front_matter(text)


def test_a_sampled_load_without_an_interval_is_shown_as_it_is(head):
    results = results_file.load(head / "results.json")
    results.loads = [replace(results.loads[0], temperature=0.7, batch_size=8)]
    results.cells = [replace(cell, identical=None) for cell in results.cells]
    results_file.save(results, head / "results.json")
    text = card(head)
    assert "### Temperature 0.7, batch 8, up to 128 new tokens" in text
    assert "| 31% | – |" in text
    assert "Measured at batch size 8 only." in text


def test_a_card_that_differs_from_its_results_is_found(head):
    (head / "README.md").write_text(card(head), encoding="utf-8")
    assert repo_of(head) == REPO
    assert check_card(head) == []
    text = (head / "README.md").read_text(encoding="utf-8")
    (head / "README.md").write_text(text.replace("1.63x", "2.63x", 1), encoding="utf-8")
    found = check_card(head)
    assert any(line.startswith("-") and "2.63x" in line for line in found)
    (head / "README.md").write_text("# by hand\n", encoding="utf-8")
    with pytest.raises(ValueError, match="is no card rendered by spechead"):
        check_card(head)


def test_broken_neighbours_are_named(head):
    (head / "recipe.yaml").write_text("- a\n- list\n")
    with pytest.raises(ValueError, match=r"recipe.yaml holds a list"):
        card(head)
    (head / "recipe.yaml").write_text("{")
    with pytest.raises(ValueError, match=r"recipe.yaml is no YAML"):
        card(head)


def shipped() -> list[Path]:
    return sorted(path for path in MODEL_CARDS.glob("*") if path.is_dir()) if MODEL_CARDS.is_dir() else []


@pytest.mark.parametrize("directory", shipped(), ids=lambda path: path.name)
def test_a_shipped_directory_is_exactly_what_publish_sends(directory, tmp_path):
    repo = repo_of(directory)
    sent = write_folder(directory, render_card(directory, repo), repo, tmp_path / "folder")
    assert PUBLISHED <= set(files_of(sent)) == set(files_of(directory))
    assert [name for name in files_of(sent) if (sent / name).read_bytes() != (directory / name).read_bytes()] == []
    assert check_card(directory) == []
    assert json.loads((directory / "config.json").read_text())["target_name"]


def test_the_shipped_heads_are_small_enough_for_a_clone():
    assert sum((directory / "model.safetensors").stat().st_size for directory in shipped()) < 35e6


@pytest.mark.parametrize("directory", shipped(), ids=lambda path: path.name)
def test_no_shipped_head_was_trained_on_what_anything_was_measured_on(directory):
    assert len((directory / "training_prompts.txt").read_text().split()) > 1000
    measured = 0
    for file in [directory / "results.json", *RESULTS]:
        digests = json.loads(file.read_text()).get("digests")
        if digests:  # a results file; the others hold no prompts
            assert trained_on(directory, digests) == [], file.name
            measured += len(digests)
    assert measured > 0


@pytest.mark.parametrize("other_first", [True, False])
def test_beside_an_eagle_1_head_the_card_shows_its_own_figures(other_first: bool, head: Path) -> None:
    measured = results_for(load_head(head))
    target, mine = measured.models
    heads = [Model("old", "head", "spechead-eagle", 17, "float32"), mine]
    heads = heads if other_first else heads[::-1]
    names = {model.name: f"eagle {model.name}" for model in heads}
    methods = {name: {"speculative": {"method": "eagle", "head": head}} for head, name in names.items()}
    cells = [replace(cell, method=names["head"]) for cell in measured.cells if cell.method == "eagle"]
    cells += [replace(cell, method=names["old"], ratio=0.5, acceptance_length=1.1) for cell in cells]
    both = replace(measured, models=[target, *heads], methods={"plain": {}, **methods}, cells=cells)
    results_file.save(both, head / "results.json")
    text = card(head)
    scores = front_matter(text)["model-index"][0]["results"]
    assert {score["dataset"]["config"].split(":")[0] for score in scores} == {"eagle head"}
    assert "`eagle head`, with this head:" in text
    assert "`eagle old`, with this head:" not in text
    assert "| eagle old | 0.50x |" in text  # among all methods of the run
    check_results(both, load_head(head))
