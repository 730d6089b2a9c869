"""Two draft trees under one root: what is dropped, what hangs where, and that the law stays the target's."""

from dataclasses import dataclass

import pytest
import torch

from spechead import Proposal
from spechead.proposers.merge import merge
from tests.lossless.enumeration import Enumeration, completed, distance, outcomes
from tests.lossless.test_law import AGAIN, DRAWN, POINT, Case, Model, drafts, proposal_of

from spechead import verify as verify_module  # isort: skip


def proposal(tokens: list[list[int]], parents: list[list[int]], real: list[list[bool]] | None = None) -> Proposal:
    flags = real or [[True] * len(row) for row in tokens]
    return Proposal(torch.tensor(tokens), torch.tensor(parents), torch.tensor(flags))


def tree(found: Proposal, row: int = 0) -> list[tuple[int, int]]:
    """Real nodes of a row as (parent, token), the root left out."""
    count = int(found.real[row].sum())
    pairs = zip(found.parents[row, 1:count].tolist(), found.tokens[row, 1:count].tolist(), strict=True)
    return list(pairs)


def test_equal_point_masses_are_one_node_with_both_subtrees() -> None:
    first = proposal([[9, 1, 2, 3]], [[-1, 0, 0, 1]])
    second = proposal([[9, 1, 4, 5]], [[-1, 0, 1, 2]])
    assert tree(merge(first, second)) == [(0, 1), (0, 2), (1, 3), (1, 4), (4, 5)]


def test_unequal_chains_lie_side_by_side() -> None:
    first, second = proposal([[9, 1]], [[-1, 0]]), proposal([[9, 2, 1]], [[-1, 0, 1]])
    assert tree(merge(first, second)) == [(0, 1), (0, 2), (2, 1)]


def test_rows_are_merged_on_their_own_and_padded() -> None:
    first = proposal([[9, 1], [8, 0]], [[-1, 0], [-1, 0]], [[True, True], [True, False]])
    second = proposal([[9, 1, 2], [8, 3, 4]], [[-1, 0, 1], [-1, 0, 1]])
    found = merge(first, second)
    assert tree(found, 0) == [(0, 1), (1, 2)]
    assert tree(found, 1) == [(0, 3), (1, 4)]
    assert found.draft_probs is None
    nodes = torch.arange(found.tokens.shape[1])
    assert bool((found.parents < nodes).all()), "parents come before their children, padding too"


def test_a_done_row_stays_done() -> None:
    first = proposal([[9, 1], [0, 0]], [[-1, 0], [-1, 0]], [[True, True], [False, False]])
    second = proposal([[9, 2], [0, 2]], [[-1, 0], [-1, 0]], [[True, True], [False, False]])
    found = merge(first, second)
    assert tree(found, 0) == [(0, 1), (0, 2)]
    assert not found.real[1].any()


def test_nodes_that_are_not_real_stay_so() -> None:
    first = proposal([[9, 1, 2, 3]], [[-1, 0, 0, 0]], [[True, False, True, True]])
    found = merge(first, proposal([[9, 1, 4]], [[-1, 0, 1]]))
    assert found.tokens[0].tolist() == [9, 1, 2, 3, 1, 4]
    assert found.real[0].tolist() == [True, False, True, True, True, True]
    assert found.parents[0].tolist() == [-1, 0, 0, 0, 0, 4]


def drawn(tokens: list[int], parents: list[int]) -> Proposal:
    laws = torch.full((1, len(tokens), 5), 0.2)
    return Proposal(
        torch.tensor([tokens]), torch.tensor([parents]), torch.ones(1, len(tokens), dtype=torch.bool), laws
    )


def test_a_drawn_token_is_never_dropped() -> None:
    twice = drawn([0, 1, 1], [-1, 0, 0])
    found = merge(twice, proposal([[0, 2]], [[-1, 0]]))
    assert tree(found) == [(0, 1), (0, 1), (0, 2)], "equal drawn siblings are two trials"


def test_a_point_mass_under_an_equal_drawn_sibling_is_dropped_and_its_child_hangs_there() -> None:
    found = merge(drawn([0, 1], [-1, 0]), proposal([[0, 1, 3]], [[-1, 0, 1]]))
    assert tree(found) == [(0, 1), (1, 3)]
    assert found.point_mass[0].tolist() == [False, False, True]
    assert found.draft_probs is not None
    assert found.draft_probs[0, 1].tolist() == pytest.approx([0.2] * 5)


def test_drawn_tokens_come_first() -> None:
    with pytest.raises(ValueError, match="pass the drawn tree first"):
        merge(proposal([[0, 1]], [[-1, 0]]), drawn([0, 1], [-1, 0]))


@dataclass(frozen=True)
class Both:
    """A draft of the first tree, and the copy that shares its root."""

    case: Case
    copy: tuple[int, ...]


def play(cases: list[Both], draws: Enumeration, target: Model) -> list[tuple[int, ...]]:
    """Merge and verify every case with the shipped code; returns the tokens each row emitted."""
    first, _ = proposal_of([each.case for each in cases])
    width = max(len(each.copy) for each in cases)
    tokens = torch.tensor([[0, *each.copy, *[0] * (width - len(each.copy))] for each in cases])
    real = torch.tensor([[True] * (1 + len(each.copy)) + [False] * (width - len(each.copy)) for each in cases])
    second = Proposal(tokens, torch.arange(-1, width).expand(len(cases), -1), real)
    both = merge(first, second)
    emitted: list[list[int]] = [[] for _ in cases]

    def prefix(row: int, node: int) -> tuple[int, ...]:
        return () if node == 0 else (*prefix(row, int(both.parents[row, node])), int(both.tokens[row, node]))

    def laws(nodes: torch.Tensor) -> torch.Tensor:
        return torch.stack([target(prefix(row, max(node, 0))) for row, node in enumerate(nodes.tolist())])

    def on_token(new: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        for row in live.nonzero().flatten().tolist():
            emitted[row].append(int(new[row]))
        return torch.zeros_like(live)

    verify_module.verify(both, laws, draws, on_token)
    return [tuple(row) for row in emitted]


TREES = {
    "a drawn chain": [(0, DRAWN), (1, DRAWN)],
    "drawn siblings": [(0, DRAWN), (0, DRAWN), (1, DRAWN)],
    "siblings with replacement": [(0, AGAIN), (0, AGAIN)],
    "a tree of point masses": [(0, POINT), (0, POINT), (1, POINT)],
}


@pytest.mark.parametrize("copied", [(0,), (1, 2), (2, 2, 0), (1, 0)])
@pytest.mark.parametrize("name", TREES)
def test_the_law_of_a_merged_tree_is_the_targets(name: str, copied: tuple[int, ...]) -> None:
    for seed in range(2):
        target, draft = Model(3, seed), Model(3, 100 + seed)
        cases = [Both(case, copied) for case in drafts(TREES[name], target, draft)]
        parts = [
            (tokens, each.case.weight * weight)
            for each, tokens, weight in outcomes(cases, lambda batch, draws, target=target: play(batch, draws, target))
        ]
        expected = completed([((), 1.0)], target, 3)
        assert distance(completed(parts, target, 3), expected) < 1e-9


def test_dropping_a_drawn_token_would_not_keep_the_law() -> None:
    """The reason why drawn tokens go first: a mutant that drops an equal drawn sibling is off."""
    target, draft = Model(4, 1), Model(4, 101)

    def dropped(cases: list[Case]) -> list[Case]:
        kept = []
        for case in cases:
            if case.tokens[1] == case.tokens[2]:  # drop the second trial, keep its weight
                case = Case(case.parents[:2], case.tokens[:2], case.laws[:2], case.target[:2], case.weight)
            kept.append(case)
        return kept

    def off(cases: list[Case]) -> float:
        both = [Both(case, (1,)) for case in cases]
        parts = [
            (tokens, each.case.weight * weight)
            for each, tokens, weight in outcomes(both, lambda batch, draws: play(batch, draws, target))
        ]
        return distance(completed(parts, target, 3), completed([((), 1.0)], target, 3))

    siblings = drafts([(0, AGAIN), (0, AGAIN)], target, draft)
    assert off(siblings) < 1e-9
    assert off(dropped(siblings)) > 1e-3
