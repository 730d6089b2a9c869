"""Draft models for llama.cpp: the files as they are, checked against what its converter and server ask."""

import shutil
from pathlib import Path

import pytest
import torch

from spechead.hub.export import export_head
from tests.tiny import build, tiny_config
from tests.tiny_tokenizer import tiny_tokenizer


def saved(directory: Path, family: str = "llama", **overrides) -> Path:
    """A whole model with its tokenizer."""
    build(tiny_config(family, **overrides)).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def test_the_directory_is_copied_and_the_commands_are_printed(tmp_path):
    draft, target = saved(tmp_path / "draft"), saved(tmp_path / "target", num_hidden_layers=3)
    report = export_head(draft, "llamacpp", tmp_path / "out", target=str(target))
    assert report.kind == "draft model"
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "out" / file).read_bytes() == (draft / file).read_bytes()
    convert_target, convert_draft, serve = report.commands
    assert convert_target.startswith(f"python convert_hf_to_gguf.py {target} ")
    assert "--target-model-dir" not in convert_draft
    assert "--spec-type draft-simple" in serve
    assert report.notes == ()
    assert report.tensors > 10


def test_weights_in_a_second_form_beside_the_model_are_left_out(tmp_path):
    saved(tmp_path / "draft")
    shutil.copyfile(tmp_path / "draft" / "model.safetensors", tmp_path / "draft" / "consolidated.safetensors")
    report = export_head(tmp_path / "draft", "llamacpp", tmp_path / "out")
    assert report.tensors > 0
    assert not (tmp_path / "out" / "consolidated.safetensors").exists()


@pytest.mark.parametrize("to", ["vllm", "sglang", "tgi", "speculators", "eagle", "medusa"])
def test_other_servers_take_a_draft_model_as_it_is(to, tmp_path):
    with pytest.raises(ValueError, match=r"is a whole model.*take a draft model's directory as it is.*--to llamacpp"):
        export_head(saved(tmp_path / "draft"), to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_draft_that_llama_server_would_refuse_is_refused_here(tmp_path):
    draft, target = saved(tmp_path / "draft"), saved(tmp_path / "target")
    other = tiny_tokenizer()
    vocabulary = other.get_vocab()
    words = sorted(vocabulary, key=vocabulary.get)
    words[7], words[9] = words[9], words[7]
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w4")
    backend = Tokenizer(model)
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>").save_pretrained(target)
    with pytest.raises(ValueError, match="token 7 is 'w7' in the draft and 'w9' in the target"):
        export_head(draft, "llamacpp", tmp_path / "out", target=str(target))
    large = saved(tmp_path / "large", vocab_size=400)
    with pytest.raises(ValueError, match="vocabularies of 48 and 400 rows differ by more than 128"):
        export_head(draft, "llamacpp", tmp_path / "out", target=str(large))
    assert not (tmp_path / "out").exists()


def test_without_the_target_the_tokenizers_are_not_compared_and_it_says_so(tmp_path):
    report = export_head(saved(tmp_path / "draft"), "llamacpp", tmp_path / "out")
    assert "tokenizers were not compared" in report.notes[0]
    assert "<target>" in report.commands[0]


def test_missing_files_and_unknown_architectures_are_named(tmp_path):
    draft = saved(tmp_path / "draft")
    (draft / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        export_head(draft, "llamacpp", tmp_path / "out")
    odd = saved(tmp_path / "odd")
    config = (odd / "config.json").read_text()
    (odd / "config.json").write_text(config.replace("LlamaForCausalLM", "OddForCausalLM"))
    with pytest.raises(ValueError, match="architecture is \\['OddForCausalLM'\\]"):
        export_head(odd, "llamacpp", tmp_path / "out")


def test_a_pickled_model_is_not_taken_for_a_draft(tmp_path):
    draft = saved(tmp_path / "draft")
    (draft / "model.safetensors").unlink()
    torch.save({}, draft / "pytorch_model.bin")
    with pytest.raises(ValueError, match="only as pickles"):
        export_head(draft, "llamacpp", tmp_path / "out")
