"""The heads themselves: equality with their definition, causality, caches, masks, gradients, saving and sharing."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, DynamicCache

from spechead.heads import Eagle3Head, MedusaHeads
from tests.unit.heads.targets import (
    DRAFT,
    FAMILIES,
    HIDDEN,
    VOCAB,
    kept_ids,
    logits_of,
    make_head,
    make_target,
    some_ids,
    taps_of,
)

VARIANTS = [
    ("medusa", {}),
    ("medusa", {"share_lm_head": False, "num_hidden_layers": 2, "bias": False}),
    ("eagle", {}),
    ("eagle", {"num_hidden_layers": 2, "fc_bias": True, "share_embeddings": False, "layer_style": "qwen3"}),
    ("eagle3", {"draft_vocab_size": DRAFT}),
    ("eagle3", {"num_hidden_layers": 2, "norm_before_residual": True, "norm_output": True, "fc_norm": True}),
    ("eagle3", {"layer_style": "qwen3", "norm_before_fc": True, "share_lm_head": True, "attention_bias": True}),
]
LAYERED = [variant for variant in VARIANTS if variant[0] != "medusa"]


def inputs(head, target, ids):
    features = head.fuse(taps_of(target, ids, head.taps)[:, :-1])
    return ids[:, 1:], features, torch.arange(ids.shape[1] - 1).expand(len(ids), -1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_every_family_binds_and_predicts(family, kind):
    target = make_target(family)
    head = make_head(kind, target)
    logits = logits_of(head, target, some_ids())
    assert logits.shape == ((4, 2, 9, VOCAB) if kind == "medusa" else (2, 8, VOCAB))
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("layers", [2, 3, 4, 6])
def test_taps_are_read_where_small_targets_have_them(layers):
    target = make_target(layers=layers)
    head = make_head("eagle3", target)
    assert len(set(head.taps)) == 3
    assert max(head.taps) <= layers
    assert torch.isfinite(logits_of(head, target, some_ids())).all()
    assert make_head("eagle", target).taps == (layers,)


@pytest.mark.parametrize(("kind", "overrides"), VARIANTS)
def test_bind_keeps_the_target_out_of_the_head(kind, overrides):
    target = make_target()
    head = make_head(kind, target, **overrides)
    owned = {tensor.data_ptr() for tensor in head.state_dict().values()}
    assert not owned & {tensor.data_ptr() for tensor in target.state_dict().values()}
    names = set(head.state_dict())
    assert ("embed_tokens.weight" in names) == (overrides.get("share_embeddings") is False)
    assert any(name.startswith("lm_head") for name in names) == (not head.config.share_lm_head)
    twin = copy.deepcopy(head)
    assert twin.shared("lm_head") is target.get_output_embeddings()
    floats = [tensor for tensor in head.state_dict().values() if tensor.is_floating_point()]
    assert sum(p.numel() for p in head.parameters()) == sum(tensor.numel() for tensor in floats)


def test_save_new_process_load_is_bit_equal(tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    logits = []
    for number, (kind, overrides) in enumerate(VARIANTS):
        head = make_head(kind, target, **overrides)
        head.save_pretrained(tmp_path / f"head{number}")
        logits.append(logits_of(head, target, some_ids()))
    program = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "from spechead.heads import load_head\n"
        "from tests.unit.heads.targets import logits_of, some_ids\n"
        "torch.set_num_threads(1)\n"
        "target = AutoModelForCausalLM.from_pretrained(sys.argv[1] + '/target').eval()\n"
        "heads = [load_head(f'{sys.argv[1]}/head{number}', target) for number in range(int(sys.argv[2]))]\n"
        "torch.save([logits_of(head, target, some_ids()) for head in heads], sys.argv[1] + '/logits.pt')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(len(VARIANTS))]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    loaded = torch.load(tmp_path / "logits.pt", weights_only=True)
    assert all(torch.equal(after, before) for after, before in zip(loaded, logits, strict=True))


@pytest.mark.parametrize(("kind", "overrides"), VARIANTS)
def test_auto_classes_load_the_same_head(kind, overrides, tmp_path):
    target = make_target()
    head = make_head(kind, target, **overrides)
    head.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(head.config)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is type(head)
    assert torch.equal(logits_of(again.eval().bind(target), target, some_ids()), logits_of(head, target, some_ids()))


def test_a_renamed_tensor_is_named_by_from_pretrained(tmp_path):
    from safetensors.torch import load_file, save_file

    make_head("eagle3", make_target()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["layers.0.hidden_normm.weight"] = tensors.pop("layers.0.hidden_norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: layers\.0\.hidden_norm\.weight; unexpected: .*hidden_normm"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("kind", "overrides"), LAYERED)
def test_later_tokens_leave_earlier_outputs_bit_identical(kind, overrides, implementation):
    target = make_target()
    head = make_head(kind, target, **overrides)
    head.set_attn_implementation(implementation)
    ids, hidden, positions = inputs(head, target, some_ids())
    with torch.no_grad():
        before = head(ids, hidden, positions)
        changed_ids, changed = ids.clone(), hidden.clone()
        changed_ids[:, 5:] = (ids[:, 5:] + 7) % VOCAB
        changed[:, 5:] += 1.0
        after = head(changed_ids, changed, positions)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize(("kind", "overrides"), LAYERED)
def test_cached_and_masked_runs_equal_one_run(kind, overrides):
    target = make_target()
    head = make_head(kind, target, **overrides)
    ids, hidden, positions = inputs(head, target, some_ids())
    with torch.no_grad():
        whole = head(ids, hidden, positions)
        cache = DynamicCache()
        parts = [
            head(ids[:, a:b], hidden[:, a:b], positions[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 8))
        ]
        eager = copy.deepcopy(head)
        eager.set_attn_implementation("eager")
        other = eager(ids, hidden, positions)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=2e-5)
    torch.testing.assert_close(other, whole, rtol=0, atol=2e-5)


def test_gradients_flow_through_a_growing_cache_with_an_own_mask():
    target = make_target()
    head = make_head("eagle3", target, draft_vocab_size=DRAFT).train()
    ids, hidden, positions = inputs(head, target, some_ids())
    length, low = ids.shape[1], torch.finfo(torch.float32).min
    cache = DynamicCache()
    state = head(ids, hidden, positions, cache=cache)
    causal = torch.full((length, length), low).triu(1)
    own = torch.full((length, length), low).fill_diagonal_(0.0)
    mask = torch.cat([causal, own], dim=-1)[None, None]
    second = head(ids, state, positions, attention_mask=mask, cache=cache)
    (key_gradient,) = torch.autograd.grad(second.sum(), head.layers[0].self_attn.k_proj.weight, retain_graph=True)
    (fc_gradient,) = torch.autograd.grad(head.logits(second).sum(), head.fc.weight)
    assert key_gradient.abs().sum() > 0
    assert fc_gradient.abs().sum() > 0
    assert target.get_input_embeddings().weight.grad is None


def test_masks_of_other_kinds():
    target = make_target()
    head = make_head("eagle3", target)
    ids, hidden, positions = inputs(head, target, some_ids())
    length = ids.shape[1]
    with pytest.raises(ValueError, match="additive float mask"):
        head(ids, hidden, positions, attention_mask=torch.ones(1, 1, length, length, dtype=torch.bool).tril())
    wide = torch.full((1, 1, length, length), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)
    with torch.no_grad():
        assert torch.equal(head(ids, hidden, positions, attention_mask=wide), head(ids, hidden, positions))


def test_positions_keep_float32_when_the_head_is_cast():
    target = make_target().to(torch.bfloat16)
    head = make_head("eagle3", target, draft_vocab_size=DRAFT)
    assert head.dtype == torch.bfloat16
    assert head.rotary_emb.inv_freq.dtype == torch.float32
    assert head.d2t.dtype == torch.int64
    reference = make_head("eagle3", make_target(), draft_vocab_size=DRAFT)
    assert torch.equal(head.rotary_emb.inv_freq, reference.rotary_emb.inv_freq)
    assert torch.isfinite(logits_of(head, target, some_ids())).all()
    wide = make_head("eagle3", make_target()).bind(target, match_dtype=False)
    assert wide.dtype == torch.float32
    assert logits_of(wide, target, some_ids()).dtype == torch.float32


def test_untrained_medusa_heads_are_the_lm_head():
    target = make_target()
    head = MedusaHeads(make_head("medusa", target).config).bind(target)
    hidden = torch.randn(3, HIDDEN)
    assert torch.equal(head.hidden_states(hidden), hidden.expand(4, 3, HIDDEN))
    assert torch.equal(head(hidden), target.get_output_embeddings()(hidden.repeat(4, 1, 1)))


def test_vocabulary_maps():
    head = make_head("eagle3", make_target(), draft_vocab_size=DRAFT)
    ids = kept_ids(VOCAB, DRAFT)
    assert torch.equal(head.draft_to_target, ids)
    assert torch.equal(head.d2t + torch.arange(DRAFT), ids)
    assert torch.equal(head.t2d.nonzero().flatten(), ids)
    assert torch.equal(head.target_to_draft[ids], torch.arange(DRAFT))
    assert int((head.target_to_draft == -1).sum()) == VOCAB - DRAFT
    assert head.draft_to_target is head.draft_to_target
    other = torch.arange(DRAFT) + 2
    head.set_draft_vocab(other)
    assert torch.equal(head.draft_to_target, other)
    assert "draft_to_target" not in head.state_dict()
    for wrong, message in (
        (torch.arange(DRAFT - 1), "draft_vocab_size"),
        (torch.arange(DRAFT).flip(0), "not strictly ascending"),
        (torch.arange(DRAFT) + VOCAB, "leaves the range"),
    ):
        with pytest.raises(ValueError, match=message):
            head.set_draft_vocab(wrong)


def test_a_full_vocabulary_has_no_buffers():
    head = make_head("eagle3", make_target())
    assert not set(head.state_dict()) & {"d2t", "t2d"}
    assert torch.equal(head.draft_to_target, torch.arange(VOCAB))
    assert torch.equal(head.target_to_draft, torch.arange(VOCAB))


def test_pairs_that_do_not_fit_are_refused():
    target = make_target(layers=3)
    head = make_head("eagle3", target)
    with pytest.raises(ValueError, match="vocabulary of 48 ids"):
        head.bind(make_target(vocab_size=50))
    with pytest.raises(ValueError, match="trained for a target of 3 layers"):
        head.bind(make_target(layers=4))
    unbound = Eagle3Head(
        type(head.config)(hidden_size=16, num_attention_heads=4, vocab_size=VOCAB, intermediate_size=8)
    )
    with pytest.raises(ValueError, match="hidden states of size 16"):
        unbound.bind(target)
    with pytest.raises(ValueError, match=r"Call head\.bind"):
        _ = unbound.taps
    with pytest.raises(ValueError, match="has no target yet"):
        unbound.embed(torch.tensor([[1]]))


def test_config_on_disk_says_shared_and_never_tied(tmp_path):
    make_head("eagle3", make_target(), draft_vocab_size=DRAFT).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert saved["share_embeddings"] is True
    assert saved["share_lm_head"] is False
    assert saved["tie_word_embeddings"] is False
    assert saved["taps"] == [0, 1, 2]
    assert saved["model_type"] == "spechead-eagle3"
