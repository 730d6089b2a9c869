"""What a value in a recipe's file may be: each type that a field can have, and what is refused before a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from spechead.training.arguments import HeadTrainingArguments
from spechead.training.checks import takes
from spechead.training.draft import DraftArguments, DraftTrainingArguments
from spechead.training.generate import BackendArguments, GenerateArguments
from spechead.training.recipe import DataArguments, EagleArguments, MedusaArguments, RunArguments, parse

EAGLE = (DataArguments, RunArguments, EagleArguments, HeadTrainingArguments)
MEDUSA = (DataArguments, RunArguments, MedusaArguments, HeadTrainingArguments)
GENERATE = (GenerateArguments, BackendArguments)
DRAFT = (DraftArguments, DraftTrainingArguments)


@dataclass
class Other:
    """A class that no annotation here can judge."""


@pytest.mark.parametrize(
    ("annotation", "taken", "refused"),
    [
        (int, [3, "3"], [2.5, True, None, "x", "1e3", [1]]),
        (float, [3, 0.5, "1e-3", "nan"], [True, None, "x", [0.5]]),
        (bool, [True, "yes", "False"], [1, 0.0, None, "maybe"]),
        (str, ["x", ""], [5, False, None, ["x"]]),
        (list[str], [["a"], [], "a"], [5, None, [5], ["a", None]]),
        (list[float], [[1, 0.5, "1e-3"]], [0.8, "0.8", [None], [True]]),
        (dict[str, Any], [{"a": 1}, {}], ["a", None, []]),
        (int | None, [3, None], [2.5]),
        (dict[str, Any] | str | None, [{"a": 1}, "{}", None], [5, True]),
        (Literal["a", "b"], ["a", 5], []),
        (Other | None, [5, "x", None], []),
        (Any, [5, None, []], []),
    ],
)
def test_an_annotation_takes_its_own_values(annotation, taken, refused):
    assert [value for value in taken if not takes(annotation, value)] == []
    assert [value for value in refused if takes(annotation, value)] == []


def recipe(tmp_path, *lines):
    """A file of these lines, which replace those of a recipe that is right."""
    right = {"target": "t", "data": "a.jsonl", "output_dir": "out"}
    names = {line.partition(":")[0] for line in lines}
    path = tmp_path / "recipe.yaml"
    path.write_text("\n".join([*(f"{name}: {value}" for name, value in right.items() if name not in names), *lines]))
    return ["--config", str(path)]


@pytest.mark.parametrize(
    ("classes", "line", "said"),
    [
        (EAGLE, "depths: 2.5", r"depths=2\.5, which must be a whole number"),
        (EAGLE, "depths: [1, 2]", r"depths=\[1, 2\], which must be a whole number"),
        (EAGLE, "depths: null", "depths=None, which must be a whole number"),
        (EAGLE, "draft_vocab_size: 100.5", r"draft_vocab_size=100\.5, which must be a whole number or null"),
        (MEDUSA, "num_heads: true", "num_heads=True, which must be a whole number"),
        (EAGLE, "max_length: null", "max_length=None"),
        (EAGLE, "dtype: null", "dtype=None, which must be text"),
        (EAGLE, "data: 5", "data=5, which must be a list, each of it text"),
        (EAGLE, "target: [a, b]", "target="),
        (EAGLE, "output_dir: 5", "output_dir=5, which must be text"),
        (EAGLE, "output_dir: null", "output_dir=None, which must be text"),
        (EAGLE, "eval_strategy: no", "eval_strategy=False, which must be text .in quotes"),
        (EAGLE, "learning_rate: fast", "learning_rate='fast', which must be a number"),
        (EAGLE, "resume: 1", "resume=1, which must be true or false"),
        (EAGLE, "template_kwargs: 5", "template_kwargs=5, which must be a mapping or text"),
        (GENERATE, "temperatures: 0.8", r"temperatures=0\.8, which must be a list, each of it a number"),
        (GENERATE, "output_dir: null", "output_dir=None"),
        (DRAFT, "answers: 5", "answers=5"),
        (DRAFT, "keep_every: 2.5", r"keep_every=2\.5"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_file(classes, line, said, tmp_path):
    with pytest.raises(ValueError, match=f"recipe.yaml sets {said}"):
        parse(classes, recipe(tmp_path, line))


def test_what_reads_as_a_fields_type_is_taken(tmp_path):
    lines = ["learning_rate: 1e-3", "depths: '3'", "softmax_rows: null", "use_cpu: 'true'", "bf16: null", "seed: '7'"]
    lines += ["lr_scheduler_kwargs: {num_cycles: 0.5}", "report_to: [none]", "optim: adamw_torch"]
    lines += ["warmup_steps: 0", "include_num_input_tokens_seen: true", "eval_steps: 5", "fsdp: ''"]
    data, _, eagle, training = parse(EAGLE, recipe(tmp_path, *lines))
    assert (data.data, eagle.depths, eagle.softmax_rows) == (["a.jsonl"], 3, None)
    assert (training.learning_rate, training.seed, training.use_cpu) == (1e-3, 7, True)
    asked, _ = parse(GENERATE, recipe(tmp_path, "temperatures: [0, 1e-1]"))
    assert (asked.temperatures, asked.data) == ([0.0, 0.1], ["a.jsonl"])


@pytest.mark.parametrize(
    ("classes", "line", "said"),
    [
        (EAGLE, "head: {hidden_size: x}", "head: hidden_size='x' cannot be: .* expected int"),
        (EAGLE, "head: {norm_output: 5}", "head: norm_output=5 cannot be"),
        (EAGLE, "head: {num_attention_heads: x}", "head: num_attention_heads='x' cannot be"),
        (EAGLE, "head: {num_attention_heads: 0}", "head: num_attention_heads=0 cannot be: .*zero"),
        (MEDUSA, "head: {num_heads: x}", "head: num_heads='x' cannot be"),
    ],
)
def test_a_heads_field_of_another_type_is_refused(classes, line, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        parse(classes, recipe(tmp_path, line))


def test_sizes_that_only_the_target_can_judge_are_left_to_it(tmp_path):
    line = "head: {num_attention_heads: 7, num_key_value_heads: 3, target_hidden_size: 5}"
    _, _, eagle, _ = parse(EAGLE, recipe(tmp_path, line, "use_cpu: true", "bf16: false"))
    assert eagle.head["num_key_value_heads"] == 3


@pytest.mark.parametrize("arguments", [["--config"], ["--config", "--depths", "3"], ["--config="]])
def test_config_without_a_file_is_refused(arguments):
    with pytest.raises(ValueError, match="--config names no file"):
        parse(EAGLE, arguments)


@pytest.mark.parametrize("line", ["config: other.yaml", "help: 5"])
def test_a_file_names_fields_alone(line, tmp_path):
    with pytest.raises(ValueError, match="which no argument is called"):
        parse(EAGLE, recipe(tmp_path, line))


@pytest.mark.parametrize(
    ("classes", "arguments", "said"),
    [
        (GENERATE, ["--dtype", "foo"], "dtype='foo' is none of torch's"),
        (GENERATE, ["--retries", "-1"], "retries=-1 must be at least 0"),
        (GENERATE, ["--concurrency", "0"], "concurrency=0"),
        (GENERATE, ["--temperatures", "nan"], r"temperatures=\[nan\]"),
        (GENERATE, ["--temperatures", "0", "inf"], r"temperatures=\[0\.0, inf\]"),
        (GENERATE, ["--temperatures", "-1"], r"temperatures=\[-1\.0\]"),
        (GENERATE, ["--limit", "-2"], "limit=-2"),
        (GENERATE, ["--rows_per_batch", "0"], "rows_per_batch=0"),
        (GENERATE, ["--tokens_per_batch", "0"], "tokens_per_batch=0"),
        (GENERATE, ["--max_new_tokens", "0"], "max_new_tokens=0"),
        (GENERATE, ["--max_prompt_tokens", "0"], "max_prompt_tokens=0"),
        (DRAFT, ["--draft", "d", "--dtype", "foo"], "dtype='foo' is none of torch's"),
        (DRAFT, ["--keep_every", "0"], "keep_every=0 drops no layer"),
        (DRAFT, ["--keep_every", "1"], "keep_every=1 drops no layer"),
        (DRAFT, ["--draft", "d", "--limit", "-2"], "limit=-2"),
        (DRAFT, ["--draft", "d", "--lora_rank", "-1"], "lora_rank=-1"),
    ],
)
def test_values_that_mean_nothing_to_data_and_drafts_are_refused(classes, arguments, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        parse(classes, [*recipe(tmp_path), *arguments])


@pytest.mark.parametrize("classes", [GENERATE, DRAFT])
def test_no_source_is_refused(classes, tmp_path):
    with pytest.raises(ValueError, match="data is empty"):
        parse(classes, recipe(tmp_path, "data: []"))
