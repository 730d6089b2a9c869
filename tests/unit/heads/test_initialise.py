"""Starting a head from its target: what is copied is exactly the target's, what does not fit is left and named."""

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from spechead.heads import Eagle3Config, Eagle3Head, EagleConfig, EagleHead, MedusaConfig, MedusaHeads
from tests.unit.heads.targets import DRAFT, HIDDEN, VOCAB, kept_ids, loud, make_target


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_last_layer_norm_and_kept_rows(family):
    target = make_target(family)
    style = "llama" if family == "llama" else "qwen3"
    config = Eagle3Config.for_target(target.config, draft_vocab_size=DRAFT, layer_style=style, num_hidden_layers=2)
    head = Eagle3Head(config)
    head.set_draft_vocab(kept_ids(VOCAB, DRAFT))
    head.bind(target)
    fresh = head.layers[0].self_attn.q_proj.weight[:, :HIDDEN].clone()
    copied = head.init_from_target(target)
    last = target.get_decoder().layers[-1]
    first = head.layers[0]
    assert torch.equal(first.self_attn.q_proj.weight[:, HIDDEN:], last.self_attn.q_proj.weight)
    assert torch.equal(first.self_attn.q_proj.weight[:, :HIDDEN], fresh)
    assert torch.equal(head.layers[1].self_attn.q_proj.weight, last.self_attn.q_proj.weight)
    assert torch.equal(first.mlp.down_proj.weight, last.mlp.down_proj.weight)
    rows = target.get_output_embeddings().weight[kept_ids(VOCAB, DRAFT)]
    assert torch.equal(head.lm_head.weight, rows)
    probe = torch.randn(3, HIDDEN)
    torch.testing.assert_close(head.norm(probe), target.get_decoder().norm(probe))
    before_mlp = last.pre_feedforward_layernorm if family == "gemma3" else last.post_attention_layernorm
    torch.testing.assert_close(first.post_attention_layernorm(probe), before_mlp(probe))
    assert {"norm.weight", "lm_head.weight", "layers.1.mlp.up_proj.weight"} <= set(copied)
    assert not any("fc" in name or "hidden_norm" in name for name in copied)
    if style == "qwen3":
        assert "layers.0.self_attn.q_norm.weight" in copied


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_other_families_keep_fresh_values_and_say_so(family, caplog):
    target = make_target(family)
    head = Eagle3Head(Eagle3Config.for_target(target.config)).bind(target)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    with loud(caplog):
        copied = head.init_from_target(target)
    assert copied == ["lm_head.weight"]
    assert "layers.0.mlp.up_proj.weight" in caplog.text
    assert "norm.weight" in caplog.text
    assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight)
    assert all(torch.equal(head.state_dict()[name], before[name]) for name in before if name not in copied)


def test_eagle1_takes_the_layer_whole():
    target = make_target()
    head = EagleHead(EagleConfig.for_target(target.config)).bind(target)
    copied = head.init_from_target(target)
    last = target.get_decoder().layers[-1]
    assert torch.equal(head.layers[0].self_attn.k_proj.weight, last.self_attn.k_proj.weight)
    assert len(copied) == 8


def test_shapes_that_differ_are_skipped(caplog):
    target = make_target()
    head = Eagle3Head(Eagle3Config.for_target(target.config, intermediate_size=24)).bind(target)
    with loud(caplog):
        copied = head.init_from_target(target)
    assert not any("mlp" in name for name in copied)
    assert "layers.0.mlp.gate_proj.weight" in caplog.text


def test_scaled_logits_are_the_targets_from_the_start():
    config = GraniteConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=8.0,
    )
    torch.manual_seed(0)
    target = GraniteForCausalLM(config).eval()
    head = Eagle3Head(Eagle3Config.for_target(config)).bind(target)
    head.init_from_target(target)
    assert head.config.logit_scale == 1.0
    state = torch.randn(2, HIDDEN)
    rows = target.get_output_embeddings()
    torch.testing.assert_close(head.logits(state), rows(target.get_decoder().norm(state)) / 8.0)
    medusa = MedusaHeads(MedusaConfig.for_target(config)).bind(target)
    torch.testing.assert_close(medusa(state), (rows(state) / 8.0).expand(4, 2, VOCAB))
