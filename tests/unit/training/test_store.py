"""The store gives back what online extraction gives, says its size beforehand, and continues after a kill."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM

from spechead.training import features
from spechead.training.batch import collate
from spechead.training.dataset import OnlineFeatures, RowDataset, StoredFeatures
from spechead.training.ends import LogitRule, TargetEnds
from spechead.training.features import needed_positions, write_store
from spechead.training.store import FeatureStore, StoreIndex, is_whole, store_bytes

TAPS = (1, 2, 4)


def lengths(rows):
    return [len(row["input_ids"]) for row in rows]


def written(tmp_path, target, ends, rows, **options):
    return write_store(tmp_path / "store", "key", target, ends, TAPS, rows, lengths(rows), **options)


def test_stored_features_are_the_online_ones(tmp_path, target, ends, rows):
    store = written(tmp_path, target, ends, rows, tokens_per_forward=32)
    data = RowDataset(rows, range(len(rows)), store)
    batch = collate([data[place] for place in range(len(rows))])
    online = OnlineFeatures(target, ends)(collate(rows), TAPS)
    stored = StoredFeatures(store)(batch, TAPS)
    real = torch.arange(batch["input_ids"].shape[1]) < torch.tensor(lengths(rows))[:, None]
    torch.testing.assert_close(stored["states"][real], online["states"][real], atol=1e-5, rtol=1e-5)
    assert torch.equal(stored["best"], online["best"])
    torch.testing.assert_close(stored["mass"], online["mass"], atol=1e-5, rtol=1e-5)


def test_features_are_transformers_hidden_states_and_laws(target, ends, rows):
    row = rows[5]
    ids = torch.tensor([row["input_ids"]])
    batch = OnlineFeatures(target, ends)(collate([row]), TAPS)
    with torch.no_grad():
        plain = target(input_ids=ids, output_hidden_states=True)
    for place, tap in enumerate(TAPS):
        torch.testing.assert_close(batch["states"][0, :, place], plain.hidden_states[tap][0])
    needed = needed_positions(len(row["input_ids"]), row["spans"])
    assert needed.nonzero().flatten().tolist() == [*range(3, 8), *range(11, 18)]
    assert torch.equal(batch["best"][0][needed].long(), plain.logits[0].argmax(-1)[needed])
    assert torch.equal(batch["best"][0] == -1, ~needed)
    torch.testing.assert_close(batch["mass"][0][needed], plain.logits[0].logsumexp(-1)[needed])


def test_four_rows_at_once_equal_four_single_runs_twice(target, ends, rows):
    online = OnlineFeatures(target, ends)
    together = [online(collate(rows[:4]), TAPS) for _ in range(2)]
    assert torch.equal(together[0]["states"], together[1]["states"])
    for place, row in enumerate(rows[:4]):
        alone = online(collate([row]), TAPS)["states"][0]
        torch.testing.assert_close(together[0]["states"][place, : len(alone)], alone, atol=1e-5, rtol=1e-5)


def test_the_size_said_beforehand_is_the_size_written(tmp_path, target, ends, rows):
    many = [row | {"number": number} for number, row in enumerate(rows * 40)]
    written(tmp_path, target, ends, many)
    said = store_bytes(lengths(many), StoreIndex("key", TAPS, 32, "float32", len(many), {}))
    found = sum(path.stat().st_size for path in (tmp_path / "store").glob("shard-*.safetensors"))
    assert abs(said - found) <= 0.01 * found


def test_an_interrupted_write_goes_on_and_gives_the_same_store(tmp_path, target, ends, rows, monkeypatch):
    whole = written(tmp_path, target, ends, rows, tokens_per_forward=16)
    real, calls = features.read_states, []

    def dying(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(features, "read_states", dying)
    monkeypatch.setattr(features.StoreWriter, "__init__", small_shards(features.StoreWriter.__init__))
    where = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        write_store(where, "key", target, ends, TAPS, rows, lengths(rows), tokens_per_forward=16)
    assert 0 < len(json.loads((where / "index.json").read_text())["rows"]) < len(rows)
    assert not is_whole(where, "key", TAPS)
    with pytest.raises(ValueError, match="finish writing"):
        FeatureStore(where, "key")
    monkeypatch.setattr(features, "read_states", real)
    again = write_store(where, "key", target, ends, TAPS, rows, lengths(rows), tokens_per_forward=16)
    for number in range(len(rows)):
        assert torch.equal(again[number].states, whole[number].states)
        assert torch.equal(again[number].best, whole[number].best)


def small_shards(init):
    def patched(self, directory, index):
        init(self, directory, index, shard_bytes=1)

    return patched


def test_another_key_absent_taps_and_absent_stores_are_refused(tmp_path, target, ends, rows):
    store = written(tmp_path, target, ends, rows)
    with pytest.raises(ValueError, match="other data, taps or target"):
        FeatureStore(tmp_path / "store", "other")
    with pytest.raises(ValueError, match="other data, taps or target"):
        write_store(tmp_path / "store", "other", target, ends, TAPS, rows, lengths(rows))
    with pytest.raises(ValueError, match="other data, taps or target"):
        write_store(tmp_path / "store", "key", target, ends, (0, 4), rows, lengths(rows))
    assert is_whole(tmp_path / "store", "key", (1, 4))
    assert not is_whole(tmp_path / "store", "key", (3, 4))
    with pytest.raises(ValueError, match="no feature store"):
        FeatureStore(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"needs \[3\]"):
        StoredFeatures(store)(collate(rows), (1, 3, 4))


def test_the_ends_in_a_store_are_the_targets(tmp_path, target, ends, rows):
    written(tmp_path, target, ends, rows)
    loaded = TargetEnds.load(tmp_path / "store")
    assert torch.equal(loaded.get_input_embeddings().weight, target.get_input_embeddings().weight)
    assert torch.equal(loaded.get_output_embeddings().weight, target.get_output_embeddings().weight)
    assert loaded.config.num_hidden_layers == 4
    assert not any(weight.requires_grad for weight in loaded.parameters())


def test_scaled_and_capped_logits_have_their_rule_and_unknown_ones_are_refused(target):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    }
    cohere = CohereForCausalLM(CohereConfig(**sizes, logit_scale=0.25, pad_token_id=0)).eval()
    assert TargetEnds.of(cohere).rule == LogitRule(scale=0.25)
    gemma = Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=3.0)).eval()
    assert TargetEnds.of(gemma).rule == LogitRule(softcap=3.0)

    class Odd(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits**2
            return output

    with pytest.raises(ValueError, match="needs its own rule"):
        TargetEnds.of(Odd(target.config).eval())
