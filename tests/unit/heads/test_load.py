"""`load_head` reads every published layout and gives the logits of an independent reference computation."""

import json

import pytest
import torch
from transformers import DynamicCache

from spechead.heads import convert, load_head
from spechead.heads.fingerprint import fingerprint
from tests.unit.heads import reference
from tests.unit.heads.published_layouts import (
    LLAMA,
    SIZES,
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
from tests.unit.heads.targets import (
    DRAFT,
    HIDDEN,
    VOCAB,
    kept_ids,
    loud,
    make_head,
    make_target,
    some_ids,
    taps_of,
    write,
)

EXTRA = torch.tensor([7, 11])


@pytest.fixture
def target():
    return make_target(layers=8)


def chain_logits(head, features, ids):
    """Drive a head as decoding does: one call over the prompt's pairs, then one drafted token a call."""
    length = len(ids)
    cache = DynamicCache()
    with torch.no_grad():
        state = head(ids[None], head.fuse(features[None]), torch.arange(length)[None], cache=cache)[:, -1:]
        rows = [head.logits(state)[0, 0]]
        for depth, token in enumerate(EXTRA):
            state = head(token[None, None], state, torch.tensor([[length + depth]]), cache=cache)
            rows.append(head.logits(state)[0, 0])
    return torch.stack(rows)


def pairs(target, taps):
    ids = some_ids(rows=1)
    return ids[0, 1:], taps_of(target, ids, taps)[0, :-1]


def close(actual, expected):
    # Random layers blow features up over three depths, and rounding with them; mistakes differ in the first digit.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def check_eagle3(directory, target, tensors, flags, table=None, **kwargs):
    head = load_head(directory, target, **kwargs)
    ids, features = pairs(target, head.taps)
    table = target.get_input_embeddings().weight.detach() if table is None else table
    close(chain_logits(head, features, ids), reference.eagle3(tensors, SIZES | flags, table, ids, features, EXTRA))
    return head


@pytest.mark.parametrize("pickled", [False, True])
def test_medusa_v1_counts_heads_in_the_file(target, tmp_path, pickled, caplog):
    blocks, noise = medusa_blocks(5, 2), Noise(4)
    lm_heads = [noise(VOCAB, HIDDEN) for _ in blocks]
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    tensors = medusa_tensors(blocks, lm_heads)
    if pickled:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
        with pytest.raises(ValueError, match="allow_pickle=True"):
            load_head(tmp_path, target)
    else:
        write(tmp_path, config, tensors, "medusa_lm_head")
    with loud(caplog):
        head = load_head(tmp_path, target, allow_pickle=pickled)
    assert "says 2 Medusa heads, the file holds 5" in caplog.text
    assert (head.config.num_heads, head.config.num_hidden_layers, head.config.share_lm_head) == (5, 2, False)
    assert head.taps == (8,)
    hidden = taps_of(target, some_ids(rows=1), head.taps)[0]
    with torch.no_grad():
        close(head(hidden), reference.medusa(blocks, lm_heads, hidden))


def test_medusa_v2_shares_the_lm_head(target, tmp_path):
    blocks = medusa_blocks(4, 1)
    config = {"medusa_num_heads": 4, "medusa_num_layers": 1, "version": "2", "base_model_name_or_path": "a/b"}
    write(tmp_path, config, medusa_tensors(blocks, None), "medusa_lm_head")
    head = load_head(tmp_path, target)
    assert head.config.share_lm_head
    assert head.config.vocab_size == VOCAB
    hidden = taps_of(target, some_ids(rows=1), head.taps)[0]
    shared = target.get_output_embeddings().weight.detach()
    with torch.no_grad():
        close(head(hidden), reference.medusa(blocks, [shared] * 4, hidden))
    assert load_head(tmp_path).config.vocab_size == 0


def test_merged_medusa_reads_the_heads_alone(target, tmp_path):
    blocks, noise = medusa_blocks(3, 1), Noise(4)
    lm_heads = [noise(VOCAB, HIDDEN) for _ in blocks]
    merged = {f"medusa_head.{name}": tensor for name, tensor in medusa_tensors(blocks, lm_heads).items()}
    base = {"model.embed_tokens.weight": noise(VOCAB, HIDDEN), "lm_head.weight": noise(VOCAB, HIDDEN)}
    write(tmp_path, LLAMA | {"medusa_num_heads": 3, "medusa_num_layers": 1}, merged | base)
    head = load_head(tmp_path, target)
    hidden = taps_of(target, some_ids(rows=1), head.taps)[0]
    with torch.no_grad():
        close(head(hidden), reference.medusa(blocks, lm_heads, hidden))


@pytest.mark.parametrize(
    ("bias", "prefix", "original"), [(True, "", False), (False, "medusa_heads.", False), (False, "", True)]
)
def test_vllm_medusa(target, tmp_path, bias, prefix, original):
    blocks, noise = medusa_blocks(3, 2, bias), Noise(4)
    lm_heads = [noise(VOCAB, HIDDEN) for _ in range(1 if original else 3)]
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "medusa_fc_bias": bias,
        "original_lm_head": original,
    }
    write(tmp_path, config, vllm_medusa_tensors(blocks, lm_heads, prefix))
    head = load_head(tmp_path, target)
    hidden = taps_of(target, some_ids(rows=1), head.taps)[0]
    with torch.no_grad():
        close(head(hidden), reference.medusa(blocks, lm_heads * 3 if original else lm_heads, hidden))


@pytest.mark.parametrize("variant", ["bias", "no bias", "qwen2 biases", "two layers", "pickle"])
def test_eagle1(target, tmp_path, variant):
    layers = 2 if variant == "two layers" else 1
    bias = variant not in ("no bias", "two layers")
    tensors = eagle1_tensors(bias=bias, biased=variant == "qwen2 biases", layers=layers)
    table = target.get_input_embeddings().weight.detach()
    config = LLAMA | ({} if bias else {"bias": False}) | {"num_hidden_layers": layers}
    full = tensors | {"embed_tokens.weight": table.clone()}
    if variant == "pickle":
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        torch.save(full, tmp_path / "pytorch_model.bin")
    else:
        write(tmp_path, config, full)
    head = load_head(tmp_path, target, allow_pickle=variant == "pickle")
    assert head.config.share_embeddings
    assert "embed_tokens.weight" not in head.state_dict()
    assert head.taps == (8,)
    assert head.config.trained_positions == 2048
    ids, features = pairs(target, head.taps)
    lm_head = target.get_output_embeddings().weight.detach()
    expected = reference.eagle1(tensors, SIZES | {"num_hidden_layers": layers}, table, lm_head, ids, features, EXTRA)
    close(chain_logits(head, features, ids), expected)


def test_eagle1_keeps_embeddings_that_are_its_own(target, tmp_path):
    tensors, table = eagle1_tensors(), Noise(5)(VOCAB, HIDDEN)
    write(tmp_path, LLAMA, tensors | {"embed_tokens.weight": table})
    head = load_head(tmp_path, target)
    assert not head.config.share_embeddings
    ids, features = pairs(target, head.taps)
    lm_head = target.get_output_embeddings().weight.detach()
    close(chain_logits(head, features, ids), reference.eagle1(tensors, SIZES, table, lm_head, ids, features, EXTRA))


def test_eagle3_midlayer(target, tmp_path):
    tensors = eagle3_tensors("midlayer")
    write(tmp_path, eagle3_config(), tensors)
    head = check_eagle3(tmp_path, target, tensors, {})
    assert head.taps == (2, 4, 5)
    assert torch.equal(head.draft_to_target, kept_ids(VOCAB, DRAFT))


def test_eagle3_full_vocabulary_with_zero_d2t(target, tmp_path):
    tensors = eagle3_tensors("midlayer", size=VOCAB)
    write(tmp_path, eagle3_config(draft_vocab_size=VOCAB), tensors)
    head = check_eagle3(tmp_path, target, tensors, {})
    assert not head.pruned


def test_eagle3_layers_without_t2d_and_with_other_taps(target, tmp_path):
    tensors = eagle3_tensors("layers.0")
    without = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    config = eagle3_config(
        architectures=["LlamaForCausalLMEagle3"],
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": [2, 3, 6],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
        rope_scaling={"rope_type": "default"},
    )
    write(tmp_path, config, without)
    head = check_eagle3(tmp_path, target, tensors, {})
    assert head.taps == (2, 3, 6)
    assert torch.equal(head.t2d, vocabulary_map()["t2d"])


def test_eagle3_of_another_width_than_its_target(tmp_path):
    wide = make_target("gpt2", layers=8)
    tensors, table = eagle3_tensors("midlayer"), Noise(5)(VOCAB, HIDDEN)
    write(tmp_path, eagle3_config(target_hidden_size=HIDDEN), tensors | {"embed_tokens.weight": table})
    assert not check_eagle3(tmp_path, wide, tensors, {}, table).config.share_embeddings
    write(
        tmp_path, eagle3_config(target_hidden_size=48), eagle3_tensors(taps_width=48) | {"embed_tokens.weight": table}
    )
    assert load_head(tmp_path).fuse(torch.zeros(1, 2, 144)).shape == (1, 2, HIDDEN)
    with pytest.raises(ValueError, match="hidden states of size 48"):
        load_head(tmp_path, wide)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("flag", ["plain", "fc_norm", "norm_before_fc", "norm_output", "norm_before_residual"])
def test_speculators(target, tmp_path, model_type, flag):
    layers = 2 if flag == "norm_output" else 1
    tensors = eagle3_tensors("layers.0", normed=model_type == "qwen3", layers=layers)
    noise = Noise(6)
    if flag == "fc_norm":
        tensors |= {f"fc_norm.{i}.weight": noise(HIDDEN) for i in range(3)}
    if flag == "norm_before_fc":
        tensors |= {"input_norm.weight": noise(3 * HIDDEN)}
    table = target.get_input_embeddings().weight.detach()
    flags = {} if flag == "plain" else {flag: True}
    config = speculators_config(model_type, layers, eagle_aux_hidden_state_layer_ids=[3, 5, 7], **flags)
    write(tmp_path, config, tensors | {"embed_tokens.weight": table})
    head = check_eagle3(tmp_path, target, tensors, flags | {"num_hidden_layers": layers})
    assert head.taps == (3, 5, 7)
    assert head.config.layer_style == model_type
    assert head.config.share_embeddings
    assert head.config.target_name == "org/target"


@pytest.mark.parametrize("layout", ["medusa", "medusa-vllm", "eagle", "eagle3-midlayer", "eagle3"])
def test_names_go_both_ways(layout):
    published = {
        "medusa": medusa_tensors(medusa_blocks(3, 2), [torch.zeros(1)] * 3),
        "medusa-vllm": vllm_medusa_tensors(medusa_blocks(3, 2), [torch.zeros(1)] * 3),
        "eagle": eagle1_tensors(),
        "eagle3-midlayer": eagle3_tensors("midlayer"),
        "eagle3": eagle3_tensors("layers.0", layers=2),
    }[layout]
    config = {"draft_vocab_size": DRAFT} if layout.startswith("eagle3") else {}
    assert convert.detect_layout(config, published) == layout
    own = convert.to_own(layout, published)
    assert convert.from_own(layout, own).keys() == published.keys()
    assert all(value is published[name] for name, value in convert.from_own(layout, own).items())


def test_other_targets_are_warned_of(target, tmp_path, caplog):
    head = make_head("eagle", target, target_name="org/right", target_fingerprint=fingerprint(target))
    head.save_pretrained(tmp_path)
    other = make_target(layers=8, seed=5)
    with loud(caplog):
        load_head(tmp_path, target)
        assert "may draft badly" not in caplog.text
        load_head(tmp_path, other)
    assert "other weights" in caplog.text


def test_the_head_follows_the_targets_dtype_and_says_so(target, tmp_path, caplog):
    make_head("eagle3", target, draft_vocab_size=DRAFT).save_pretrained(tmp_path)
    with loud(caplog):
        head = load_head(tmp_path, make_target(layers=8).to(torch.bfloat16))
    assert head.dtype == torch.bfloat16
    assert "follows the target's torch.bfloat16" in caplog.text
