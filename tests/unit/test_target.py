"""spechead.target: the probe's verdicts, and forwards that are what plain forwards are."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BloomConfig,
    FalconConfig,
    GPTJConfig,
    LlamaForCausalLM,
    MambaConfig,
    MptConfig,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from spechead import Proposal, enable_speculation, hf
from spechead import target as target_module
from spechead.target import Target
from tests import tiny
from tests.running import ForwardCount

ALIBI = {
    "bloom": BloomConfig(vocab_size=tiny.VOCAB, hidden_size=32, n_layer=2, n_head=4, eos_token_id=None),
    "mpt": MptConfig(
        vocab_size=tiny.VOCAB, d_model=32, n_layers=2, n_heads=4, expansion_ratio=2, max_seq_len=64, use_cache=True
    ),
    "falcon": FalconConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
        eos_token_id=None,
    ),
}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", tiny.ATTENTION)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_takes_trees(family, attention, dtype):
    model = tiny.fresh_model(family, attention).to(dtype)
    verdict = Target(model).verdict
    assert verdict.tier == "tree"
    assert verdict.mask_form == ("tensor" if family not in ("qwen3", "gemma3") else "dict")
    assert "within" in verdict.reason


class IgnoresMasks(LlamaForCausalLM):
    def forward(self, attention_mask=None, cache=None, **kwargs):
        return super().forward(attention_mask=None, cache=cache, **kwargs)


class LeaksALittle(LlamaForCausalLM):
    """Lets every query see a trace of what its mask forbids."""

    def forward(self, attention_mask=None, cache=None, **kwargs):
        if torch.is_tensor(attention_mask) and attention_mask.ndim == 4:
            attention_mask = attention_mask.clamp(min=-4.0)
        return super().forward(attention_mask=attention_mask, cache=cache, **kwargs)


class RaisesOnMasks(LlamaForCausalLM):
    def forward(self, attention_mask=None, cache=None, **kwargs):
        if torch.is_tensor(attention_mask) and attention_mask.ndim == 4:
            raise RuntimeError("the size of tensor a must match the size of tensor b")
        return super().forward(attention_mask=attention_mask, cache=cache, **kwargs)


class SeesTheFuture(LlamaForCausalLM):
    def forward(self, cache=None, **kwargs):
        outputs = super().forward(cache=cache, **kwargs)
        outputs.logits = outputs.logits + outputs.logits.mean(dim=1, keepdim=True)
        return outputs


def planted(kind):
    model = tiny.fresh_model("llama")
    model.__class__ = kind
    return Target(model)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (IgnoresMasks, "moves logits by"),
        (LeaksALittle, "moves logits by"),
        (RaisesOnMasks, "raises RuntimeError: the size of tensor a"),
    ],
)
def test_a_model_that_does_not_heed_masks_is_a_chain_target(kind, reason):
    verdict = planted(kind).verdict
    assert (verdict.tier, verdict.mask_form) == ("chain", None)
    assert reason in verdict.reason


def test_a_model_whose_tokens_depend_on_later_ones_is_refused():
    with pytest.raises(
        ValueError, match=r"SeesTheFuture gives other logits for several tokens at once than one by one"
    ):
        _ = planted(SeesTheFuture).verdict


@pytest.mark.parametrize("kind", [IgnoresMasks, RaisesOnMasks])
def test_a_tree_or_a_batch_never_reaches_a_chain_target(kind):
    target = planted(kind)
    cache = target.new_cache(1, 32)
    target.prefill(tiny.prompt_ids(1, 5), None, cache)
    fork = Proposal(torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 0]]), torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=f"{kind.__name__} takes no tree mask .* attn_implementation='sdpa'"):
        target.forward(fork, cache)
    pair = target.new_cache(2, 32)
    target.prefill(tiny.prompt_ids(2, 5), None, pair)
    with pytest.raises(ValueError, match="one row's chain at a time; got 2 rows"):
        target.forward(Proposal.root_only(torch.tensor([1, 2])), pair)


@pytest.mark.parametrize("name", ALIBI)
def test_alibi_targets_verify_chains_of_one_row(name):
    """Their position bias counts slots, so trees are out; greedy output over chains is still plain's."""
    model = tiny.build(ALIBI[name], "eager")
    ids = tiny.prompt_ids(1, 9)
    plain = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    draft = tiny.build(ALIBI[name], "eager")
    enable_speculation(model, draft_model=draft)
    assert Target(model).verdict.tier == "chain"
    out = model.generate(
        ids,
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        speculative="draft_model",
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, plain)
    assert out.stats.acceptance_length > 3
    with pytest.raises(ValueError, match="takes no tree mask, so a batch of 2 rows cannot"):
        model.generate(
            ids.repeat(2, 1), max_new_tokens=4, eos_token_id=None, pad_token_id=0, speculative="draft_model"
        )


def test_other_attention_implementations_are_chains():
    """As flash attention is: only sdpa and eager take a mask of any shape."""
    AttentionInterface.register("spechead_test", sdpa_attention_forward)
    AttentionMaskInterface.register("spechead_test", sdpa_mask)
    model = tiny.fresh_model("llama")
    model.set_attn_implementation("spechead_test")
    verdict = Target(model).verdict
    assert verdict.tier == "chain"
    assert "attn_implementation='spechead_test' takes no tree mask" in verdict.reason


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (MambaConfig(vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4), "MambaForCausalLM"),
        (
            Qwen3NextConfig(
                vocab_size=tiny.VOCAB,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
                linear_num_key_heads=2,
                linear_num_value_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                layer_types=["linear_attention", "full_attention"],
            ),
            "Qwen3NextForCausalLM",
        ),
    ],
)
def test_recurrent_and_hybrid_models_are_refused_by_name(config, name):
    model = tiny.build(config, "eager")
    with pytest.raises(ValueError, match=f"{name} keeps recurrent or hybrid state"):
        Target(model)
    with pytest.raises(ValueError, match=name):
        enable_speculation(model)


def test_an_encoder_decoder_is_refused_by_name():
    config = T5Config(vocab_size=tiny.VOCAB, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        Target(T5ForConditionalGeneration(config))


def test_the_verdict_is_probed_again_only_after_its_key_changed(monkeypatch):
    probes = []
    real = target_module.probe
    monkeypatch.setattr(target_module, "probe", lambda target: probes.append(1) or real(target))
    model = tiny.fresh_model("mistral")
    target = Target(model)

    def probed():
        for _ in range(2):
            assert target.verdict.tier == "tree"
        return len(probes)

    assert probed() == 1
    model.set_attn_implementation("eager")
    assert probed() == 2
    model.to(torch.bfloat16)
    assert probed() == 3
    model.config.sliding_window = 4
    assert probed() == 4


def test_generate_does_not_probe_again():
    model = enable_speculation(tiny.fresh_model("llama"))
    with ForwardCount(model) as count:
        out = model.generate(
            tiny.prompt_ids(1, 6), max_new_tokens=6, speculative="prompt_lookup", return_dict_in_generate=True
        )
    assert count.forwards == out.stats.steps + out.stats.prefill_forwards


def test_position_tables_are_told_from_computed_positions():
    assert Target(tiny.build(tiny.tiny_config("gpt2", max_position_embeddings=40))).max_positions == 40
    assert all(Target(tiny.tiny_model(family)).max_positions is None for family in tiny.FAMILIES if family != "gpt2")
    gptj = GPTJConfig(vocab_size=tiny.VOCAB, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
    assert Target(tiny.build(gptj, "eager")).max_positions is None


def test_padding_nodes_do_not_reach_beyond_a_position_table():
    target = Target(tiny.build(tiny.tiny_config("gpt2", max_position_embeddings=12)))
    cache = target.new_cache(2, 32)
    mask = torch.tensor([[1] * 11, [0] * 6 + [1] * 5])
    target.prefill(tiny.prompt_ids(2, 11) * mask, mask, cache)
    cache.strip(torch.tensor([0, 6]))
    real = torch.tensor([[True, False, False], [True, True, True]])
    proposal = Proposal.chain(torch.tensor([1, 2]), torch.tensor([[3, 4], [5, 6]]), real[:, 1:])
    assert torch.isfinite(target.forward(proposal, cache).logits[real]).all()


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_prefill_is_the_librarys_own_also_in_chunks_and_left_padded(family, chunk):
    model = tiny.tiny_model(family)
    target = Target(model)
    ids, mask = tiny.left_padded(3, 20)
    cache = target.new_cache(3, 8)
    forward = target.prefill(ids, mask, cache, taps=(1,), chunk=chunk)
    for row in range(3):
        pads = int((1 - mask[row]).sum())
        plain = model(input_ids=ids[row : row + 1, pads:], output_hidden_states=True)
        torch.testing.assert_close(forward.logits[row, 0], plain.logits[0, -1])
        torch.testing.assert_close(forward.taps[1][row, pads:], plain.hidden_states[1][0])
    assert cache.lengths.tolist() == [20] * 3


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_taps_are_the_librarys_hidden_states(family):
    model = tiny.tiny_model(family)
    ids, layers = tiny.prompt_ids(1, 8), Target(model).num_layers
    plain = model(input_ids=ids, output_hidden_states=True)
    forward = Target(model).prefill(ids, None, Target(model).new_cache(1, 8), taps=range(layers + 1))
    assert sorted(forward.taps) == list(range(layers + 1))
    for tap, states in forward.taps.items():
        torch.testing.assert_close(states, plain.hidden_states[tap])
    whole = hf.hidden_states(model, ids, None, [0, layers])
    torch.testing.assert_close(whole[layers], plain.hidden_states[layers])
