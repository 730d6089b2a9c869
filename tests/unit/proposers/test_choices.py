"""spechead.proposers.choices: the published trees, trees given by a caller, and the builder of the best tree."""

import itertools
from collections import Counter
from math import prod

import pytest

from spechead.proposers.choices import EAGLE_25, MEDUSA_63, best_choices, likeliest, static_choices
from spechead.tree import choices_to_parents

NAMED = {"chain": [], "static": EAGLE_25}


@pytest.mark.parametrize(("tree", "by_depth"), [(MEDUSA_63, [10, 28, 23, 2]), (EAGLE_25, [4, 8, 8, 3, 2])])
def test_the_published_trees_are_trees_of_their_published_shape(tree, by_depth):
    parents, depths, ranks = choices_to_parents(tree)
    counts = Counter(depths[1:])
    assert [counts[depth] for depth in sorted(counts)] == by_depth
    assert len(parents) == sum(by_depth) + 1
    for parent in set(parents) - {-1}:  # no rank is skipped
        below = [rank for rank, above in zip(ranks, parents, strict=True) if above == parent]
        assert sorted(below) == list(range(len(below)))


def trees(depth, ranks, size):
    """Every tree of `size` nodes within a depth and a number of ranks."""
    paths = [path for length in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=length)]
    for nodes in itertools.combinations(paths, size):
        chosen = set(nodes)
        if all(len(path) == 1 or path[:-1] in chosen for path in nodes):
            yield nodes


def expected_kept(tree, accuracies):
    """Expected kept tokens of a tree: the chance of every node's path, ranks of a depth excluding each other."""
    return sum(prod(accuracies[depth][rank] for depth, rank in enumerate(path)) for path in tree)


ACCURACIES = {
    "falling": [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.05]],
    "flat first depth": [[0.3, 0.3, 0.3], [0.9, 0.05, 0.01], [0.9, 0.05, 0.0]],
    "not in order": [[0.1, 0.6, 0.2], [0.0, 0.3, 0.5], [0.0, 0.0, 0.9]],
    "two ranks": [[0.7, 0.3], [0.6, 0.4], [0.5, 0.5]],
    "sure": [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]],
}


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("name", ACCURACIES)
def test_no_tree_of_its_size_is_better(name, size):
    accuracies = ACCURACIES[name]
    best = best_choices(accuracies, size)
    choices_to_parents(best)
    assert len(best) == size
    values = [expected_kept(tree, accuracies) for tree in trees(3, len(accuracies[0]), size)]
    assert expected_kept(best, accuracies) == pytest.approx(max(values), abs=1e-12)
    assert min(values) < max(values)


def test_the_best_tree_stops_where_there_are_no_more_nodes():
    assert best_choices([[0.5, 0.2], [0.1]], 100) == [(0,), (1,), (0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("accuracies", "size", "message"),
    [
        ([], 3, "at least one depth"),
        ([[]], 3, "at least one depth"),
        ([[0.5]], 0, "size=0"),
        ([[1.5]], 1, "between 0 and 1"),
    ],
)
def test_figures_that_give_no_tree_are_refused(accuracies, size, message):
    with pytest.raises(ValueError, match=message):
        best_choices(accuracies, size)


@pytest.mark.parametrize("size", [1, 7, 20, 62, 63, 100])
def test_a_smaller_published_tree_is_a_tree_and_keeps_depth(size):
    kept = likeliest(MEDUSA_63, size)
    assert len(kept) == min(size, 63)
    parents, depths, _ = choices_to_parents(kept)
    assert len(parents) == len(kept) + 1
    if size >= 7:
        assert max(depths) > 2
    assert likeliest(MEDUSA_63, None) == MEDUSA_63


def test_a_tree_of_no_nodes_is_refused():
    with pytest.raises(ValueError, match="tree_size=0"):
        likeliest(MEDUSA_63, 0)


def test_trees_are_given_by_name_or_as_paths_in_any_order():
    assert static_choices("static", NAMED) == EAGLE_25
    assert static_choices([[0, 1], [1], [0]], NAMED) == [(0,), (1,), (0, 1)]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("bush", "one of chain, static"),
        ([], "drafts nothing"),
        ([[0], [1, 0]], "no parent"),
        ([[0], [0]], "given twice"),
    ],
)
def test_what_is_no_tree_is_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        static_choices(tree, NAMED)
