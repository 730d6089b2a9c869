"""One broken checkpoint per known trap: each has its own clear error, and `inspect` names it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from spechead.heads import load_head
from spechead.hub.inspect import inspect_head
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
    vocabulary_map,
)
from tests.unit.heads.targets import DRAFT, HIDDEN, VOCAB, loud, make_head, make_target, write

IDS = vocabulary_map()["d2t"] + torch.arange(DRAFT)


@pytest.fixture
def target():
    return make_target(layers=8)


def changed(**changes):
    tensors = eagle3_tensors("midlayer") | changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def renamed(old, new):
    tensors = eagle3_tensors("midlayer")
    tensors[new] = tensors.pop(old)
    return tensors


BROKEN = {
    "renamed key": (
        eagle3_config(),
        renamed("midlayer.hidden_norm.weight", "midlayer.hidden_normm.weight"),
        r"missing: layers\.0\.hidden_norm\.weight; unexpected: layers\.0\.hidden_normm\.weight",
        "tensors",
    ),
    "absolute d2t": (eagle3_config(), changed(d2t=IDS), "d2t holds absolute target ids", "d2t-absolute"),
    "absolute d2t without t2d": (
        eagle3_config(),
        changed(d2t=torch.arange(VOCAB - DRAFT, VOCAB), t2d=None),
        "d2t holds absolute target ids",
        "d2t-absolute",
    ),
    "identity written as ids": (
        eagle3_config(),
        changed(d2t=torch.arange(DRAFT), t2d=None),
        "d2t holds absolute target ids",
        "d2t-absolute",
    ),
    "d2t out of range": (eagle3_config(), changed(d2t=IDS + VOCAB), "leaves the range", "d2t-broken"),
    "d2t not ascending": (
        eagle3_config(),
        changed(d2t=vocabulary_map()["d2t"].flip(0), t2d=None),
        "not strictly ascending",
        "d2t-broken",
    ),
    "d2t missing": (eagle3_config(), changed(d2t=None), "has no d2t", "d2t-missing"),
    "d2t too short": (eagle3_config(), changed(d2t=IDS[:-1]), "15 entries", "d2t-length"),
    "t2d as a table": (eagle3_config(), changed(t2d=torch.arange(VOCAB)), "bool mask", "d2t-broken"),
    "t2d of other ids": (
        eagle3_config(),
        changed(t2d=~vocabulary_map()["t2d"]),
        "t2d and d2t disagree",
        "d2t-broken",
    ),
    "taps as outputs of layers": (
        eagle3_config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]),
        changed(),
        r"either convention.*taps=\[1, 3, 4\]\) or load_head\(\.\.\., taps=\[2, 4, 5\]\)",
        "tap-convention",
    ),
    "nested taps that begin with 1": (
        eagle3_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}),
        changed(),
        "either convention",
        "tap-convention",
    ),
    "taps out of range": (
        eagle3_config(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        changed(),
        r"leaves the range 0\.\.8",
        "config",
    ),
    "tied pruned head": (eagle3_config(tie_word_embeddings=True), changed(), "tie_word_embeddings=true", "tied-head"),
    "missing lm_head": (eagle3_config(), changed(**{"lm_head.weight": None}), "no lm_head", "lm-head-missing"),
    "missing lm_head, D == V": (
        eagle3_config(draft_vocab_size=VOCAB),
        {name: t for name, t in eagle3_tensors(size=VOCAB).items() if name != "lm_head.weight"},
        "no lm_head",
        "lm-head-missing",
    ),
    "lm_head of other rows": (
        eagle3_config(),
        changed(**{"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}),
        r"lm_head\.weight is \(48, 32\), by the config \(16, 32\)",
        "tensors",
    ),
    "layers not in the file": (eagle3_config(num_hidden_layers=2), changed(), "num_hidden_layers=2", "config"),
    "fc.bias promised": (
        LLAMA | {"bias": True},
        eagle1_tensors(bias=False),
        r"has no fc\.bias",
        "fc-bias-missing",
    ),
    "fc.bias denied": (LLAMA | {"bias": False}, eagle1_tensors(bias=True), r"has fc\.bias", "fc-bias-present"),
    "HASS norms": (LLAMA | {"add_para_norm": True}, eagle1_tensors(), "add_para_norm=True", "config"),
    "no aux states": (
        eagle3_config(eagle_config={"use_aux_hidden_state": False}),
        changed(),
        "use_aux_hidden_state=False",
        "config",
    ),
    "sliding draft layer": (
        speculators_config(transformer_layer_config=LLAMA | {"layer_types": ["sliding_attention"]}),
        eagle3_tensors("layers.0"),
        "sliding attention",
        "config",
    ),
    "dflash": ({"speculators_model_type": "dflash"}, {"fc.weight": torch.zeros(2, 2)}, "dflash", "unreadable"),
    "no head at all": ({"model_type": "llama"}, {"model.norm.weight": torch.zeros(2)}, "no layout", "unreadable"),
    "Medusa head count": (
        {"model_type": "medusa", "num_heads": 5, "hidden_size": HIDDEN, "vocab_size": VOCAB, "medusa_fc_bias": True},
        vllm_medusa_tensors(medusa_blocks(3, 1), [torch.zeros(VOCAB, HIDDEN)] * 3),
        "says 5 Medusa heads, the file holds 3",
        "head-count",
    ),
    "Medusa head missing": (
        {"medusa_num_heads": 3},
        {n: t for n, t in medusa_tensors(medusa_blocks(3, 1), None).items() if not n.startswith("1.")},
        "not complete",
        "config",
    ),
    "Medusa LM head missing": (
        {"medusa_num_heads": 3},
        {
            name: tensor
            for name, tensor in medusa_tensors(medusa_blocks(3, 1), [torch.zeros(VOCAB, HIDDEN)] * 3).items()
            if name != "2.1.weight"
        },
        r"missing: lm_heads\.2\.weight",
        "tensors",
    ),
    "Medusa token map": (
        {"model_type": "medusa", "num_heads": 1, "truncated_vocab_size": 8, "vocab_size": VOCAB},
        vllm_medusa_tensors(medusa_blocks(1, 1), [torch.zeros(8, HIDDEN)]) | {"token_map": torch.arange(8)},
        "vocabulary of 8 ids|token_map",
        "tensors",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_trap_has_its_own_error(target, tmp_path, name):
    config, tensors, message, trap = BROKEN[name]
    write(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, target)
    report = inspect_head(tmp_path, target.config)
    assert report.broken
    assert trap in {found.name for found in report.traps if found.level == "error"}


WARNED = {
    "architectures in a TGI Medusa": (
        {"medusa_num_heads": 2, "architectures": ["LlamaForCausalLM"]},
        medusa_tensors(medusa_blocks(2, 1), None),
        "tgi-architectures",
    ),
    "architectures in a vLLM Medusa": (
        {"num_heads": 1, "vocab_size": VOCAB, "architectures": ["Qwen2ForCausalLM"], "medusa_fc_bias": True},
        vllm_medusa_tensors(medusa_blocks(1, 1), [Noise()(VOCAB, HIDDEN)]),
        "vllm-architectures",
    ),
    "biases that vLLM drops": (
        {"num_heads": 1, "vocab_size": VOCAB},
        vllm_medusa_tensors(medusa_blocks(1, 1), [Noise()(VOCAB, HIDDEN)]),
        "medusa-bias-dropped",
    ),
    "published head count": (
        {"medusa_num_heads": 2},
        medusa_tensors(medusa_blocks(5, 1), None),
        "head-count",
    ),
    "fc.bias not said": (LLAMA, eagle1_tensors(bias=False), "fc-bias-unstated"),
    "map never set": (
        eagle3_config(),
        changed(d2t=torch.zeros(DRAFT, dtype=torch.int64), t2d=torch.arange(VOCAB) < DRAFT),
        "d2t-unset",
    ),
    "norm_before_residual not said": (
        {key: value for key, value in speculators_config().items() if key != "norm_before_residual"},
        eagle3_tensors("layers.0"),
        "norm-before-residual-unstated",
    ),
    "norm_output of SpecForge": (eagle3_config(norm_output=True), changed(), "norm-output-meaning"),
}


@pytest.mark.parametrize("name", WARNED)
def test_traps_that_only_warn_load_and_are_named(target, tmp_path, name, caplog):
    config, tensors, trap = WARNED[name]
    write(tmp_path, config, tensors)
    with loud(caplog):
        load_head(tmp_path, target)
    assert f"[{trap}]" in caplog.text
    report = inspect_head(tmp_path, target.config)
    assert not report.broken
    assert trap in {found.name for found in report.traps if found.level == "warning"}


@pytest.mark.parametrize(("taps", "expected"), [([1, 3, 4], (1, 3, 4)), ([2, 4, 5], (2, 4, 5))])
def test_stated_taps_settle_the_convention(target, tmp_path, taps, expected):
    write(tmp_path, eagle3_config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), changed())
    assert load_head(tmp_path, target, taps=taps).taps == expected


def test_default_ids_of_a_small_target_are_not_suspect(tmp_path):
    write(tmp_path, eagle3_config(eagle_aux_hidden_state_layer_ids=[1, 2, 3]), changed())
    assert load_head(tmp_path, make_target(layers=4)).taps == (1, 2, 3)


OWN_BROKEN = {
    "renamed key": ("eagle3", lambda c, t: t.update(x=t.pop("norm.weight")), "missing: norm.weight; unexpected: x"),
    "absolute d2t": ("eagle3", lambda c, t: t.update(d2t=t["d2t"] + torch.arange(DRAFT)), "absolute target ids"),
    "tied": ("eagle3", lambda c, t: c.update(tie_word_embeddings=True), "heads never tie"),
    "missing lm_head": ("eagle3", lambda c, t: t.pop("lm_head.weight"), "no lm_head"),
    "taps of other order": ("eagle3", lambda c, t: c.update(taps=[5, 4, 2]), "not strictly ascending"),
    "taps out of range": ("eagle3", lambda c, t: c.update(taps=[2, 4, 9]), "leaves the range"),
    "fc.bias promised": ("eagle3", lambda c, t: c.update(fc_bias=True), "has no fc.bias"),
    "unknown field": ("eagle", lambda c, t: c.update(rope_theta=1e4), "no field 'rope_theta'"),
    "wrong type": ("eagle", lambda c, t: c.update(hidden_size="32"), "expected int, got str"),
    "newer kind": ("eagle", lambda c, t: c.update(model_type="spechead-eagle9"), "spechead-eagle9"),
    "head count": ("medusa", lambda c, t: c.update(num_heads=3), "says 3 Medusa heads, the file holds 4"),
    "one head lost": ("medusa", lambda c, t: t.pop("blocks.3.0.linear.bias"), "missing: blocks.3.0.linear.bias"),
}


@pytest.mark.parametrize("name", OWN_BROKEN)
def test_own_layout_is_as_strict(target, tmp_path, name):
    kind, damage, message = OWN_BROKEN[name]
    make_head(kind, target, **({"draft_vocab_size": DRAFT} if kind == "eagle3" else {})).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(tmp_path / "model.safetensors")
    assert not inspect_head(tmp_path, target.config).broken
    damage(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, target)
    assert inspect_head(tmp_path, target.config).broken
