"""Training of EAGLE heads equals decoding: same pairs, positions, masks; masks are on the predicted tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from spechead.training.batch import chains, collate
from spechead.training.dataset import OnlineFeatures
from spechead.training.eagle import Eagle3Objective, EagleObjective, gather_entries, unroll
from spechead.training.ends import TargetEnds


def batch_of(rows, target, ends, taps):
    batch = collate(rows)
    batch.pop("numbers")
    return OnlineFeatures(target, ends)(batch, taps)


def drafted(head, row, states, root_entry, depths):
    """Draft along the row's own tokens from entry `root_entry` the way decoding does: cached true entries, then a
    chain."""
    ids = torch.tensor(row["input_ids"])[None]
    features = head.fuse(states[None, : root_entry + 1].flatten(2))
    positions = torch.arange(root_entry + 1)[None]
    cache = DynamicCache()
    hidden = head(ids[:, 1 : root_entry + 2], features, positions, cache=cache)[:, -1:]
    outputs = [hidden]
    for depth in range(1, depths):
        entry = root_entry + depth
        hidden = head(ids[:, entry + 1 : entry + 2], hidden, torch.tensor([[entry]]), cache=cache)
        outputs.append(hidden)
    return torch.cat(outputs, dim=1)[0]


@pytest.mark.parametrize("layers", [1, 2])
def test_the_unrolled_outputs_are_those_of_a_decode_style_chain(target, ends, eagle3, rows, layers):
    from spechead.heads.config import Eagle3Config
    from spechead.heads.eagle3 import Eagle3Head

    if layers == 2:
        config = Eagle3Config.for_target(
            target.config, draft_vocab_size=24, initializer_range=0.2, num_hidden_layers=2
        )
        eagle3 = Eagle3Head(config).bind(target, match_dtype=False)
    depths = 4
    objective = Eagle3Objective(eagle3, ends, depths)
    batch = batch_of(rows, target, ends, objective.taps)
    masks = chains(batch["supervised"], depths)
    gathered = gather_entries(masks)
    outputs = unroll(eagle3, batch["input_ids"][:, 1:-1], batch["states"][:, :-2, :-1].flatten(2), gathered)
    compared = 0
    for place, row in enumerate(rows):
        states = batch["states"][place, :, :-1]
        for slot, entry in enumerate(gathered.entries[place].tolist()):
            for depth in range(depths):
                if gathered.real[place, slot] and gathered.depths[place, slot, depth]:
                    chain = drafted(eagle3, row, states, entry - depth, depth + 1)
                    torch.testing.assert_close(outputs[place, slot, depth], chain[depth], atol=2e-5, rtol=1e-4)
                    compared += 1
    assert compared == int(masks.sum()) > 60


def test_the_first_pair_after_the_prompt_is_trained_and_none_before():
    supervised = torch.tensor([[False, False, False, True, True, True, True]])
    masks = chains(supervised, 3)[0]
    # entry 2 = (feature of the prompt's last token, first answer token) -> second answer token
    assert masks[:, 0].tolist() == [False, False, True, True, True]
    assert masks[:, 1].tolist() == [False, False, False, True, True]
    assert masks[:, 2].tolist() == [False, False, False, False, True]


def test_chains_do_not_cross_turns():
    supervised = torch.tensor([[False, True, True, True, False, True, True, True]])
    assert chains(supervised, 2)[0, :, 0].tolist() == [True, True, False, False, True, True]
    assert chains(supervised, 2)[0, :, 1].tolist() == [False, True, False, False, False, True]


def test_later_tokens_change_no_earlier_prediction(target, ends, eagle3, rows):
    objective = Eagle3Objective(eagle3, ends, 3)
    row = rows[2]
    changed = {**row, "input_ids": [*row["input_ids"][:8], *[(token + 1) % 64 for token in row["input_ids"][8:]]]}
    outputs = []
    for version in (row, changed):
        batch = batch_of([version], target, ends, objective.taps)
        gathered = gather_entries(chains(batch["supervised"], 3))
        features = batch["states"][:, :-2, :-1].flatten(2)
        outputs.append((unroll(eagle3, batch["input_ids"][:, 1:-1], features, gathered), gathered.entries[0]))
    before = outputs[0][1] + 1 < 8  # entries whose own token i+1 is unchanged
    assert 0 < int(before.sum()) < len(before)
    torch.testing.assert_close(outputs[0][0][0][before], outputs[1][0][0][before])
    assert not torch.allclose(outputs[0][0][0][~before], outputs[1][0][0][~before])


def test_gradients_reach_every_parameter_of_the_head_and_nothing_else(target, ends, eagle3, rows):
    objective = Eagle3Objective(eagle3, ends, 3)
    result = objective(**batch_of(rows, target, ends, objective.taps))
    result["loss"].backward()
    assert {
        name for name, weight in eagle3.named_parameters() if weight.grad is None or not weight.grad.any()
    } == set()
    assert all(weight.grad is None for weight in target.parameters())
    assert {name for name, _ in objective.named_parameters()} == {
        f"head.{name}" for name, _ in eagle3.named_parameters()
    }


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_batch_without_supervised_tokens_gives_zero_gradients(target, ends, eagle, eagle3, kind):
    objective = Eagle3Objective(eagle3, ends, 3) if kind == "eagle3" else EagleObjective(eagle, ends)
    result = objective(**batch_of([], target, ends, objective.taps))
    result["loss"].backward()
    assert result["loss"].item() == 0.0
    assert result["entries"].item() == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in objective.parameters())


def test_one_sequence_is_learned_and_then_drafted(target, ends, eagle3, rows):
    row = rows[2]
    objective = Eagle3Objective(eagle3, ends, 3)
    batch = batch_of([row], target, ends, objective.taps)
    optimizer = torch.optim.AdamW(eagle3.parameters(), lr=1e-2)
    first = None
    for _ in range(200):
        result = objective(**batch)
        first = first if first is not None else result["loss"].item()
        optimizer.zero_grad()
        result["loss"].backward()
        optimizer.step()
    with torch.no_grad():
        result = objective(**batch)
        assert result["loss"].item() < 0.01 * first
        entry = row["spans"][0][0] - 1
        chain = drafted(eagle3, row, batch["states"][0, :, :-1], entry, 3)
        guesses = eagle3.draft_to_target[eagle3.logits(chain[None]).argmax(-1)][0]
        with torch.no_grad():
            logits = target(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        kept = logits[entry + 1 : entry + 4, eagle3.draft_to_target].argmax(-1)
        assert guesses.tolist() == eagle3.draft_to_target[kept].tolist()


def test_fewer_depths_are_trained_for_a_while_and_all_are_evaluated(target, ends, eagle3, rows):
    objective = Eagle3Objective(eagle3, ends, 3)
    batch = batch_of(rows, target, ends, objective.taps)
    whole = objective(**batch)["loss_by_depth"]
    objective.trained_depths = 1
    outputs = objective(**batch)
    torch.testing.assert_close(outputs["loss_by_depth"], whole[:1])
    torch.testing.assert_close(outputs["loss"], whole[0])
    with torch.no_grad():
        torch.testing.assert_close(objective.eval()(**batch)["loss_by_depth"], whole)


def test_eagle1_reads_noisy_features_only_in_training(target, ends, eagle, rows):
    objective = EagleObjective(eagle, ends, noise=0.5)
    batch = batch_of(rows, target, ends, objective.taps)
    torch.manual_seed(0)
    noisy = [objective(**batch)["loss"].item() for _ in range(2)]
    objective.eval()
    quiet = [objective(**batch)["loss"].item() for _ in range(2)]
    assert noisy[0] != noisy[1]
    assert quiet[0] == quiet[1]


def test_a_sampled_softmax_has_the_gradient_of_the_whole_one_on_average(target, ends, eagle3, rows):
    whole = Eagle3Objective(eagle3, ends, 2)
    batch = batch_of(rows, target, ends, whole.taps)

    def gradient(objective):
        eagle3.zero_grad()
        objective(**batch)["loss"].backward()
        return torch.cat([weight.grad.flatten() for weight in eagle3.parameters()])

    wanted = gradient(whole)
    sampled = Eagle3Objective(eagle3, ends, 2, kept=range(0, 24, 4))
    torch.manual_seed(0)
    found = torch.stack([gradient(sampled) for _ in range(40)])
    assert not torch.equal(found[0], found[1])  # other rows each time
    assert torch.nn.functional.cosine_similarity(found.mean(0), wanted, dim=0) > 0.97
    with torch.no_grad():
        assert torch.equal(sampled(**batch)["loss"], whole(**batch)["loss"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_rows_that_are_always_kept_may_lie_on_the_device(target, eagle3, rows):
    device = torch.accelerator.current_accelerator()
    target.to(device)
    ends = TargetEnds.of(target)
    kept = eagle3.bind(target, match_dtype=False).target_to_draft[torch.arange(0, 8, 2)]
    assert kept.device.type == device.type
    objective = Eagle3Objective(eagle3, ends, 2, kept=kept).to(device)
    batch = {name: part.to(device) for name, part in collate(rows).items() if name != "numbers"}
    loss = objective(**OnlineFeatures(target, ends)(batch, objective.taps))["loss"]
    loss.backward()
    assert torch.isfinite(loss)
