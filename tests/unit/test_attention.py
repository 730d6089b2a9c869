"""spechead.attention: the same attention as the library's, only where it pays, and nothing left behind."""

import threading

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from spechead import attention, enable_speculation
from spechead.target import Target
from tests import tiny
from tests.running import plain_greedy


def layer(shared):
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = shared, True
    return module


def states(batch, heads, groups, nodes, width, dim=8, value_dim=8):
    generator = torch.Generator().manual_seed(nodes)
    shapes = ((heads, nodes, dim), (groups, width, dim), (groups, width, value_dim))
    return [torch.randn(batch, *shape, generator=generator) for shape in shapes]


def mask_of(rows, nodes, width):
    allowed = torch.rand(rows, 1, nodes, width, generator=torch.Generator().manual_seed(width)) < 0.7
    allowed[..., 0] = True
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)


@pytest.fixture
def packed(monkeypatch):
    """Counts calls that were packed, by the number of queries that attention saw."""
    seen = []
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda query, *rest, **options: seen.append(tuple(query.shape[1:3])) or plain(query, *rest, **options),
    )
    return seen


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("heads", "groups"), [(9, 3), (4, 2), (6, 1), (4, 4)])
@pytest.mark.parametrize("nodes", [1, 2, 7])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_it_is_the_attention_of_the_library(rows, heads, groups, nodes, scaling):
    query, key, value = states(3, heads, groups, nodes, 19, value_dim=5)
    mask = mask_of(rows, nodes, 19)
    module = layer(heads // groups)
    got, weights = attention.grouped_attention(module, query, key, value, mask, scaling=scaling, dropout=0.0)
    wanted, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
    assert weights is None
    assert got.shape == (3, nodes, heads, 5)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (None, {}),
        (mask_of(1, 4, 9).expand(1, 6, 4, 9), {}),  # a mask of each head's own
        (mask_of(1, 4, 9), {"position_bias": torch.ones(1, 6, 4, 9)}),
        (mask_of(1, 4, 9), {"dropout": 1.0}),
    ],
)
def test_what_cannot_be_packed_goes_to_the_library(mask, options, packed):
    query, key, value = states(1, 6, 2, 4, 9)
    got, _ = attention.grouped_attention(layer(3), query, key, value, mask, **options)
    wanted, _ = sdpa_attention_forward(layer(3), query, key, value, mask, **options)
    torch.testing.assert_close(got, wanted)
    assert packed == [(6, 4), (6, 4)]


def run(model, **settings):
    prompt = tiny.prompt_ids(1, 9)
    call = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **call, **settings)


def test_steps_of_a_grouped_model_are_packed_and_its_prompts_and_plain_calls_are_not(packed):
    model = enable_speculation(tiny.fresh_model("llama"), draft_model=tiny.fresh_model("llama"))
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    assert groups < heads
    packed.clear()  # of the probe
    run(model)
    assert {shape[0] for shape in packed} == {heads}
    packed.clear()
    out = run(model, speculative="draft_model")
    assert out.stats.acceptance_length > 1.5
    assert {shape for shape in packed if shape[0] == groups}
    assert {shape for shape in packed if shape[0] == heads} == {(heads, 9)}, "prompts alone"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("change", ["eager", "no groups"])
def test_other_models_keep_the_librarys_attention(change):
    model = tiny.fresh_model("llama" if change == "eager" else "gpt2")
    if change == "eager":
        model.set_attn_implementation("eager")
    assert not attention.pays(model.config.get_text_config(decoder=True), torch.device("cpu"))
    assert attention.pays(tiny.fresh_model("llama").config, torch.device("cpu"))
    assert not attention.pays(tiny.fresh_model("llama").config, torch.device("cuda"))


def test_a_forward_that_fails_leaves_the_config_as_it_was(monkeypatch):
    model = enable_speculation(tiny.fresh_model("llama"), draft_model=tiny.fresh_model("llama"))
    run(model, speculative="draft_model")

    def broken(*_, **__):
        raise RuntimeError("broken layer")

    monkeypatch.setattr(model.model.layers[1], "forward", broken)
    with pytest.raises(RuntimeError, match="broken layer"):
        run(model, speculative="draft_model")
    assert model.config._attn_implementation == "sdpa"


def test_threads_that_share_a_model_do_not_disturb_each_other():
    """While one thread is inside a step, another asks what the model can do, and must hear the same."""
    model = enable_speculation(tiny.fresh_model("llama"), draft_model=tiny.fresh_model("llama"))
    prompt = tiny.prompt_ids(1, 9)
    wanted = plain_greedy(model, prompt[0].tolist(), 12)
    target = Target(model)
    verdict = target.verdict
    with attention.grouped(model.config):
        assert target.verdict is verdict
    got, errors = [], []

    def work():
        try:
            for _ in range(6):
                out = run(model, speculative="draft_model")
                got.append((out.sequences[0, 9:].tolist(), out.stats.acceptance_length))
        except Exception as error:  # a thread's own would be lost
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(got) == 18
    assert all(tokens == wanted and length > 1.5 for tokens, length in got)
