"""The enabled model stays the model it was: saving, pipelines, subclassing, switching on and off, dtypes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, pipeline

from spechead import SpeculativeConfig, SpeculativeGenerationMixin, disable_speculation, enable_speculation
from tests.tiny import VOCAB, fresh_model, tiny_config
from tests.unit.generate.harness import (
    METHODS,
    assert_speculated,
    llama,
    padded,
    same_as_plain,
    single,
    speculate,
    speculating,
    tokenizer,
)

NEW = 16


def test_saving_keeps_the_architectures_name(tmp_path: Path) -> None:
    plain, enabled = llama(), speculating()
    plain.save_pretrained(tmp_path / "plain")
    enabled.save_pretrained(tmp_path / "enabled")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "enabled")]
    assert configs[0] == configs[1]
    assert configs[1]["architectures"] == ["LlamaForCausalLM"]
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("plain", "enabled")]
    assert files[0] == files[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "enabled")
    assert type(loaded) is LlamaForCausalLM
    assert loaded.generate(**single(), max_new_tokens=NEW).tolist() == (
        enabled.generate(**single(), max_new_tokens=NEW, speculative="draft_model").tolist()
    )


def test_state_dict_and_module_tree_are_the_targets_own() -> None:
    plain, enabled = llama(), speculating()
    assert list(enabled.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in enabled.named_modules()] == [name for name, _ in plain.named_modules()]
    assert enabled.num_parameters() == plain.num_parameters()
    assert isinstance(enabled, LlamaForCausalLM)
    assert type(enabled).__name__ == "LlamaForCausalLM"
    assert type(enabled).__module__ == LlamaForCausalLM.__module__


def test_enable_returns_the_same_object_and_disable_undoes_it() -> None:
    model = llama()
    before = sorted(model.__dict__)
    assert enable_speculation(model, draft_model=llama()) is model
    assert isinstance(model, SpeculativeGenerationMixin)
    assert disable_speculation(model) is model
    assert type(model) is LlamaForCausalLM
    assert sorted(model.__dict__) == before
    with pytest.raises(ValueError, match="speculative"):
        model.generate(**single(), speculative="prompt_lookup", max_new_tokens=2)
    enable_speculation(model)
    same_as_plain(model, single(), "prompt_lookup", max_new_tokens=NEW)
    assert disable_speculation(disable_speculation(model)) is model


def test_enabling_again_replaces_the_draft_and_keeps_what_is_not_given() -> None:
    model = enable_speculation(llama(), draft_model=llama())
    kind = type(model)
    full = speculate(model, single(), "draft_model", max_new_tokens=NEW).stats.acceptance_rate
    enable_speculation(model, draft_model=llama(seed=1))
    assert type(model) is kind
    assert speculate(model, single(), "draft_model", max_new_tokens=NEW).stats.acceptance_rate < full
    enable_speculation(model)
    assert speculate(model, single(), "draft_model", max_new_tokens=NEW).stats.drafted_tokens > 0


def test_a_refused_draft_leaves_the_model_as_it_was() -> None:
    model = enable_speculation(llama(), draft_model=llama())
    with pytest.raises(ValueError, match="draft_model is the target itself"):
        enable_speculation(model, draft_model=model)
    same_as_plain(model, single(), "draft_model", max_new_tokens=NEW)
    untouched = llama()
    with pytest.raises(ValueError, match="draft_model is the target itself"):
        enable_speculation(untouched, draft_model=untouched)
    assert type(untouched) is LlamaForCausalLM


def test_models_of_one_class_are_enabled_apart() -> None:
    first, second = enable_speculation(llama(), draft_model=llama()), enable_speculation(llama(seed=1))
    assert type(first) is type(second)
    disable_speculation(second)
    assert type(second) is LlamaForCausalLM
    same_as_plain(first, single(), "draft_model", max_new_tokens=NEW)


class MyLlama(SpeculativeGenerationMixin, LlamaForCausalLM):
    """A user's own class."""


def test_own_class_with_the_mixin_in_front() -> None:
    model = MyLlama(tiny_config("llama")).eval()
    model.load_state_dict(llama().state_dict())
    same_as_plain(model, single(), "prompt_lookup", max_new_tokens=NEW)
    with pytest.raises(ValueError, match=r"enable_speculation\(model, draft_model="):
        speculate(model, single(), "draft_model", max_new_tokens=NEW)
    enable_speculation(model, draft_model=llama())
    assert type(model) is MyLlama
    same_as_plain(model, single(), "draft_model", max_new_tokens=NEW)
    assert type(disable_speculation(model)) is MyLlama


@pytest.mark.parametrize("method", METHODS)
def test_text_generation_pipeline(model: Any, method: str) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer())
    for texts in ("abxfi", ["abxfi", "cfe"]):
        settings = {"max_new_tokens": NEW, "return_full_text": False, "do_sample": False}
        plain = generator(texts, **settings)
        assert generator(texts, speculative=method, **settings) == plain
    batched = generator(["abxfi", "cfe"], batch_size=2, speculative=method, **settings)
    assert batched == generator(["abxfi", "cfe"], batch_size=2, **settings)


def test_copies_of_an_enabled_model_work_alone() -> None:
    model = speculating()
    twin = copy.deepcopy(model)
    assert twin is not model
    same_as_plain(twin, single(), "draft_model", max_new_tokens=NEW)
    twin.model.layers[0].mlp.down_proj.weight.data.zero_()
    same_as_plain(model, single(), "draft_model", max_new_tokens=NEW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_low_precision_runs(family: str, method: str, dtype: torch.dtype) -> None:
    target = fresh_model(family).to(dtype)
    model = speculating(target)
    for sampled in (False, True):
        output = speculate(model, padded(), method, max_new_tokens=NEW, do_sample=sampled, output_logits=True)
        assert output.sequences.shape == (3, 11 + NEW)
        assert 0 <= int(output.sequences.min()) <= int(output.sequences.max()) < VOCAB
        assert output.logits[0].dtype == torch.float32
        assert bool(torch.isfinite(torch.stack(output.logits)).all())
        assert output.cache.layers[0].keys.dtype == dtype
        assert_speculated(output.stats, keeps=method == "draft_model")


def test_dtype_changed_after_enabling_is_probed_anew() -> None:
    model = speculating()
    speculate(model, single(), "draft_model", max_new_tokens=4)
    model.to(torch.float64)
    same_as_plain(model, single(), "prompt_lookup", max_new_tokens=NEW)


@pytest.mark.parametrize("method", METHODS)
def test_typical_acceptance_is_called_lossy_and_greedy_stays_exact(model: Any, method: str) -> None:
    config = SpeculativeConfig(method=method, acceptance="typical")
    plain = model.generate(**padded(), max_new_tokens=NEW)
    output = speculate(model, padded(), config, max_new_tokens=NEW)
    assert output.sequences.tolist() == plain.tolist()
    assert output.stats.lossy
    assert output.stats.to_dict()["lossy"] is True
    assert output.stats.kept_tokens > 0
    sampled = speculate(model, single(), config, max_new_tokens=NEW, do_sample=True, temperature=1.2, top_p=0.9)
    assert sampled.stats.lossy
    assert sampled.sequences.shape == (1, 11 + NEW)
    assert not speculate(model, single(), method, max_new_tokens=2).stats.lossy
