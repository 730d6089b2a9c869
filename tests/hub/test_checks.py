"""What must hold of a head before the Hub is asked for anything."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file

from spechead.bench import results as results_file
from spechead.bench.certificate import MethodCheck
from spechead.bench.results import Model
from spechead.heads import load_head
from spechead.heads.fingerprint import fingerprint
from spechead.hub.publish import publish
from tests.hub.heads import FILES, REPO, head_directory, prove, results_for, send
from tests.unit.heads.targets import make_head, make_target


def test_an_unmeasured_head_needs_to_be_called_so(hub, head):
    (head / "results.json").unlink()
    (head / "verify.json").unlink()
    with pytest.raises(ValueError, match=r"no results.json and no verify.json: .*--allow-unmeasured"):
        send(head)
    assert hub.requests == []
    report = send(head, allow_unmeasured=True)
    files = hub.repos[REPO].commits[report.commit]
    assert set(files) == FILES - {"results.json"}
    assert b"Not measured" in files["README.md"]
    assert b"model-index" not in files["README.md"]


def failing(head):
    return {"methods": [MethodCheck("eagle", {}, False, False)], "passed": False}


def only_lossy(head):
    return {"methods": [MethodCheck("eagle", {"acceptance": "typical"}, True, None)], "passed": None}


def another_method(head):
    return {"methods": [MethodCheck("prompt_lookup", {}, False, True)]}


def another_head(head):
    first, second = results_for(head).models
    return {"models": [first, replace(second, parameters=second.parameters + 1)]}


def another_target(head):
    first, second = results_for(head).models
    head.config.target_fingerprint = {"config": "0" * 16, "logits": [0.0, 1.0]}
    return {"models": [replace(first, fingerprint={"config": "0" * 16, "logits": [1.0, 0.0]}), second]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (failing, "eagle did not pass"),
        (only_lossy, "is no proof of this head: .*--acceptance exact"),
        (another_method, "is no proof of this head"),
        (another_head, "is no proof of this head"),
        (another_target, "was issued on tiny-target, which is not the target"),
    ],
)
def test_a_certificate_that_does_not_prove_the_head_is_refused_always(changes, said, hub, head):
    ours = load_head(head)
    prove(ours, head, **changes(ours))
    ours.save_pretrained(head)
    with pytest.raises(ValueError, match=said):
        send(head, allow_unmeasured=True)
    assert hub.requests == []


@pytest.mark.parametrize("content", ['{"passed": true}', "{"])
def test_what_verify_did_not_write_is_no_certificate(content, hub, head):
    (head / "verify.json").write_text(content)
    with pytest.raises(ValueError, match=r"verify\.json is no certificate"):
        send(head, allow_unmeasured=True)
    assert hub.requests == []


def test_a_certificate_may_lie_elsewhere(hub, head, tmp_path):
    (head / "verify.json").rename(tmp_path / "proof.json")
    assert send(head, certificate=tmp_path / "proof.json").commit


def test_results_must_be_the_heads_own_complete_and_free_of_bugs(hub, head, tmp_path):
    ours = load_head(head)

    def refused(message, **changes):
        results_file.save(results_for(ours, **changes), head / "results.json")
        with pytest.raises(ValueError, match=message):
            send(head)

    other = Model("head", "head", "spechead-eagle3", 17, "float32")
    refused("is not of this head", models=[results_for(ours).models[0], other])
    refused("no method that drafts with one", methods={"plain": {}, "prompt_lookup": {}, "eagle": {}})
    refused("was interrupted", complete=False)
    cells = results_for(ours).cells
    cells[-1].bugs = 2
    refused(r"records 2 output\(s\) that differ from plain's by more than a tie", cells=cells)
    (head / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=r"results.json is no results file"):
        send(head)
    assert hub.requests == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_figures_and_proofs_of_other_weights_of_the_same_size_are_refused(hub, head, dtype):
    measured_in = load_head(head).to(getattr(torch, dtype))
    models = results_for(measured_in).models
    models[1].dtype = dtype
    results_file.save(results_for(load_head(head), models=models), head / "results.json")
    prove(load_head(head), head, models=models)
    assert send(head).commit
    before = len(hub.requests)
    weights = load_file(head / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"] * 1.5
    save_file(weights, head / "model.safetensors")
    with pytest.raises(ValueError, match=r"issued for other weights"):
        send(head)
    prove(load_head(head), head)
    with pytest.raises(ValueError, match=r"other weights: its figures are another's"):
        send(head)
    assert len(hub.requests) == before


def test_figures_of_another_default_drafting_are_refused_and_its_proof_holds(hub, head):
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"tree": "chain", "num_draft_tokens": 3}))
    with pytest.raises(ValueError, match=r"other tree, num_draft_tokens: its figures"):
        send(head)
    results_file.save(results_for(load_head(head)), head / "results.json")
    assert send(head).commit


def test_a_head_of_another_target_is_refused_where_the_target_can_be_had(hub, tmp_path):
    target = make_target(layers=8)
    target.save_pretrained(tmp_path / "target")
    directory = head_directory(tmp_path / "head", target=target)

    def claim(**fields):
        config = json.loads((directory / "config.json").read_text()) | fields
        (directory / "config.json").write_text(json.dumps(config))

    claim(target_name=str(tmp_path / "target"), target_fingerprint=fingerprint(make_target(layers=8, seed=5)))
    with pytest.raises(ValueError, match="not the one that the head was trained for: its target had other weights"):
        send(directory)
    claim(target_fingerprint=fingerprint(target))
    assert send(directory).notes == ()
    make_target(layers=6).save_pretrained(tmp_path / "shallow")
    with pytest.raises(ValueError, match="trained for a target of 8 layers"):
        send(directory, target=str(tmp_path / "shallow"))
    with pytest.raises(ValueError, match="cannot be had"):
        send(directory, target=str(tmp_path / "nowhere"))


def test_only_a_whole_head_in_our_own_layout_with_a_licence_and_a_target(hub, head, tmp_path):
    with pytest.raises(ValueError, match=r"says the licence; give it, for example --license apache-2.0"):
        publish(REPO, head)
    with pytest.raises(ValueError, match="is no repo id"):
        publish("not a repo", head, license="mit")
    with pytest.raises(ValueError, match="is no directory"):
        publish(REPO, tmp_path / "nowhere", license="mit")
    save_file(load_file(head / "model.safetensors"), head / "more.safetensors")
    with pytest.raises(ValueError, match=r"a published head is one file, model.safetensors"):
        send(head)
    (head / "more.safetensors").unlink()
    nameless = make_head("eagle3", make_target(layers=8))
    nameless.save_pretrained(tmp_path / "nameless")
    with pytest.raises(ValueError, match="names no target"):
        send(tmp_path / "nameless", allow_unmeasured=True)
    from spechead.hub.export import export_head

    export_head(head, "vllm", tmp_path / "exported")
    with pytest.raises(ValueError, match=r"is in the layout 'eagle3'; publish spechead's own"):
        send(tmp_path / "exported")
    assert hub.requests == []


def test_paths_of_the_training_machine_are_pointed_out(hub, head):
    (head / "recipe.yaml").write_text("data:\n- /srv/answers.jsonl\noutput_dir: out\n")
    assert any("data: /srv/answers.jsonl" in note for note in send(head).notes)


def test_the_licence_of_an_earlier_card_is_kept(hub, head):
    send(head)
    folder = Path(snapshot_download(REPO))
    (head / "README.md").write_bytes((folder / "README.md").read_bytes())
    assert publish(REPO, head).difference.empty


def test_a_head_measured_on_prompts_it_was_trained_on_is_refused(hub, head):
    measured = results_for(load_head(head))
    results_file.save(replace(measured, digests={**measured.digests, "b": "0123456789ab"}), head / "results.json")
    with pytest.raises(ValueError, match=r"1 prompt\(s\) of training_prompts.txt, which the head was trained on: b\."):
        send(head)
    (head / "training_prompts.txt").unlink()  # a head from elsewhere says nothing of its training
    assert send(head).commit


def test_prompts_that_cannot_be_compared_with_those_of_training_are_refused(hub, head):
    measured = results_for(load_head(head))
    results_file.save(replace(measured, digests={"a": "00000000000a", "b": "00000000000b"}), head / "results.json")
    with pytest.raises(ValueError, match=r"has no digest of c, d, so it cannot be compared .*: measure again"):
        send(head)
    assert hub.requests == []


def test_figures_of_two_heads_of_one_kind_are_not_one_heads(hub, head):
    ours = load_head(head)
    target, mine = results_for(ours).models
    other = Model("other", "head", mine.kind, 17, "float32")
    results_file.save(results_for(ours, models=[target, mine, other]), head / "results.json")
    message = rf"2 heads of kind {mine.kind} \(head, other\).*: measure it without the others"
    with pytest.raises(ValueError, match=message):
        send(head)
    assert hub.requests == []
    medusa = replace(other, kind="spechead-medusa")
    results_file.save(results_for(ours, models=[target, mine, medusa]), head / "results.json")
    assert send(head).commit
