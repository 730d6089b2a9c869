"""Head configs: strict, sized from any family, taps distinct and in range."""

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import DeepseekV3Config, Gemma3Config, LlamaConfig, Phi3Config

from spechead.heads import Eagle3Config, EagleConfig, MedusaConfig
from spechead.heads.sizes import default_taps
from tests.unit.heads.targets import FAMILIES, HIDDEN, VOCAB, target_config


@pytest.mark.parametrize("config_class", [MedusaConfig, EagleConfig, Eagle3Config])
def test_save_and_load_keep_every_field(config_class, tmp_path):
    config = config_class.for_target(
        target_config("llama"),
        num_draft_tokens=5,
        tree=[[0], [0, 0], [1]],
        tree_size=32,
        branching=8,
        trained_positions=2048,
        target_fingerprint={"config": "ab", "logits": [0.5]},
    )
    config.save_pretrained(tmp_path)
    loaded = config_class.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert loaded.taps == config.taps
    assert loaded.tree == [[0], [0, 0], [1]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("config_class", [MedusaConfig, EagleConfig, Eagle3Config])
def test_for_target_takes_the_sizes_of_every_family(family, config_class):
    config = config_class.for_target(target_config(family))
    assert (config.vocab_size, config.hidden_size, config.target_num_layers) == (VOCAB, HIDDEN, 3)
    if config_class is not MedusaConfig:
        assert config.num_attention_heads == 4
        assert config.head_dim == {"qwen3": 10}.get(family, 8)
        assert config.intermediate_size == (4 * HIDDEN if family == "gpt2" else 40)
        assert config.rope_parameters["rope_type"] == "default"
        assert config.hidden_act == "silu"


def test_composite_and_latent_attention_targets():
    gemma = Gemma3Config(text_config=target_config("gemma3").to_dict())
    config = Eagle3Config.for_target(gemma)
    assert (config.hidden_size, config.target_num_layers) == (HIDDEN, 3)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000.0}
    latent = Eagle3Config.for_target(DeepseekV3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=4))
    assert latent.head_dim == 16


def test_rope_kinds_that_a_llama_layer_has_are_kept_and_others_are_not():
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 32}
    assert Eagle3Config.for_target(LlamaConfig(rope_parameters=yarn)).rope_parameters["factor"] == 4.0
    partial = Phi3Config(rope_parameters={"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5})
    assert Eagle3Config.for_target(partial).rope_parameters == {"rope_type": "default", "rope_theta": 7.0}


@pytest.mark.parametrize("layers", range(2, 40))
def test_default_taps_are_distinct_and_in_range(layers):
    low, middle, high = default_taps(layers)
    assert 0 <= low < middle < high <= layers
    if layers >= 7:
        assert (low, middle, high) == (2, layers // 2, layers - 3)


def test_taps_of_small_targets():
    assert [default_taps(layers) for layers in (2, 3, 4, 6)] == [(0, 1, 2), (0, 1, 2), (1, 2, 3), (2, 3, 4)]
    with pytest.raises(ValueError, match="at least 2 layers"):
        default_taps(1)
    assert EagleConfig.for_target(target_config("llama", layers=2)).taps == [2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hiden_size": 8}, "Did you mean 'hidden_size'"),
        ({"temperature": 0.5}, "no field 'temperature'"),
        ({"tie_word_embeddings": True}, "heads never tie"),
        ({"taps": [3, 2, 1]}, "not strictly ascending"),
        ({"taps": [1, 1, 2]}, "not strictly ascending"),
        ({"taps": [1, 2]}, "fuses 3"),
        ({"taps": [1, 2, 9], "target_num_layers": 8}, "leaves the range 0..8"),
        ({"taps": [-1, 2, 3]}, "leaves the range"),
        ({"layer_style": "gpt2"}, "llama, qwen3"),
        ({"head_dim": 7}, "even"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "multiple"),
        ({"draft_vocab_size": 64, "vocab_size": 32}, "must lie in 1..vocab_size"),
        ({"share_lm_head": True, "draft_vocab_size": 16, "vocab_size": 32}, "share_lm_head=False"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"target_hidden_size": 64, "hidden_size": 32, "num_attention_heads": 4}, "share_embeddings"),
        ({"num_hidden_layers": 0}, "at least 1"),
        ({"tree": "bush"}, "chain, static, dynamic"),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(values, message):
    with pytest.raises(ValueError, match=message):
        Eagle3Config(**values)


def test_wrong_types_are_refused():
    with pytest.raises(StrictDataclassFieldValidationError, match="expected int, got str"):
        Eagle3Config(hidden_size="32")
    with pytest.raises(StrictDataclassFieldValidationError, match="num_heads"):
        MedusaConfig(num_heads=2.5)


def test_layer_wise_sizes_ask_for_an_override():
    config = target_config("llama")
    config.num_key_value_heads = None
    assert EagleConfig.for_target(config).num_key_value_heads == 4
    with pytest.raises(ValueError, match="give intermediate_size="):
        EagleConfig.for_target(target_config("llama"), intermediate_size=[1, 2])
