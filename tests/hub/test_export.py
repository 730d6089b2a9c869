"""Every exporter: which files it writes, what it refuses and who can run it, and that nothing is written unproven.

Key lists and config fields are those that the engines' sources read (each exporter names file and commit).
"""

import pytest
import torch

from spechead.heads import load_head
from spechead.hub.export import export_head
from spechead.hub.exporters import FORMATS
from tests.hub.heads import read_export, saved_head
from tests.unit.heads.targets import DRAFT, HIDDEN, VOCAB

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EAGLE1 = {f"layers.0.{name}.weight" for name in (*PROJECTIONS, *MLP, "post_attention_layernorm")} | {"fc.weight"}
EAGLE3_LAYER = (*PROJECTIONS, *MLP, "post_attention_layernorm", "input_layernorm", "hidden_norm")
MAPS = {"d2t", "t2d"}
RUNS = {
    "medusa": {"vllm", "tgi", "medusa"},
    "eagle": {"vllm", "sglang", "eagle"},
    "eagle3": {"vllm", "sglang", "speculators", "llamacpp", "eagle"},
}


def eagle3_names(first: str) -> set[str]:
    return {f"{first}.{name}.weight" for name in EAGLE3_LAYER} | {"fc.weight", "norm.weight", "lm_head.weight"}


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("to", FORMATS)
def test_the_matrix_of_pairs(kind, to, target, tmp_path):
    saved_head(tmp_path / "head", target, kind)
    if to in RUNS[kind]:
        report = export_head(tmp_path / "head", to, tmp_path / "out")
        assert report.kind == kind
        assert set(report.files) == {file.name for file in (tmp_path / "out").iterdir()}
        assert report.commands
        assert report.origin.commit
        return
    with pytest.raises(ValueError, match="is refused") as refusal:
        export_head(tmp_path / "head", to, tmp_path / "out")
    named = set(str(refusal.value).rpartition("What can run it: ")[2].strip(".").split(", "))
    assert named == RUNS[kind]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "kind", "overrides", "names"),
    [
        ("vllm", "eagle", {}, EAGLE1),
        ("sglang", "eagle", {}, EAGLE1 | {"fc.bias"}),
        ("eagle", "eagle", {}, EAGLE1 | {"embed_tokens.weight"}),
        ("vllm", "eagle3", {"draft_vocab_size": DRAFT}, eagle3_names("layers.0") | MAPS),
        ("sglang", "eagle3", {"draft_vocab_size": DRAFT}, eagle3_names("midlayer") | MAPS),
        ("llamacpp", "eagle3", {"draft_vocab_size": DRAFT}, eagle3_names("midlayer") | MAPS),
        (
            "speculators",
            "eagle3",
            {"draft_vocab_size": DRAFT},
            eagle3_names("layers.0") | MAPS | {"embed_tokens.weight"},
        ),
        ("eagle", "eagle3", {"draft_vocab_size": DRAFT}, eagle3_names("midlayer") | MAPS | {"embed_tokens.weight"}),
        ("vllm", "eagle3", {}, eagle3_names("layers.0")),
        ("vllm", "eagle3", {"share_lm_head": True}, eagle3_names("layers.0") - {"lm_head.weight"}),
        ("vllm", "eagle3", {"fc_norm": True}, eagle3_names("layers.0") | {f"fc_norm.{i}.weight" for i in range(3)}),
        ("sglang", "eagle3", {"norm_before_fc": True}, eagle3_names("midlayer") | {"input_norm.weight"}),
        (
            "vllm",
            "medusa",
            {"num_heads": 2},
            {f"blocks.{i}.layers.0.{part}" for i in range(2) for part in ("weight", "bias")} | {"lm_heads.0.weight"},
        ),
        ("tgi", "medusa", {"num_heads": 2}, {f"{i}.0.linear.{part}" for i in range(2) for part in ("weight", "bias")}),
        (
            "tgi",
            "medusa",
            {"num_heads": 1, "num_hidden_layers": 2, "bias": False},
            {f"0.{j}.linear.{part}" for j in range(2) for part in ("weight", "bias")} | {"0.2.weight"},
        ),
        ("medusa", "medusa", {"num_heads": 1}, {"0.0.linear.weight", "0.0.linear.bias", "0.1.weight"}),
    ],
)
def test_tensors_have_the_names_that_the_engine_reads(to, kind, overrides, names, target, tmp_path):
    saved_head(tmp_path / "head", target, kind, **overrides)
    export_head(tmp_path / "head", to, tmp_path / "out")
    assert set(read_export(tmp_path / "out")[1]) == names


def test_shapes_are_those_of_the_published_format(target, tmp_path):
    saved_head(tmp_path / "head", target, "eagle3", draft_vocab_size=DRAFT)
    export_head(tmp_path / "head", "eagle", tmp_path / "out")
    shapes = {name: tuple(tensor.shape) for name, tensor in read_export(tmp_path / "out")[1].items()}
    assert shapes["fc.weight"] == (HIDDEN, 3 * HIDDEN)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (HIDDEN, 2 * HIDDEN)
    assert shapes["midlayer.self_attn.k_proj.weight"] == (HIDDEN // 2, 2 * HIDDEN)
    assert shapes["lm_head.weight"] == (DRAFT, HIDDEN)
    assert shapes["d2t"] == (DRAFT,)
    assert shapes["t2d"] == (VOCAB,)
    assert shapes["embed_tokens.weight"] == (VOCAB, HIDDEN)


@pytest.mark.parametrize(
    ("to", "kind", "fields"),
    [
        ("vllm", "eagle", {"architectures": ["EagleLlamaForCausalLM"], "bias": False, "model_type": "llama"}),
        ("vllm", "eagle3", {"architectures": ["Eagle3LlamaForCausalLM"], "norm_before_residual": False}),
        ("vllm", "medusa", {"architectures": ["MedusaModel"], "model_type": "medusa", "medusa_fc_bias": True}),
        ("sglang", "eagle", {"architectures": ["LlamaForCausalLMEagle"], "tie_word_embeddings": False}),
        ("sglang", "eagle3", {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB}),
        ("llamacpp", "eagle3", {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB}),
        ("eagle", "eagle", {"architectures": ["LlamaForCausalLM"], "bias": False, "rope_scaling": None}),
        ("eagle", "eagle3", {"architectures": ["LlamaForCausalLM"], "target_hidden_size": HIDDEN}),
        ("speculators", "eagle3", {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}),
    ],
)
def test_config_fields_are_those_that_the_engine_reads(to, kind, fields, target, tmp_path):
    saved_head(tmp_path / "head", target, kind)
    export_head(tmp_path / "head", to, tmp_path / "out")
    config = read_export(tmp_path / "out")[0]
    assert {name: config.get(name) for name in fields} == fields
    layer = config.get("transformer_layer_config", config)
    if kind != "medusa":
        assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 10000.0
        assert layer["num_hidden_layers"] == 1
        assert "eagle_aux_hidden_state_layer_ids" not in config  # the default of all engines
        assert config.get("target_hidden_size", HIDDEN) == HIDDEN  # a null breaks vLLM


def test_tgi_gets_no_architectures_and_the_target(target, tmp_path):
    saved_head(tmp_path / "head", target, "medusa")
    export_head(tmp_path / "head", "tgi", tmp_path / "out")
    config = read_export(tmp_path / "out")[0]
    assert "architectures" not in config  # else TGI drops the heads without a word
    assert config["base_model_name_or_path"] == target.directory
    assert (tmp_path / "out" / "medusa_lm_head.safetensors").is_file()


def test_speculators_config_is_what_vllm_asks_for(target, tmp_path):
    saved_head(tmp_path / "head", target, "eagle3", num_draft_tokens=4, layer_style="qwen3")
    export_head(tmp_path / "head", "speculators", tmp_path / "out", target=target.directory)
    config = read_export(tmp_path / "out")[0]
    settings = config["speculators_config"]
    assert settings["verifier"] == {"name_or_path": target.directory, "architectures": ["LlamaForCausalLM"]}
    assert settings["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert config["norm_before_residual"] is False


def test_other_taps_follow_each_engines_convention(target, tmp_path):
    saved_head(tmp_path / "head", target, "eagle3", taps=[1, 3, 6])
    for to in ("vllm", "speculators", "llamacpp", "sglang"):
        export_head(tmp_path / "head", to, tmp_path / to)
        config = read_export(tmp_path / to)[0]
        assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]  # the state entering layer k
        if to == "sglang":  # the output of layer k, and only here
            assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
    with pytest.raises(ValueError, match="taps=\\[1, 3, 6\\] instead of the default"):
        export_head(tmp_path / "head", "eagle", tmp_path / "eagle")


def test_an_exported_head_drafts_as_before(target, tmp_path):
    """The reader of published checkpoints gives the bound target the very head that was exported."""
    head = saved_head(tmp_path / "head", target, "eagle3", draft_vocab_size=DRAFT)
    export_head(tmp_path / "head", "sglang", tmp_path / "out")
    again = load_head(tmp_path / "out", target)
    assert again.taps == head.taps
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
