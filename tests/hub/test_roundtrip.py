"""export(import(x)) == x for every published layout, and a second, independent forward over every exported file.

The forward is plain torch on the tensors and fields of the exported files alone (tests/unit/heads/reference.py); the
expected logits are the head's own, driven as decoding drives it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache

from spechead.hub.export import export_head
from tests.unit.heads import reference
from tests.unit.heads.published_layouts import (
    LLAMA,
    Noise,
    eagle1_tensors,
    eagle3_config,
    eagle3_tensors,
    medusa_blocks,
    medusa_tensors,
    speculators_config,
    vllm_medusa_tensors,
)
from tests.unit.heads.targets import DRAFT, HIDDEN, VOCAB, make_head, make_target, some_ids, taps_of, write

EXTRA = torch.tensor([7, 11])
TABLE = Noise(8)(VOCAB, HIDDEN)
LM_HEADS = [Noise(9)(VOCAB, HIDDEN) for _ in range(3)]
LLAMA_SIZE = LLAMA | {"max_position_embeddings": 64, "head_dim": 8, "attention_bias": False, "mlp_bias": False}
TGI_CONFIG = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "org/target"}


def published(layout: str) -> tuple[dict[str, Any], dict[str, Tensor], str, str]:
    """A synthetic checkpoint of a layout: config, tensors, name of the weights, and the format to export to."""
    if layout == "medusa v1":
        return TGI_CONFIG, medusa_tensors(medusa_blocks(3, 1), LM_HEADS), "medusa_lm_head", "tgi"
    if layout == "medusa v2":
        return TGI_CONFIG | {"version": "2"}, medusa_tensors(medusa_blocks(3, 1), None), "medusa_lm_head", "tgi"
    if layout == "medusa v1 pickle":
        return TGI_CONFIG, medusa_tensors(medusa_blocks(3, 1), LM_HEADS), "medusa_lm_head.pt", "medusa"
    if layout == "vllm medusa":
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1}
        config |= {"hidden_size": HIDDEN, "vocab_size": VOCAB, "medusa_fc_bias": True, "original_lm_head": False}
        return config, vllm_medusa_tensors(medusa_blocks(3, 1), LM_HEADS), "model", "vllm"
    if layout == "eagle-1":
        return LLAMA_SIZE | {"bias": True}, eagle1_tensors() | {"embed_tokens.weight": TABLE}, "model", "eagle"
    if layout == "eagle-1 vllm":
        config = LLAMA_SIZE | {"bias": False, "architectures": ["EagleLlamaForCausalLM"]}
        return config, eagle1_tensors(bias=False), "model", "vllm"
    if layout == "eagle-1 sglang":
        return LLAMA_SIZE | {"architectures": ["LlamaForCausalLMEagle"]}, eagle1_tensors(), "model", "sglang"
    if layout == "eagle-3":
        return eagle3_config(**LLAMA_SIZE), eagle3_tensors() | {"embed_tokens.weight": TABLE}, "model", "eagle"
    if layout == "eagle-3 sglang":
        config = eagle3_config(**(LLAMA_SIZE | {"architectures": ["LlamaForCausalLMEagle3"]}), norm_before_fc=True)
        width = 3 * HIDDEN
        return config, eagle3_tensors() | {"input_norm.weight": Noise(5)(width)}, "model", "sglang"
    if layout == "eagle-3 vllm":
        config = eagle3_config(**LLAMA_SIZE) | {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
        config |= {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
        return config, eagle3_tensors("layers.0", normed=True, layers=2), "model", "vllm"
    if layout == "eagle-3 llama.cpp":
        config = eagle3_config(**(LLAMA_SIZE | {"architectures": ["LlamaForCausalLMEagle3"]}))
        return config, eagle3_tensors(), "model", "llamacpp"
    if layout == "speculators":
        tensors = eagle3_tensors("layers.0", normed=True) | {"embed_tokens.weight": TABLE}
        return speculators_config("qwen3", norm_output=True), tensors, "model", "speculators"
    raise AssertionError(layout)


LAYOUTS = (
    "medusa v1",
    "medusa v2",
    "medusa v1 pickle",
    "vllm medusa",
    "eagle-1",
    "eagle-1 vllm",
    "eagle-1 sglang",
    "eagle-3",
    "eagle-3 sglang",
    "eagle-3 vllm",
    "eagle-3 llama.cpp",
    "speculators",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_of_import_is_the_checkpoint(layout, tmp_path):
    config, tensors, name, to = published(layout)
    if layout == "eagle-3 vllm":
        config = config | {"num_hidden_layers": 2}
    before = tmp_path / "before"
    if name.endswith(".pt"):
        before.mkdir()
        (before / "config.json").write_text(json.dumps(config))
        torch.save(tensors, before / name)
    else:
        write(before, config, tensors, name)
    export_head(before, to, tmp_path / "after", allow_pickle=name.endswith(".pt"))
    after = tensors_in(tmp_path / "after")
    assert after.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert after[key].dtype == tensor.dtype, key
        assert torch.equal(after[key], tensor), key
    written = json.loads((tmp_path / "after" / "config.json").read_text())
    for key in config.keys() & written.keys() - {"torch_dtype", "speculators_version", "bias"}:
        assert meaning(key, written[key]) == meaning(key, config[key]), key


def meaning(key: str, value: Any) -> Any:
    """A field without what is not said, or only recorded."""
    if key == "speculators_config":
        return (
            value["algorithm"],
            value["verifier"]["name_or_path"],
            value["proposal_methods"][0]["speculative_tokens"],
        )
    if key == "transformer_layer_config":
        names = (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
            "model_type",
            "rope_parameters",
        )
        return {name: value[name] for name in names}
    return value


def tensors_in(directory: Path) -> dict[str, Tensor]:
    file = next(file for file in directory.iterdir() if file.suffix in (".safetensors", ".pt"))
    return torch.load(file, weights_only=True) if file.suffix == ".pt" else load_file(file)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    model = make_target(layers=8)
    model.directory = str(tmp_path_factory.mktemp("target"))
    model.save_pretrained(model.directory)
    return model


def drafted(head: Any, ids: Tensor, features: Tensor) -> Tensor:
    """The head's logits at the last entry, then at each depth of a chain that drafts EXTRA. [1 + D, D or V]."""
    cache = DynamicCache()
    with torch.no_grad():
        state = head(ids[None], head.fuse(features[None]), torch.arange(len(ids))[None], cache=cache)[:, -1:]
        rows = [head.logits(state)[0, 0]]
        for depth, token in enumerate(EXTRA):
            state = head(token[None, None], state, torch.tensor([[len(ids) + depth]]), cache=cache)
            rows.append(head.logits(state)[0, 0])
    return torch.stack(rows)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Logits agree to 1e-5 of their spread, which is what float32 leaves after a chain of un-normed layers."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.max() - expected.min())


def sizes_in(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes and flags as the reference takes them, from an exported config.json alone."""
    layer = config.get("transformer_layer_config", config)
    names = (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "num_hidden_layers",
    )
    flags = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
    return {name: layer[name] for name in names} | {name: config.get(name, False) for name in flags}


@pytest.mark.parametrize(
    ("to", "kind", "overrides"),
    [
        ("vllm", "eagle", {}),
        ("vllm", "eagle", {"num_hidden_layers": 2, "attention_bias": True}),
        ("sglang", "eagle", {}),
        ("eagle", "eagle", {"fc_bias": True}),
        ("vllm", "eagle3", {"draft_vocab_size": DRAFT}),
        ("vllm", "eagle3", {"draft_vocab_size": DRAFT, "layer_style": "qwen3", "fc_norm": True, "norm_output": True}),
        ("sglang", "eagle3", {"draft_vocab_size": DRAFT, "norm_before_fc": True}),
        ("llamacpp", "eagle3", {"draft_vocab_size": DRAFT, "norm_before_residual": True}),
        ("speculators", "eagle3", {"draft_vocab_size": DRAFT, "layer_style": "qwen3", "num_hidden_layers": 2}),
        ("eagle", "eagle3", {"draft_vocab_size": DRAFT}),
        ("eagle", "eagle3", {"share_lm_head": True}),
    ],
)
def test_an_independent_forward_over_the_exported_files_agrees(to, kind, overrides, target, tmp_path):
    head = make_head(kind, target, **overrides)
    head.config.target_name = target.directory
    head.save_pretrained(tmp_path / "head")
    export_head(tmp_path / "head", to, tmp_path / "out")
    tensors = tensors_in(tmp_path / "out")
    sizes = sizes_in(json.loads((tmp_path / "out" / "config.json").read_text()))
    ids = some_ids(rows=1)
    features = taps_of(target, ids, head.taps)[0, :-1]
    table = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
    if kind == "eagle":
        lm_head = target.get_output_embeddings().weight.detach()
        logits = reference.eagle1(tensors, sizes, table, lm_head, ids[0, 1:], features, EXTRA)
    else:
        logits = reference.eagle3(tensors, sizes, table, ids[0, 1:], features, EXTRA)
    assert_same(logits, drafted(head, ids[0, 1:], features))


@pytest.mark.parametrize(
    ("to", "overrides"),
    [
        ("vllm", {"num_hidden_layers": 2}),
        ("vllm", {"bias": False, "share_lm_head": False}),
        ("tgi", {"bias": False}),
        ("tgi", {"num_hidden_layers": 2}),
        ("medusa", {"num_heads": 5}),
    ],
)
def test_an_independent_forward_over_exported_medusa_heads_agrees(to, overrides, target, tmp_path):
    head = make_head("medusa", target, **overrides)
    head.config.target_name = target.directory
    head.save_pretrained(tmp_path / "head")
    export_head(tmp_path / "head", to, tmp_path / "out")
    tensors = tensors_in(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    heads = config.get("num_heads", config.get("medusa_num_heads"))
    layers = config.get("num_hidden_layers", config.get("medusa_num_layers"))
    name = "blocks.{}.layers.{}." if to == "vllm" else "{}.{}.linear."
    blocks = [
        [(tensors[name.format(i, j) + "weight"], tensors.get(name.format(i, j) + "bias")) for j in range(layers)]
        for i in range(heads)
    ]
    own = "lm_heads.{}.weight" if to == "vllm" else f"{{}}.{layers}.weight"
    shared = tensors.get("lm_heads.0.weight", target.get_output_embeddings().weight.detach())
    lm_heads = [tensors.get(own.format(i), shared) for i in range(heads)]
    hidden = taps_of(target, some_ids(rows=1), head.taps)[0]
    with torch.no_grad():
        expected = head(hidden)
    assert_same(reference.medusa(blocks, lm_heads, hidden), expected)
