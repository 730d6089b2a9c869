"""Heads on targets of all kinds: few layers, soft caps, multipliers, chunked prefill, adapters, later casts."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from spechead import Eagle3Config, EagleProposer, SpeculativeConfig, enable_speculation
from tests import tiny
from tests.tiny_heads import KINDS, make_head, method_of, overfit, own_texts

SIZES = {
    "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
TARGETS = {
    "two layers": ("llama", {}),
    "three layers": ("llama", {"num_hidden_layers": 3}),
    "seven layers": ("llama", {"num_hidden_layers": 7}),
    "soft caps": (
        "gemma2",
        {"head_dim": 8, "final_logit_softcapping": 4.0, "attn_logit_softcapping": 3.0, "sliding_window": 8},
    ),
    "multipliers": (
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2},
    ),
    "logit scale": ("cohere", {"logit_scale": 0.25}),
}
NEW = 20


def build(name):
    kind, fields = TARGETS[name]
    return tiny.build(AutoConfig.for_model(kind, **{**SIZES, **fields}), "eager" if kind == "gemma2" else "sdpa")


def generate(model, **settings):
    ids, mask = tiny.left_padded(2)
    call = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(input_ids=ids, attention_mask=mask, **call, **settings)


def learnt(kind, target, **overrides):
    """A head that has learnt the target's own text."""
    head = make_head(kind, target, std=0.02, **overrides)
    return overfit(head, target, own_texts(target, 2, NEW))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_head_drafts_for_any_target_and_logits_stay_the_targets(name, kind):
    model = build(name)
    plain = generate(model, output_logits=True)
    enable_speculation(model, head=learnt(kind, model))
    output = generate(model, speculative=method_of(kind), output_logits=True)
    assert torch.equal(output.sequences, plain.sequences)
    assert output.stats.acceptance_length > 1.5
    assert output.stats.near_ties == 0
    assert len(output.logits) == NEW
    for ours, theirs in zip(output.logits, plain.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    if name == "soft caps":
        assert max(float(logits.abs().max()) for logits in output.logits) <= 4.0


def test_taps_of_small_targets_are_three_and_in_range():
    taps = {"two layers": [0, 1, 2], "three layers": [0, 1, 2], "seven layers": [2, 3, 4]}
    assert {name: Eagle3Config.for_target(build(name).config).taps for name in taps} == taps


class Opened(EagleProposer):
    """Keeps the features that the prompt left."""

    def start(self, context):
        super().start(context)
        states, length = context.fresh[id(self)]._whole()
        self.prompt_states = {tap: state.clone() for tap, state in states.items()}, length.clone()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("chunk", [1, 5, 11])
def test_chunked_prefill_gives_the_same_features_and_drafts(kind, chunk):
    model = tiny.fresh_model("llama")
    head = learnt(kind, model)
    enable_speculation(model, head=head)
    ids = tiny.prompt_ids(2, 12)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    runs = []
    for settings in ({}, {"prefill_chunk_size": chunk}):
        proposer = Opened(head)
        output = model.generate(ids, **call, **settings, speculative=proposer, return_dict_in_generate=True)
        runs.append((output, *proposer.prompt_states))
    (whole, states, length), (chunked, same_states, same_length) = runs
    assert chunked.stats.prefill_forwards == -(-12 // chunk) > whole.stats.prefill_forwards == 1
    assert length.tolist() == same_length.tolist() == [12, 12]
    for tap in head.taps:
        torch.testing.assert_close(same_states[tap], states[tap], atol=1e-4, rtol=1e-4)
    assert torch.equal(chunked.sequences, whole.sequences)
    assert chunked.stats.emitted_per_step == whole.stats.emitted_per_step
    assert chunked.stats.acceptance_length > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_lora_target_is_drafted_from_its_adapted_states(kind):
    base = tiny.fresh_model("llama")
    unadapted = generate(base).sequences
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.eval()
    plain = generate(model)
    assert not torch.equal(plain.sequences, unadapted)
    head = make_head(kind, base, std=0.02)
    overfit(head, base, plain.sequences[:1])  # the row without pads
    enable_speculation(model, head=head)
    output = generate(model, speculative=method_of(kind))
    assert torch.equal(output.sequences, plain.sequences)
    first = [emitted for emitted, _ in output.stats.emitted_per_step[0]]
    assert sum(first) / len(first) > 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_follows_a_target_that_is_cast_after_it_was_attached(kind):
    model = tiny.fresh_model("llama")
    head = make_head(kind, model)
    enable_speculation(model, head=head)
    generate(model, speculative=method_of(kind))
    model.to(torch.bfloat16)
    output = generate(model, speculative=method_of(kind))
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert output.stats.drafted_tokens > 0
    assert output.stats.emitted_tokens == 2 * (NEW - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_heads_best_settings_are_its_defaults_and_yield_to_the_callers(kind):
    model = tiny.fresh_model("llama")
    head = make_head(kind, model, tree=[[0], [1], [0, 0]], num_draft_tokens=2)
    enable_speculation(model, head=head)
    nodes = {}
    for name, settings in {"own": {}, "chain": {"tree": "chain"}, "given": {"tree": [[0], [0, 0], [0, 0, 0]]}}.items():
        stats = generate(model, speculative=SpeculativeConfig(method=method_of(kind), **settings)).stats
        nodes[name] = (len(stats.tried_by_depth), stats.nodes_fed)
    assert {name: depth for name, (depth, _) in nodes.items()} == {"own": 2, "chain": 2, "given": 3}
    assert nodes["own"][1] > nodes["chain"][1]
