"""spechead.tree: choices to parents, parents to ancestors and depths."""

import itertools

import pytest
import torch

from spechead.tree import ancestors, chain_parents, choices_to_parents


def test_chain_parents_point_to_the_node_before():
    parents = chain_parents(2, 4)
    assert parents.tolist() == [[-1, 0, 1, 2]] * 2


def test_a_chain_of_one_node_is_the_root():
    assert chain_parents(3, 1).tolist() == [[-1]] * 3


def test_choices_come_out_parents_first_and_siblings_by_rank():
    parents, depths, ranks = choices_to_parents([(0, 1), (1,), (0,), (0, 0), (1, 0), (0, 0, 2)])
    assert parents == [-1, 0, 0, 1, 1, 2, 3]
    assert depths == [0, 1, 1, 2, 2, 2, 3]
    assert ranks == [0, 0, 1, 0, 1, 0, 2]


def test_the_order_of_the_choices_does_not_matter():
    choices = [(0,), (1,), (0, 0), (0, 1)]
    results = [choices_to_parents(order) for order in itertools.permutations(choices)]
    assert all(result == results[0] for result in results)


def test_no_choices_leave_the_root():
    assert choices_to_parents([]) == ([-1], [0], [0])


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ([()], "non-empty path"),
        ([(0,), (-1,)], "ranks >= 0"),
        ([(0,), (0,)], "given twice"),
        ([(0,), (1, 0)], r"has no parent \(1,\)"),
        ([(0, 0)], r"has no parent \(0,\)"),
    ],
)
def test_bad_choices_are_refused_by_name(choices, complaint):
    with pytest.raises(ValueError, match=complaint):
        choices_to_parents(choices)


def climb(parents, node):
    """The node and its ancestors, walked one by one."""
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_ancestors_equal_a_walk_to_the_root(seed):
    generator = torch.Generator().manual_seed(seed)
    nodes = 12
    rows = [[-1] + [int(torch.randint(0, n, (), generator=generator)) for n in range(1, nodes)] for _ in range(3)]
    mask, depths = ancestors(torch.tensor(rows), nodes - 1)
    for row, parents in enumerate(rows):
        for node in range(nodes):
            above = climb(parents, node)
            assert set(mask[row, node].nonzero().flatten().tolist()) == above
            assert int(depths[row, node]) == len(above) - 1


def test_rows_keep_their_own_trees():
    mask, depths = ancestors(torch.tensor([[-1, 0, 1], [-1, 0, 0]]), 2)
    assert depths.tolist() == [[0, 1, 2], [0, 1, 1]]
    assert mask[0, 2].tolist() == [True, True, True]
    assert mask[1, 2].tolist() == [True, False, True]


def test_ancestors_leave_the_parents_as_they_were():
    parents = torch.tensor([[-1, 0, 1, 1]])
    ancestors(parents, 2)
    assert parents.tolist() == [[-1, 0, 1, 1]]
