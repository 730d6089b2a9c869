"""What a recipe may say: YAML and overrides, mappings, unknown names, and that a saved recipe repeats the run."""

from __future__ import annotations

import json

import pytest

from spechead.training.arguments import HeadTrainingArguments
from spechead.training.recipe import (
    DataArguments,
    EagleArguments,
    MedusaArguments,
    RunArguments,
    parse,
    save_recipe,
)

CLASSES = (DataArguments, RunArguments, EagleArguments, HeadTrainingArguments)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "target: t\ndata: [a.jsonl, b.jsonl]\ndepths: 3\nlearning_rate: 5.0e-4\ntemplate_kwargs: "
        "{enable_thinking: false}\nhead: {norm_output: true}\nuse_cpu: true\nbf16: false\n"
    )
    return path


def test_yaml_fills_and_the_command_line_overrides(config, tmp_path):
    arguments = ["--config", str(config), "--depths", "4", "--data", "c.jsonl", "--output_dir", str(tmp_path)]
    data, run, eagle, training = parse(CLASSES, arguments)
    assert (data.target, data.data, data.template_kwargs) == ("t", ["c.jsonl"], {"enable_thinking": False})
    assert (eagle.depths, eagle.decay, eagle.head) == (4, 0.8, {"norm_output": True})
    assert (training.learning_rate, training.adam_beta2, training.warmup_steps) == (5e-4, 0.95, 0.02)
    assert run.tokens_per_batch == 4096


def test_mappings_may_be_json_on_the_command_line(config):
    data, *_ = parse(CLASSES, ["--config", str(config), "--template_kwargs", json.dumps({"a": 1})])
    assert data.template_kwargs == {"a": 1}
    with pytest.raises(ValueError, match="not a JSON object"):
        parse(CLASSES, ["--config", str(config), "--head", "{oops"])


@pytest.mark.parametrize(("line", "near"), [("depth: 3", "depths"), ("learning_rat: 1", "learning_rate")])
def test_an_unknown_key_is_an_error_with_the_nearest_name(config, line, near):
    config.write_text(config.read_text() + line + "\n")
    with pytest.raises(ValueError, match=f"recipe.yaml sets .*Did you mean '{near}'"):
        parse(CLASSES, ["--config", str(config)])


def test_an_unknown_flag_is_an_error_with_the_nearest_name(config):
    with pytest.raises(ValueError, match=r"command line sets 'draft_vocab'.*draft_vocab_size"):
        parse(CLASSES, ["--config", str(config), "--draft_vocab", "8"])
    with pytest.raises(ValueError, match="does not exist"):
        parse(CLASSES, ["--config", str(config) + ".missing"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--features", "disk"], "features='disk'"),
        (["--method", "eagle4"], "method='eagle4'"),
        (["--depths", "0"], "depths=0"),
        (["--held_out", "0"], "held_out=0"),
        (["--max_length", "0"], "max_length=0"),
        (["--dtype", "float99"], "dtype='float99'"),
        (["--tokens_per_batch", "0"], "tokens_per_batch=0"),
        (["--rows_per_batch", "0"], "rows_per_batch=0"),
        (["--decay", "0"], r"decay=0\.0"),
        (["--softmax_rows", "-1"], "softmax_rows=-1"),
        (["--draft_vocab_size", "0"], "draft_vocab_size=0"),
        (["--init_head", "h", "--draft_vocab_size", "8"], "draft_vocab_size=8, head=.*: init_head keeps its own"),
        (["--draft_vocab_size", "8", "--head", '{"draft_vocab_size": 9}'], "both say draft_vocab_size"),
        (["--noise", "0.3"], r"noise=0\.3 mean nothing to method='eagle3'"),
        (["--store", "here"], "store=here is neither read nor written with features: online"),
        (["--acceptance_new_tokens", "1"], "acceptance_new_tokens=1 leaves nothing to draft"),
        (["--acceptance_prompts", "-1"], "acceptance_prompts=-1"),
        (["--per_device_train_batch_size", "4"], "per_device_train_batch_size=4 .* rows_per_batch"),
    ],
)
def test_values_that_mean_nothing_are_refused(config, arguments, said):
    with pytest.raises(ValueError, match=said):
        parse(CLASSES, ["--config", str(config), *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num_heads", "0"], "num_heads=0"),
        (["--decay", "1.5"], r"decay=1\.5"),
        (["--softmax_rows", "0"], "softmax_rows=0"),
        (["--init_head", "h", "--head", '{"num_heads": 3}'], "init_head keeps its own"),
        (["--init_head", "h", "--num_heads", "5"], "num_heads=5: init_head keeps its own"),
        (["--num_heads", "5", "--head", '{"num_heads": 3}'], "both say num_heads"),
    ],
)
def test_values_that_mean_nothing_to_medusa_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        parse((DataArguments, MedusaArguments), ["--target", "t", "--data", "a", *arguments])


def test_one_source_may_stand_alone_and_none_is_refused(config):
    config.write_text("target: t\ndata: a.jsonl\nuse_cpu: true\nbf16: false\n")
    data, *_ = parse(CLASSES, [f"--config={config}"])
    assert data.data == ["a.jsonl"]
    config.write_text("target: t\ndata: []\n")
    with pytest.raises(ValueError, match="data is empty"):
        parse(CLASSES, ["--config", str(config)])


@pytest.mark.parametrize(
    ("text", "said"), [("target: [", "is no YAML"), ("- target", "must map names"), ("5: x", "must map names")]
)
def test_a_config_that_is_none_is_named(config, text, said):
    config.write_text(text)
    with pytest.raises(ValueError, match=f"recipe.yaml {said}"):
        parse(CLASSES, ["--config", str(config)])


def test_a_saved_recipe_repeats_the_arguments(config, tmp_path):
    first = parse(
        CLASSES, ["--config", str(config), "--seed", "7", "--eval_strategy", "no", "--load_best_model_at_end", "false"]
    )
    save_recipe(tmp_path / "saved.yaml", *first)
    second = parse(CLASSES, ["--config", str(tmp_path / "saved.yaml")])
    assert first[:3] == second[:3]
    for name in ("seed", "eval_strategy", "learning_rate", "load_best_model_at_end", "bf16", "use_cpu"):
        assert getattr(first[3], name) == getattr(second[3], name)


def test_no_class_has_more_than_a_dozen_fields_of_its_own():
    for cls in (DataArguments, RunArguments, EagleArguments, MedusaArguments):
        assert len(cls.__dataclass_fields__) <= 12


@pytest.mark.parametrize(
    "given",
    ["first_depth_share: 0.5", "depths: 3", "decay: 0.5", "draft_vocab_size: 64", "softmax_rows: 64"],
)
def test_what_is_eagle3s_is_refused_for_eagle(config, given):
    config.write_text(config.read_text() + f"method: eagle\n{given}\n")
    with pytest.raises(ValueError, match=f"{given.replace(': ', '=')}.* mean nothing to method='eagle'"):
        parse(CLASSES, ["--config", str(config)])
