"""Training and decoding of EAGLE heads are one function: same logits, same alignment, what was learnt is drafted."""

import pytest
import torch

from spechead import EagleProposer
from spechead.decoding import speculative_decode
from spechead.proposers.sprout import Sprout
from spechead.target import Target
from spechead.training.batch import chains
from spechead.training.eagle import gather_entries, unroll
from tests import tiny
from tests.running import new_tokens, plain_greedy, start
from tests.tiny_heads import DEPTHS, features, head_for, make_head, overfit, own_texts
from tests.unit.proposers.described import row_text

KINDS = pytest.mark.parametrize("kind", ["eagle", "eagle3"])


def trained_outputs(head, model, ids):
    """Outputs of the training forward at every entry and depth `[B, N, J, H]` of whole texts `[B, L]`."""
    states = features(head, model, ids)
    gathered = gather_entries(chains(torch.ones_like(ids, dtype=torch.bool), DEPTHS))
    outputs = unroll(head, ids[:, 1:-1], states[:, :-2], gathered)
    entries = torch.arange(ids.shape[1] - 2).expand(len(ids), -1)
    assert torch.equal(gathered.take(entries), entries)  # all of them are there, in order
    return outputs, gathered.depths


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
@KINDS
def test_a_head_that_has_learnt_a_text_emits_k_plus_one_tokens_a_step_to_its_end(kind, tree):
    model = tiny.tiny_model("llama")
    prompt = tiny.prompt_ids(1, 8)[0].tolist()
    steps = 5
    text = prompt + plain_greedy(model, prompt, 1 + steps * (DEPTHS + 1) + 1)
    kept = sorted({*text, 40, 41})
    head = make_head(kind, model, std=0.02, **({"draft_vocab_size": len(kept)} if kind == "eagle3" else {}))
    if kind == "eagle3":
        head.set_draft_vocab(torch.tensor(kept))
        assert head.pruned
    overfit(head, model, torch.tensor([text]))
    proposer = EagleProposer(head, num_draft_tokens=DEPTHS, tree=tree)
    with torch.no_grad():
        context = start(Target(model), proposer, [prompt], 1 + steps * (DEPTHS + 1))
        speculative_decode(context)
    assert new_tokens(context, 0) == text[len(prompt) : -1]
    assert context.stats.emitted_per_step[0] == [(DEPTHS + 1, DEPTHS)] * steps
    assert context.stats.steps == steps


@pytest.mark.parametrize("trained", [True, False], ids=["overfitted", "random"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@KINDS
def test_decode_time_logits_are_train_time_logits(kind, family, trained, monkeypatch):
    model = tiny.fresh_model(family).double()
    head = head_for(model, family, kind, trained)
    seen = []  # (position of the last true entry [B], depth, logits [B, D])
    original = Sprout.logits

    def recording(sprout, hidden):
        logits = original(sprout, hidden)
        seen.append((sprout.position.tolist(), sprout.fed.shape[1], logits[:, 0]))
        return logits

    monkeypatch.setattr(Sprout, "logits", recording)
    prompts = [tiny.prompt_ids(1, width, seed=width)[0].tolist() for width in (10, 6)]
    if trained:  # texts that the head knows, so that whole chains are kept
        prompts = [text[:width].tolist() for text, width in zip(own_texts(model, 2), (12, 9), strict=True)]
    with torch.no_grad():
        proposer = EagleProposer(head, num_draft_tokens=DEPTHS, tree="chain")
        context = start(Target(model), proposer, prompts, 20)
        speculative_decode(context)
    monkeypatch.undo()
    compared = [0] * DEPTHS
    for row in range(2):
        text = row_text(context, row)
        with torch.no_grad():
            outputs, reached = trained_outputs(head, model, torch.tensor([text]))
            logits = head.logits(outputs[0])  # [N, J, D]
        drafted_right = True
        for positions, depth, decoded in seen:
            entry = positions[row] + depth
            drafted_right = drafted_right or depth == 0
            if not drafted_right or entry >= len(text) - 2 or not reached[0, entry, depth]:
                continue
            torch.testing.assert_close(decoded[row], logits[entry, depth], atol=1e-9, rtol=1e-9)
            compared[depth] += 1
            best = decoded[row].argmax()
            token = int(head.draft_to_target[best]) if kind == "eagle3" else int(best)
            drafted_right = token == text[entry + 2]
    assert compared[0] > 6
    assert all(compared) if trained else sum(compared) > 10


@KINDS
def test_later_ids_change_no_earlier_prediction_by_a_bit(kind):
    model = tiny.tiny_model("llama")
    head = make_head(kind, model)
    ids = own_texts(model, 2)
    place = 20
    changed = ids.clone()
    changed[:, place:] = (ids[:, place:] + 1) % tiny.VOCAB
    with torch.no_grad():
        before, _ = trained_outputs(head, model, ids)
        after, _ = trained_outputs(head, model, changed)
        logits = head.logits(before), head.logits(after)
    known = place - 1  # entry i holds token i + 1
    assert torch.equal(before[:, :known], after[:, :known])
    assert torch.equal(logits[0][:, :known], logits[1][:, :known])
    assert not torch.isclose(before[:, known:], after[:, known:]).all(-1).any()


def test_later_ids_change_no_earlier_guess_of_medusa_by_a_bit():
    model = tiny.tiny_model("llama")
    heads = make_head("medusa", model)
    ids = own_texts(model, 2)
    changed = ids.clone()
    changed[:, 20:] = (ids[:, 20:] + 1) % tiny.VOCAB
    with torch.no_grad():
        before, after = heads(features(heads, model, ids)), heads(features(heads, model, changed))
    assert torch.equal(before[:, :, :20], after[:, :, :20])
    assert not torch.isclose(before[:, :, 20:], after[:, :, 20:]).all(-1).any()
