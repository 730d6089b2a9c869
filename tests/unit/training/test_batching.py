"""Batches are a function of seed and epoch, cover every row once, and are shared out evenly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spechead.training.batch import collate, supervised_entries
from spechead.training.batching import LengthBatches
from spechead.training.trainer import HeadTrainer

LENGTHS = [5, 9, 30, 31, 12, 18, 7, 40, 22, 22, 3, 16, 17, 33, 8, 21]


def test_every_row_once_within_the_budget_in_another_order_each_epoch():
    batches = LengthBatches(LENGTHS, 64, seed=1)
    orders = []
    for epoch in range(3):
        batches.set_epoch(epoch)
        made = list(batches)
        assert sorted(row for batch in made for row in batch) == list(range(len(LENGTHS)))
        assert all(max(LENGTHS[row] for row in batch) * len(batch) <= 64 for batch in made)
        assert len(made) == len(batches)
        orders.append(made)
    assert orders[0] != orders[1] != orders[2]
    again = LengthBatches(LENGTHS, 64, seed=1)
    again.set_epoch(2)
    assert list(again) == orders[2]


def test_a_batch_holds_no_more_rows_than_it_may():
    for rows in (1, 2, 3):
        made = list(LengthBatches(LENGTHS, 64, seed=1, rows_per_batch=rows))
        assert sorted(row for batch in made for row in batch) == list(range(len(LENGTHS)))
        assert max(map(len, made)) == rows
        assert all(max(LENGTHS[row] for row in batch) * len(batch) <= 64 for batch in made)
    assert max(map(len, LengthBatches(LENGTHS, 64, seed=1))) > 3


def test_processes_share_the_same_global_batches_and_get_equally_many():
    alone = LengthBatches(LENGTHS, 64, seed=1, multiple=6)
    shared = [LengthBatches(LENGTHS, 64, seed=1, multiple=6, rank=rank, world_size=2) for rank in range(2)]
    whole, parts = list(alone), [list(part) for part in shared]
    assert len(whole) % 6 == 0
    assert [len(part) for part in parts] == [len(whole) // 2] * 2
    assert [batch for pair in zip(*parts, strict=True) for batch in pair] == whole
    assert any(not batch for batch in whole)  # filled up with empty ones


def test_a_row_that_fits_no_batch_and_uneven_shares_are_refused():
    with pytest.raises(ValueError, match="longest row"):
        LengthBatches([5, 100], 64, seed=0)
    with pytest.raises(ValueError, match="multiple"):
        LengthBatches(LENGTHS, 64, seed=0, multiple=1, world_size=2)


@pytest.mark.parametrize("lengths", [([5, 100], [5]), ([5], [5, 100])])
def test_a_row_that_fits_no_batch_is_refused_before_training_whichever_side_it_is_on(lengths):
    train, held_out = (SimpleNamespace(lengths=some) for some in lengths)
    with pytest.raises(ValueError, match=r"tokens_per_batch=64 is less than the longest row \(100 tokens\)"):
        HeadTrainer(None, None, train, held_out, None, tokens_per_batch=64)


def test_an_empty_batch_has_nothing_supervised():
    batch = collate([])
    assert supervised_entries(batch["supervised"]) == 0
    assert batch["numbers"].tolist() == [-1]


def test_supervised_entries_count_tokens_that_follow_an_answer_token(rows):
    batch = collate(rows)
    assert batch["input_ids"].shape == batch["supervised"].shape
    expected = sum(stop - start - 1 for row in rows for start, stop in row["spans"])
    assert int(supervised_entries(batch["supervised"])) == expected
    short = collate([{"number": 0, "input_ids": [1, 2], "spans": [[1, 2]]}])
    assert short["input_ids"].shape == (1, 3)
    assert torch.equal(short["supervised"], torch.tensor([[False, True, False]]))
