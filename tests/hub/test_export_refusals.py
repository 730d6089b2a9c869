"""What export refuses and who can run it, where shared parts come from, and that nothing is written unproven."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from spechead.hub import export as module
from spechead.hub.export import export_head
from tests.hub.heads import read_export, saved_head
from tests.unit.heads.targets import DRAFT, make_head, make_target


@pytest.mark.parametrize(
    ("overrides", "to", "phrase", "able"),
    [
        ({"layer_style": "qwen3"}, "sglang", "norms on queries and keys", "vllm, speculators"),
        ({"norm_before_residual": True}, "sglang", "norm_before_residual=true", "vllm, speculators, llamacpp"),
        ({"norm_output": True}, "llamacpp", "norm_output=true", "vllm, sglang, speculators"),
        ({"num_hidden_layers": 2}, "llamacpp", "2 draft layers", "vllm, speculators"),
        ({"fc_bias": True}, "vllm", "a bias on fc", None),
        ({"attention_bias": True}, "sglang", "attention_bias=true", "vllm, speculators"),
        ({"share_embeddings": False}, "sglang", "embeddings of its own", "vllm, speculators, llamacpp, eagle"),
        ({"taps": [2, 4, 8]}, "vllm", "the state after the target's final norm", None),
        ({"logit_scale": 0.5}, "llamacpp", "logit_scale=0.5", "vllm"),
    ],
)
def test_what_an_engine_cannot_run_is_refused_naming_who_can(overrides, to, phrase, able, target, tmp_path):
    saved_head(tmp_path / "head", target, "eagle3", **overrides)
    with pytest.raises(ValueError, match=phrase) as refusal:
        export_head(tmp_path / "head", to, tmp_path / "out")
    wanted = f"What can run it: {able}." if able else "No format here runs it; spechead itself does."
    assert str(refusal.value).endswith(wanted)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("to", "kind"), [("eagle", "eagle"), ("speculators", "eagle3"), ("vllm", "medusa")])
def test_shared_parts_are_refused_by_name_without_the_target(to, kind, target, tmp_path):
    head = make_head(kind, target)
    head.config.target_name = "org/unknown"
    head.save_pretrained(tmp_path / "head")
    part = "lm_head" if kind == "medusa" else "embed_tokens"
    with pytest.raises(ValueError, match=f"{part}.*the head shares.*org/unknown cannot be had.*--target"):
        export_head(tmp_path / "head", to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shared_parts_come_from_the_given_target_and_not_from_another(target, tmp_path):
    head = make_head("eagle", target)
    head.save_pretrained(tmp_path / "head")
    export_head(tmp_path / "head", "eagle", tmp_path / "out", target=target.directory)
    table = target.get_input_embeddings().weight
    assert torch.equal(read_export(tmp_path / "out")[1]["embed_tokens.weight"], table)

    from spechead.heads.fingerprint import fingerprint

    head.config.target_fingerprint = fingerprint(make_target(layers=8, seed=7))
    head.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="not the one that the head was trained for: its target had other weights"):
        export_head(tmp_path / "other", "eagle", tmp_path / "out2", target=target.directory)


def test_the_demo_target_is_taken_from_its_cache(target, tmp_path, monkeypatch):
    from spechead import demo_target

    monkeypatch.setenv("SPECHEAD_CACHE", str(tmp_path / "cache"))
    demo = demo_target.demo_target_directory()
    target.save_pretrained(demo)
    sizes = {file.name: file.stat().st_size for file in demo.iterdir()}
    (demo / demo_target.RECORD).write_text(json.dumps({"files": sizes}))
    head = make_head("eagle", target)
    head.config.target_name = demo_target.REPO_ID
    head.save_pretrained(tmp_path / "head")
    report = export_head(tmp_path / "head", "eagle", tmp_path / "out")
    assert report.added == ("embed_tokens.weight",)
    assert demo_target.REPO_ID in report.commands[0]  # commands name the target, not this machine's cache


def test_success_is_reported_only_after_it_reads_back_equal(target, tmp_path, monkeypatch):
    saved_head(tmp_path / "head", target, "eagle3", draft_vocab_size=DRAFT)
    honest = module.write_tensors

    def one_bit(tensors, path):
        tensors = dict(tensors)
        tensors["fc.weight"] = tensors["fc.weight"].clone()
        tensors["fc.weight"].view(torch.int32)[0, 0] ^= 1
        honest(tensors, path)

    monkeypatch.setattr(module, "write_tensors", one_bit)
    with pytest.raises(ValueError, match=r"Nothing was exported.*fc.weight differs"):
        export_head(tmp_path / "head", "vllm", tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["head"]


def test_a_lost_config_field_is_found(target, tmp_path, monkeypatch):
    from spechead.hub.exporters import vllm

    saved_head(tmp_path / "head", target, "eagle3", norm_output=True)
    fields = vllm.eagle3_fields
    monkeypatch.setattr(vllm, "eagle3_fields", lambda config: fields(config) | {"norm_output": False})
    with pytest.raises(ValueError, match="norm_output reads back as False instead of True"):
        export_head(tmp_path / "head", "vllm", tmp_path / "out")


def test_an_existing_directory_is_replaced_only_when_asked(target, tmp_path):
    saved_head(tmp_path / "head", target, "eagle")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("keep")
    with pytest.raises(ValueError, match=r"exists.*--overwrite"):
        export_head(tmp_path / "head", "vllm", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "keep"
    export_head(tmp_path / "head", "vllm", tmp_path / "out", overwrite=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"]


def test_a_format_without_a_target_name_is_refused(target, tmp_path):
    make_head("medusa", target, share_lm_head=False).save_pretrained(tmp_path / "head")
    with pytest.raises(ValueError, match="--target <name>"):
        export_head(tmp_path / "head", "tgi", tmp_path / "out")
    with pytest.raises(ValueError, match="'gguf' is no format"):
        export_head(tmp_path / "head", "gguf", tmp_path / "out")


def test_a_damaged_head_is_not_exported(target, tmp_path):
    saved_head(tmp_path / "head", target, "eagle3")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: norm.weight"):
        export_head(tmp_path / "head", "vllm", tmp_path / "out")


def test_only_what_an_export_writes_is_ever_replaced(target, tmp_path):
    head = tmp_path / "heads" / "head"
    saved_head(head, target, "eagle3")
    (head / "results.json").write_text("{}")
    for output in (head, tmp_path / "heads", tmp_path):
        with pytest.raises(ValueError, match="is, or holds, the head itself"):
            export_head(head, "vllm", output, overwrite=True)
    out = tmp_path / "out"
    export_head(head, "vllm", out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"also holds notes\.txt"):
        export_head(head, "vllm", out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    export_head(head, "vllm", out, overwrite=True)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ValueError, match=r"file is a file"):
        export_head(head, "vllm", file, overwrite=True)
    assert sorted(path.name for path in head.iterdir()) == ["config.json", "model.safetensors", "results.json"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
