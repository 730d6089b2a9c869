"""spechead.fresh: features gathered over steps, ragged rows, until they are taken."""

import pytest
import torch

from spechead.fresh import Fresh

HIDDEN = 2


def part(*rows, width):
    """States `[B, A, H]` from lists of numbers a row, padded with -1, and their lengths."""
    padded = [list(row) + [-1.0] * (width - len(row)) for row in rows]
    states = torch.tensor(padded)[..., None].expand(-1, -1, HIDDEN)
    return states, torch.tensor([len(row) for row in rows])


def fill(fresh, *rows, width):
    states, length = part(*rows, width=width)
    fresh.append({tap: states + 100 * tap for tap in fresh.taps}, length)


def counted(taken, tap=0):
    states, length = taken
    return [states[tap][row, :n, 0].sub(100 * tap).tolist() for row, n in enumerate(length.tolist())]


def test_one_step_is_returned_as_it_came():
    fresh = Fresh((0, 3))
    fill(fresh, [1, 2], [3], width=3)
    states, length = fresh.take()
    assert length.tolist() == [2, 1]
    assert sorted(states) == [0, 3]
    assert counted((states, length)) == [[1, 2], [3]]
    assert counted((states, length), 3) == [[1, 2], [3]]


def test_several_steps_are_joined_row_by_row_in_order():
    fresh = Fresh((0,))
    fill(fresh, [1], [5, 6, 7], width=3)
    fill(fresh, [2, 3], [], width=2)
    fill(fresh, [4], [8], width=4)
    states, length = fresh.take()
    assert length.tolist() == [4, 4]
    assert counted((states, length)) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert states[0].shape == (2, 4, HIDDEN)


def test_taking_empties_the_store():
    fresh = Fresh((0,))
    assert fresh.empty
    fill(fresh, [1], width=1)
    assert not fresh.empty
    fresh.take()
    assert fresh.empty
    with pytest.raises(ValueError, match="take once a step"):
        fresh.take()
    fill(fresh, [2], width=1)
    assert counted(fresh.take()) == [[2]]


def test_only_the_stores_own_taps_are_kept():
    fresh = Fresh((1,))
    states, length = part([1], width=1)
    fresh.append({0: states, 1: states, 2: states}, length)
    assert list(fresh.take()[0]) == [1]


def test_rows_leave():
    fresh = Fresh((0,))
    fill(fresh, [1], [2, 3], [4], width=2)
    fill(fresh, [5, 6], [7], [8], width=2)
    fresh.select_rows(torch.tensor([2, 0]))
    assert counted(fresh.take()) == [[4, 8], [1, 5, 6]]


@pytest.mark.parametrize("steps", [1, 2])
def test_rows_join(steps):
    fresh, other = Fresh((0, 2)), Fresh((0, 2))
    fill(fresh, [1, 2], width=4)
    fill(other, [9], [7, 8], width=2)
    for _ in range(steps - 1):
        fill(fresh, [3], width=1)
        fill(other, [], [6, 5, 4], width=3)
    fresh.add_rows(other)
    joined = fresh.take()
    expected = [[1, 2], [9], [7, 8]] if steps == 1 else [[1, 2, 3], [9], [7, 8, 6, 5, 4]]
    assert counted(joined) == expected
    assert counted(joined, 2) == expected


def test_what_waits_is_counted_through_all_changes():
    fresh, other = Fresh((0,)), Fresh((0,))
    assert fresh.waiting == 0
    fill(fresh, [1], [2, 3], width=2)
    fill(fresh, [4, 5], [], width=2)
    assert fresh.waiting == 5
    fill(other, [7, 8, 9], width=3)
    fresh.add_rows(other)
    assert fresh.waiting == 8
    fresh.select_rows(torch.tensor([0, 2]))
    assert fresh.waiting == 3 + 3
    fresh.take()
    assert fresh.waiting == 0
    fresh.select_rows(torch.tensor([1]))
    assert fresh.waiting == 0
