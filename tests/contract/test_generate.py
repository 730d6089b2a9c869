"""Facts about transformers' `generate` that mixin.py and support.py build on; each test names one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from spechead import hf, support
from tests.tiny import PAD, fresh_model, left_padded, prompt_ids, tiny_model


class Recorder(BaseStreamer):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.puts: list[Any] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


def hooked(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return everything that generate hands to a callable `custom_generate`."""
    got: dict[str, Any] = {}

    def loop(model: Any, input_ids: Tensor, **prepared: Any) -> Tensor:
        got.update(prepared, input_ids=input_ids)
        return input_ids

    model.generate(*args, custom_generate=loop, **({"max_new_tokens": 4} | kwargs))
    return got


def test_every_field_of_generation_config_is_in_the_table() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    assert fields - set(support.FIELDS) == set(), "new fields: decide in support.FIELDS how they are treated"
    assert set(support.FIELDS) - fields == set(), "fields that are gone: take them out of support.FIELDS"


def test_every_parameter_of_generate_is_in_the_table() -> None:
    parameters = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert parameters - set(support.ARGUMENTS) == set()
    assert set(support.ARGUMENTS) & set(support.FIELDS) == set()


def test_hook_gets_these_arguments_by_name() -> None:
    got = hooked(tiny_model("llama"), prompt_ids())
    assert {"logits_processor", "stopping_criteria", "generation_config"} <= set(got)
    assert {"attention_mask", "cache", "position_ids", "use_cache", "logits_to_keep"} <= set(got)
    assert type(got["cache"]) is DynamicCache
    assert got["generation_config"].max_length == 16


def test_hook_loses_the_streamer_and_the_tokenizer() -> None:
    streamer = Recorder()
    got = hooked(tiny_model("llama"), prompt_ids(), streamer=streamer, tokenizer="a tokenizer")
    assert "streamer" not in got
    assert "tokenizer" not in got
    assert streamer.ends == 0


def test_prompt_is_streamed_before_the_hook_runs() -> None:
    streamer = Recorder()
    ids = prompt_ids()

    def loop(model: Any, input_ids: Tensor, **prepared: Any) -> Tensor:
        assert streamer.puts == [ids.tolist()]
        return input_ids

    tiny_model("llama").generate(ids, streamer=streamer, custom_generate=loop, max_new_tokens=4)


def test_stop_strings_need_a_tokenizer_that_the_hook_has_lost() -> None:
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        hooked(tiny_model("llama"), prompt_ids(), stop_strings="a", tokenizer="a tokenizer")


def test_stop_strings_of_none_override_a_configs() -> None:
    config = GenerationConfig(stop_strings=["a"], max_new_tokens=4)
    got = hooked(tiny_model("llama"), prompt_ids(), generation_config=config, stop_strings=None)
    assert got["generation_config"].stop_strings is None


def test_mask_of_ones_becomes_none_and_one_with_pads_arrives() -> None:
    ids, mask = left_padded(3)
    assert hooked(tiny_model("llama"), ids, attention_mask=torch.ones_like(mask))["attention_mask"] is None
    assert hooked(tiny_model("llama"), ids, attention_mask=mask)["attention_mask"].tolist() == mask.tolist()


def test_mask_is_inferred_from_pad_tokens_where_none_is_given() -> None:
    ids = prompt_ids()
    ids[0, 3] = PAD
    got = hooked(tiny_model("llama"), ids)
    assert got["attention_mask"].tolist() == (ids != PAD).long().tolist()


def test_mask_wider_than_the_prompt_is_lost_when_it_is_ones() -> None:
    got = hooked(tiny_model("llama"), prompt_ids(width=5), attention_mask=torch.ones(1, 9, dtype=torch.long))
    assert got["attention_mask"] is None
    assert got["input_ids"].shape == (1, 5)


def test_rows_are_expanded_before_the_hook() -> None:
    ids, mask = left_padded(2)
    got = hooked(tiny_model("llama"), ids, attention_mask=mask, do_sample=True, num_return_sequences=3)
    assert got["input_ids"].tolist() == ids.repeat_interleave(3, 0).tolist()
    assert got["attention_mask"].shape == (6, 12)


def test_callers_cache_is_marked_and_handed_on() -> None:
    cache = DynamicCache(config=tiny_model("llama").config)
    assert hooked(tiny_model("llama"), prompt_ids(), cache=cache)["cache"] is cache
    assert cache._is_user_defined
    assert not getattr(hooked(tiny_model("llama"), prompt_ids())["cache"], "_is_user_defined", False)


@pytest.mark.parametrize(("end", "found"), [(3, [3]), ([3, 5], [3, 5]), (torch.tensor([7]), [7]), (None, None)])
def test_special_tokens_are_tensors_of_the_config(end: Any, found: list[int] | None) -> None:
    model = fresh_model("llama")
    model.generation_config.pad_token_id = None
    got = hooked(model, prompt_ids(), eos_token_id=end)
    config = got["generation_config"]
    if found is None:
        assert config._pad_token_tensor is None
        assert not any(type(criterion) is EosTokenCriteria for criterion in got["stopping_criteria"])
        return
    criterion = next(one for one in got["stopping_criteria"] if type(one) is EosTokenCriteria)
    assert criterion.eos_token_id.flatten().tolist() == found
    assert int(config._pad_token_tensor) == found[0]  # what fills ended rows where no pad token is known


def test_own_criterion_takes_the_place_of_generates_own() -> None:
    own = MaxLengthCriteria(30)
    got = hooked(tiny_model("llama"), prompt_ids(), stopping_criteria=StoppingCriteriaList([own]))
    assert [criterion for criterion in got["stopping_criteria"] if type(criterion) is MaxLengthCriteria] == [own]
    assert got["generation_config"].max_length == 16


def test_a_calls_argument_is_stronger_than_its_config_and_that_than_the_models() -> None:
    model = fresh_model("llama")
    model.generation_config.top_k, model.generation_config.top_p, model.generation_config.min_p = 7, 0.7, 0.2
    got = hooked(model, prompt_ids(), generation_config=GenerationConfig(top_k=8, top_p=0.8), top_k=9)
    config = got["generation_config"]
    assert (config.top_k, config.top_p, config.min_p) == (9, 0.8, 0.2)


def test_default_cache_implementations_of_old_checkpoints_are_unset() -> None:
    model = fresh_model("llama")
    model.generation_config.cache_implementation = "hybrid"
    assert hooked(model, prompt_ids())["generation_config"].cache_implementation is None


def test_signature_of_generate_can_be_bound() -> None:
    model = tiny_model("llama")
    config = GenerationConfig()
    named = hf.named_arguments(model.generate, (prompt_ids(), config), {"max_new_tokens": 3, "streamer": None})
    assert set(named) == {"inputs", "generation_config", "max_new_tokens", "streamer"}
    assert named["generation_config"] is config
    with pytest.raises(TypeError, match="inputs"):
        hf.named_arguments(model.generate, (prompt_ids(),), {"inputs": prompt_ids()})


def test_steps_run_in_the_librarys_decode_mode() -> None:
    assert callable(tiny_model("llama")._optimize_model_for_decode)
    with hf.decode_mode(tiny_model("llama")):
        pass


def test_stop_and_padding_of_plain_batches() -> None:
    """Rows that ended are filled with the pad token where an end token is known, and write on where none is."""

    def stops(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([True, False])[: len(input_ids)]

    settings = {"max_new_tokens": 6, "stopping_criteria": [stops]}
    written = tiny_model("llama").generate(prompt_ids(2), **settings)[0, 13:]
    filled = tiny_model("llama").generate(prompt_ids(2), eos_token_id=47, **settings)[0, 13:]
    assert filled.tolist() == [PAD] * 5
    assert written.tolist() != [PAD] * 5
