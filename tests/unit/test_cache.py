"""spechead.cache: rows of their own lengths, on hand-made states and on real models."""

import pytest
import torch

from spechead import Acceptance, Proposal
from spechead.cache import BLOCK, RaggedCache
from spechead.target import Target
from tests import tiny

HEADS, DIM = 2, 3


def states(batch, nodes, start=0.0):
    """Distinct keys `[B, H, N, D]`: row, slot, head and channel can be read off."""
    return start + torch.arange(batch * HEADS * nodes * DIM, dtype=torch.float32).view(batch, HEADS, nodes, DIM)


def append(cache, keys, count=None, layer=0):
    cache.open(keys.shape[2])
    views = cache.write(layer, keys, -keys)
    cache.advance(keys.shape[2] if count is None else torch.tensor(count))
    return views


def keep(cache, *paths):
    path = torch.tensor(paths)
    length = (path >= 0).sum(1)
    cache.keep(Acceptance(path, length, torch.zeros_like(length), length))


def test_append_returns_the_prefix_and_the_new_slots():
    cache = RaggedCache(2, 8)
    first, second = states(2, 3), states(2, 2, 100.0)
    append(cache, first)
    keys, values = append(cache, second)
    assert torch.equal(keys, torch.cat([first, second], dim=2))
    assert torch.equal(values, -keys)
    assert cache.lengths.tolist() == [5, 5]


def test_ragged_rows_are_appended_each_behind_its_own_end():
    cache = RaggedCache(2, 8)
    first, second = states(2, 3), states(2, 2, 100.0)
    append(cache, first, count=[1, 3])
    keys, _ = append(cache, second)
    assert keys.shape[2] == 5  # the longest row's end and two nodes
    assert torch.equal(keys[0, :, :1], first[0, :, :1])
    assert torch.equal(keys[0, :, 1:3], second[0])
    assert torch.equal(keys[1, :, :3], first[1])
    assert torch.equal(keys[1, :, 3:5], second[1])


def test_buffers_are_zeros_where_nothing_was_written_also_after_growth():
    cache = RaggedCache(1, 4)
    append(cache, states(1, 3, 1.0))
    assert not cache.keys[0][:, :, 3:].any()
    append(cache, states(1, 6, 1.0))
    assert cache.keys[0].shape[2] == cache.capacity == BLOCK
    assert torch.equal(cache.keys[0][:, :, :3], states(1, 3, 1.0))
    assert not cache.keys[0][:, :, 9:].any()
    assert not cache.values[0][:, :, 9:].any()


def test_appending_within_the_capacity_keeps_the_buffers_address():
    cache = RaggedCache(2, 16)
    append(cache, states(2, 4), count=[2, 4])
    address = cache.keys[0].data_ptr()
    append(cache, states(2, 8))
    assert cache.keys[0].data_ptr() == address


def test_keep_moves_the_path_next_to_the_prefix():
    cache = RaggedCache(2, 16)
    first, nodes = states(2, 3), states(2, 5, 100.0)
    append(cache, first, count=[2, 3])
    cache.open(5)
    cache.write(0, nodes, -nodes)
    keep(cache, [0, 2, 4], [0, 3, -1])
    assert cache.lengths.tolist() == [5, 5]
    assert torch.equal(cache.keys[0][0, :, :5], torch.cat([first[0, :, :2], nodes[0, :, [0, 2, 4]]], dim=1))
    assert torch.equal(cache.keys[0][1, :, :5], torch.cat([first[1], nodes[1, :, [0, 3]]], dim=1))
    assert torch.equal(cache.values[0][0, :, :5], -cache.keys[0][0, :, :5])


def test_keep_reads_all_nodes_before_it_writes_any():
    cache = RaggedCache(1, 8)
    nodes = states(1, 4)
    cache.open(4)
    cache.write(0, nodes, nodes)
    keep(cache, [0, 2, 3])  # slot 2 is written from 3 and read for 1
    assert torch.equal(cache.keys[0][:, :, :3], nodes[:, :, [0, 2, 3]])


def test_keep_leaves_done_rows_as_they_are():
    cache = RaggedCache(2, 8)
    append(cache, states(2, 2))
    before = cache.keys[0][1, :, :2].clone()
    cache.open(3)
    cache.write(0, states(2, 3, 50.0), states(2, 3, 50.0))
    keep(cache, [0, 2, -1], [-1, -1, -1])
    assert cache.lengths.tolist() == [4, 2]
    assert torch.equal(cache.keys[0][1, :, :2], before)


def test_strip_moves_every_row_to_slot_zero():
    cache = RaggedCache(3, 8)
    keys = states(3, 4)
    append(cache, keys)
    cache.strip(torch.tensor([0, 1, 3]))
    assert cache.lengths.tolist() == [4, 3, 1]
    for row, pads in enumerate((0, 1, 3)):
        assert torch.equal(cache.keys[0][row, :, : 4 - pads], keys[row, :, pads:])
        assert torch.equal(cache.values[0][row, :, : 4 - pads], -keys[row, :, pads:])


def test_strip_without_pads_changes_nothing():
    cache = RaggedCache(2, 4)
    append(cache, states(2, 4))
    before = cache.keys[0].clone()
    cache.strip(torch.zeros(2, dtype=torch.long))
    assert torch.equal(cache.keys[0], before)
    assert cache.lengths.tolist() == [4, 4]


def test_truncate_only_ever_shortens():
    cache = RaggedCache(2, 8)
    append(cache, states(2, 4), count=[2, 4])
    cache.truncate(torch.tensor([3, 1]))
    assert cache.lengths.tolist() == [2, 1]


def test_select_rows_takes_rows_in_the_order_given():
    cache = RaggedCache(3, 8)
    keys = states(3, 4)
    append(cache, keys, count=[2, 3, 4])
    cache.select_rows(torch.tensor([2, 0]))
    assert cache.batch == 2
    assert cache.lengths.tolist() == [4, 2]
    assert torch.equal(cache.keys[0][0, :, :4], keys[2])
    assert torch.equal(cache.values[0][1, :, :2], -keys[0, :, :2])


@pytest.mark.parametrize(("mine", "theirs"), [(8, 8), (8, 300), (300, 8), (300, 500), (500, 300)])
def test_add_rows_joins_caches_of_any_capacity(mine, theirs):
    first, second = RaggedCache(1, mine), RaggedCache(2, theirs)
    append(first, states(1, 3))
    append(second, states(2, 5, 100.0), count=[5, 2])
    first.add_rows(second)
    assert first.lengths.tolist() == [3, 5, 2]
    assert first.keys[0].shape[2] == first.capacity >= max(mine, theirs)
    assert torch.equal(first.keys[0][0, :, :3], states(1, 3)[0])
    assert torch.equal(first.keys[0][1:, :, :5], states(2, 5, 100.0))
    append(first, states(3, 4, 900.0))  # and the joined cache goes on
    assert torch.equal(first.keys[0][2, :, 2:6], states(3, 4, 900.0)[2])


@pytest.mark.parametrize("written", ["mine", "theirs", "neither"])
def test_rows_join_a_cache_that_never_wrote(written):
    first, second = RaggedCache(2, 8), RaggedCache(1, 8)
    if written != "neither":
        rows = first if written == "mine" else second
        append(rows, states(rows.batch, 3, 1.0))
    first.add_rows(second)
    append(first, states(3, 2, 50.0))
    assert first.lengths.tolist() == {"mine": [5, 5, 2], "theirs": [2, 2, 5], "neither": [2, 2, 2]}[written]
    for row, end in enumerate(first.lengths.tolist()):
        assert torch.equal(first.keys[0][row, :, end - 2 : end], states(3, 2, 50.0)[row])


def test_nbytes_is_the_sum_of_the_buffers():
    cache = RaggedCache(2, 16)
    append(cache, states(2, 4))
    append(cache, states(2, 4), layer=1)
    assert cache.nbytes() == 2 * 2 * (2 * HEADS * 16 * DIM) * 4


@torch.no_grad()
@pytest.mark.parametrize("attention", tiny.ATTENTION)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_keeping_a_tree_path_equals_feeding_the_path(family, attention):
    """Two rows keep other paths of other trees, beyond the windows, and hold what a sequential run of each holds."""
    target = Target(tiny.tiny_model(family, attention))
    lengths, ids = torch.tensor([20, 14]), tiny.prompt_ids(2, 20, seed=3)
    pads = 20 - lengths
    mask = (torch.arange(20)[None, :] >= pads[:, None]).long()
    cache = target.new_cache(2, 64)
    target.prefill(ids, mask, cache)
    cache.strip(pads)
    tokens = tiny.prompt_ids(2, 6, seed=4)
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 1, 3, 3]])
    paths = torch.tensor([[0, 2, 4, 5], [0, 1, 3, 5]])
    forward = target.forward(Proposal(tokens, parents, torch.ones(2, 6, dtype=torch.bool)), cache)
    keep(cache, *paths.tolist())
    for row in range(2):
        alone = target.new_cache(1, 64)
        target.prefill(ids[row : row + 1, pads[row] :], None, alone)
        for depth, node in enumerate(paths[row]):
            step = target.forward(Proposal.root_only(tokens[row, node][None]), alone)
            alone.advance(1)
            torch.testing.assert_close(forward.logits[row, node], step.logits[0, 0], msg=f"row {row} depth {depth}")
        used = int(alone.lengths[0])
        assert used == int(cache.lengths[row])
        for layer in alone.keys:
            for name in ("keys", "values"):
                got, want = getattr(cache, name)[layer][row, :, :used], getattr(alone, name)[layer][0, :, :used]
                torch.testing.assert_close(got, want)
