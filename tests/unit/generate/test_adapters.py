"""PEFT: a LoRA adapter on the target is part of the target; prompt learning is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

from spechead import SpeculativeGenerationMixin, disable_speculation, enable_speculation
from tests.unit.generate.harness import METHODS, assert_speculated, llama, padded, single, speculate

NEW = 16


def adapted(task: str | None = None) -> PeftModel:
    """Build a target with a LoRA adapter that changes its text."""
    torch.manual_seed(5)
    config = LoraConfig(task_type=task, r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(llama(), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def merged() -> Any:
    """Build the same target as one model, for a draft that agrees with it."""
    return adapted().merge_and_unload()


def same(model: PeftModel, method: str, inputs: dict[str, Any]) -> Any:
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    output = speculate(model, inputs, method, max_new_tokens=NEW, do_sample=False)
    assert output.sequences.tolist() == plain.tolist()
    return output


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_active_adapter_is_the_target(task: str | None, method: str) -> None:
    model = enable_speculation(adapted(task), draft_model=merged())
    assert isinstance(model, PeftModel)
    assert isinstance(model.get_base_model(), SpeculativeGenerationMixin)
    with_adapter = same(model, method, padded())
    assert_speculated(with_adapter.stats)
    with model.disable_adapter():
        without = same(model, method, padded())
    assert without.sequences.tolist() != with_adapter.sequences.tolist()
    assert without.sequences.tolist() == llama().generate(**padded(), max_new_tokens=NEW).tolist()
    if method == "draft_model":
        assert without.stats.acceptance_rate < with_adapter.stats.acceptance_rate


def test_enabled_before_the_adapter_came() -> None:
    target = enable_speculation(llama(), draft_model=merged())
    torch.manual_seed(5)
    model = get_peft_model(target, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    model.load_state_dict(adapted().state_dict())
    assert_speculated(same(model.eval(), "draft_model", single()).stats)


def test_merging_keeps_speculation() -> None:
    model = enable_speculation(adapted(), draft_model=merged()).merge_and_unload()
    plain = model.generate(**single(), max_new_tokens=NEW)
    output = speculate(model, single(), "draft_model", max_new_tokens=NEW)
    assert output.sequences.tolist() == plain.tolist()
    assert_speculated(output.stats)


def test_disable_reaches_the_model_inside() -> None:
    model = enable_speculation(adapted())
    disable_speculation(model)
    assert not isinstance(model.get_base_model(), SpeculativeGenerationMixin)


def test_adapter_is_saved_as_ever(tmp_path: Any) -> None:
    enable_speculation(adapted()).save_pretrained(tmp_path / "enabled")
    adapted().save_pretrained(tmp_path / "plain")
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("enabled", "plain")]
    assert names[0] == names[1]
    configs = [(tmp_path / name / "adapter_config.json").read_text() for name in ("enabled", "plain")]
    assert configs[0] == configs[1]


def prompt_tuned(target: Any) -> PeftModel:
    return get_peft_model(target, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()


def test_prompt_learning_is_refused_when_enabling() -> None:
    with pytest.raises(ValueError, match="prompt-learning adapters"):
        enable_speculation(prompt_tuned(llama()))


def test_prompt_learning_is_refused_when_generating() -> None:
    model = prompt_tuned(enable_speculation(llama()))
    with pytest.raises(ValueError, match="prompt-learning adapter cannot be honoured"):
        model.generate(**single(), speculative="prompt_lookup", max_new_tokens=4)
    # PEFT's own generate works on, and the model inside is still free of it.
    assert model.generate(**single(), max_new_tokens=4).shape[1] > 0
    inner = model.get_base_model()
    assert speculate(inner, single(), "prompt_lookup", max_new_tokens=NEW).stats.steps > 0
