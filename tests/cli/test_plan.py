"""`spechead plan` on tiny configs: memory, pairs, advice, expectations; exit code 1 for pairs that cannot work."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.tiny import tiny_config, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from tests.unit.heads.targets import make_head


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Configs and tokenizers without weights, and a head."""
    for name, seed in (("target", 0), ("draft", 1)):
        tiny_config("llama", num_hidden_layers=6 - 5 * seed).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    tiny_config("llama").save_pretrained(tmp_path / "pair")
    make_head("eagle3", tiny_model("llama")).save_pretrained(tmp_path / "head")
    assert not list((tmp_path / "target").glob("*.safetensors"))
    return tmp_path


def test_a_plan_without_weights(run: Run, models: Path) -> None:
    target, draft = str(models / "target"), str(models / "draft")
    result = run(
        "plan",
        "--target",
        target,
        "--draft-model",
        draft,
        "--memory",
        "1G",
        "--overlap",
        "0.5",
        "--acceptance",
        "0.75",
    )
    assert result.exit_code == 0, result.output
    for text in ("KV cache, 1 x 832 slots", "fits 1.0 GB", "the tokenizers agree on all 48", "prompt_lookup: try"):
        assert text in result.stdout
    assert "2.31" in result.stdout, "1 + 0.75 + 0.75^2"
    assert f"spechead bench --target {target} --draft-model {draft}" in result.stdout.replace("\n", "")


def test_too_little_memory_is_said(run: Run, models: Path) -> None:
    result = run("plan", "--target", str(models / "target"), "--memory", "10K")
    assert result.exit_code == 0
    assert "DOES NOT FIT" in result.stdout
    assert "prompt_lookup: leave" in result.stdout


def test_json_holds_what_is_shown(run: Run, models: Path) -> None:
    arguments = ["--head", str(models / "head"), "--acceptance", "0.75", "--draft-cost", "0.1", "--json"]
    result = run("plan", "--target", str(models / "pair"), *arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [plan["method"] for plan in found["plans"]] == ["plain", "prompt_lookup", "eagle"]
    eagle = found["plans"][2]
    assert eagle["peak"] > found["plans"][0]["peak"]
    assert found["expected"]["eagle"][3]["speed_up"] == pytest.approx(sum(0.75**n for n in range(5)) / 1.4)
    assert found["target"]["parameters"] > 20_000


def test_another_tokenizer_is_refused(run: Run, models: Path) -> None:
    other = models / "other"
    tiny_config("llama", num_hidden_layers=1).save_pretrained(other)
    tokenizer = tiny_tokenizer()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    words = content["model"]["vocab"]
    words["w10"], words["w11"] = words["w11"], words["w10"]
    tokenizer.save_pretrained(other)
    (other / "tokenizer.json").write_text(json.dumps(content))
    result = run("plan", "--target", str(models / "target"), "--draft-model", str(other))
    assert result.exit_code == 1
    assert "refused" in result.stdout
    assert "2 of 48 ids differ" in result.stdout


def test_a_head_of_another_target_is_refused(run: Run, models: Path) -> None:
    result = run("plan", "--target", str(models / "target"), "--head", str(models / "head"))
    assert result.exit_code == 1
    assert "refused" in result.stdout
    assert "6" in result.stdout


def test_a_mixture_of_experts_gets_its_warning(run: Run, models: Path) -> None:
    from transformers import MixtralConfig

    MixtralConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    ).save_pretrained(models / "moe")
    result = run("plan", "--target", str(models / "moe"), "--overlap", "0.9")
    assert result.exit_code == 0, result.output
    assert "warning: mixture of experts" in result.stdout
    assert "prompt_lookup: measure first" in result.stdout


def test_a_target_that_cannot_roll_back_is_refused(run: Run, models: Path) -> None:
    from transformers import MambaConfig

    MambaConfig(vocab_size=48, hidden_size=32, num_hidden_layers=2, state_size=4).save_pretrained(models / "mamba")
    result = run("plan", "--target", str(models / "mamba"))
    assert result.exit_code == 2
    assert "rolled back" in result.stderr
