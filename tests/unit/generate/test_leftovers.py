"""Nothing of a call stays on the target, the draft or anywhere else, also after an error."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from spechead import enable_speculation
from spechead.cache import RaggedCache
from tests.unit.generate.harness import METHODS, llama, padded, single, speculate

NEW = 12


def breaks(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that raises in the middle of an accepted run."""
    if input_ids.shape[1] == 15:
        raise RuntimeError("processor broke")
    return scores


def state_of(model: Any) -> dict[str, Any]:
    """Describe everything that a call could leave on a model's modules."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name}.keys"] = sorted(module.__dict__)
        found[f"{name}.class"] = type(module)
        found[f"{name}.training"] = module.training
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            found[f"{name}.{kind}"] = len(getattr(module, kind))
    found["parameters"] = {name: (value.data_ptr(), value.sum().item()) for name, value in model.named_parameters()}
    found["buffers"] = {name: value.data_ptr() for name, value in model.named_buffers()}
    found["config"] = model.config.to_dict()
    found["generation_config"] = model.generation_config.to_dict()
    return found


def call(model: Any, method: Any, **settings: Any) -> None:
    model.generate(**padded(), speculative=method, max_new_tokens=NEW, return_dict_in_generate=True, **settings)


def failing_call(model: Any, method: Any) -> None:
    with pytest.raises(RuntimeError, match="processor broke"):
        call(model, method, logits_processor=[breaks])


def refused_call(model: Any, method: Any) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        call(model, method, num_beams=2)


CALLS: dict[str, Callable[..., None]] = {"call": call, "failing": failing_call, "refused": refused_call}


@pytest.mark.parametrize(
    ("kind", "method"), [*product(CALLS, METHODS), ("call", None), ("failing", None)]
)  # plain generate refuses no beams
def test_target_and_draft_are_as_before(kind: str, method: str | None) -> None:
    draft = llama()
    model = enable_speculation(llama(), draft_model=draft)
    before = state_of(model), state_of(draft)
    CALLS[kind](model, method)
    assert (state_of(model), state_of(draft)) == before
    expected = copy.deepcopy(llama()).generate(**single(), max_new_tokens=NEW)
    assert model.generate(**single(), max_new_tokens=NEW).tolist() == expected.tolist()


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("method", [*METHODS, None])
@pytest.mark.parametrize("kind", ["call", "failing"])
def test_no_tensor_outlives_its_call(kind: str, method: str | None) -> None:
    model = enable_speculation(llama(), draft_model=llama())
    for _ in range(3):  # whatever is made once, and stays, is made here
        CALLS[kind](model, method)
    before = live_tensors()
    for _ in range(50):
        CALLS[kind](model, method)
    assert live_tensors() == before


def live_caches() -> int:
    return sum(type(thing) is RaggedCache for thing in gc.get_objects())


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_is_freed_with_its_call_and_not_when_cycles_are_next_collected(method: str) -> None:
    model = enable_speculation(llama(), draft_model=llama())
    gc.collect()
    before = live_caches()
    gc.disable()
    try:
        call(model, method)
        assert live_caches() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("method", METHODS)
def test_calls_do_not_influence_each_other(method: str) -> None:
    model = enable_speculation(llama(), draft_model=llama(seed=1))
    first = speculate(model, padded(), method, max_new_tokens=NEW)
    failing_call(model, method)
    speculate(model, single(), method, max_new_tokens=3, do_sample=True)
    again = speculate(model, padded(), method, max_new_tokens=NEW)
    assert again.sequences.tolist() == first.sequences.tolist()
    assert again.stats.emitted_per_step == first.stats.emitted_per_step


def test_a_proposer_object_serves_many_calls() -> None:
    from spechead import PromptLookupProposer

    model = enable_speculation(llama())
    proposer = PromptLookupProposer(num_draft_tokens=4)
    before = sorted(vars(proposer))
    results = [speculate(model, inputs(), proposer, max_new_tokens=NEW) for inputs in (single, padded, single)]
    assert results[0].sequences.tolist() == results[2].sequences.tolist()
    assert sorted(vars(proposer)) == before


def test_gradients_stay_off_and_the_mode_as_it_was() -> None:
    model = enable_speculation(llama(), draft_model=llama()).train()
    with torch.enable_grad():
        output = speculate(model, single(), "draft_model", max_new_tokens=NEW, output_logits=True)
        assert torch.is_grad_enabled()
    assert model.training
    assert all(not logits.requires_grad for logits in output.logits)
    assert all(parameter.grad is None for parameter in model.parameters())
