"""spechead.proposal: the record of what was drafted."""

import pytest
import torch

from spechead import Proposal
from spechead.tree import chain_parents


def tree(parents, real=None, draft_probs=None, tokens=None):
    parents = torch.tensor(parents)
    real = torch.ones_like(parents, dtype=torch.bool) if real is None else torch.tensor(real)
    tokens = torch.arange(parents.numel()).view_as(parents) if tokens is None else torch.tensor(tokens)
    return Proposal(tokens, parents, real, draft_probs)


def test_chain_puts_the_root_first_and_drops_columns_that_no_row_uses():
    real = torch.tensor([[True, True, False, False], [True, False, False, False]])
    proposal = Proposal.chain(torch.tensor([7, 8]), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), real)
    assert proposal.tokens.tolist() == [[7, 1, 2], [8, 5, 6]]
    assert proposal.parents.tolist() == [[-1, 0, 1]] * 2
    assert proposal.real.tolist() == [[True, True, True], [True, True, False]]
    assert proposal.max_depth == 2
    assert proposal.draft_probs is None


def test_chain_gives_done_rows_no_real_node():
    real = torch.ones(2, 2, dtype=torch.bool)
    proposal = Proposal.chain(torch.tensor([-1, 3]), torch.tensor([[1, 2], [4, 5]]), real)
    assert proposal.real.tolist() == [[False] * 3, [True] * 3]
    assert int(proposal.tokens.min()) >= 0


def test_chain_shifts_the_laws_behind_the_root():
    laws = torch.rand(1, 2, 5)
    proposal = Proposal.chain(torch.tensor([0]), torch.tensor([[1, 2]]), torch.ones(1, 2, dtype=torch.bool), laws)
    assert proposal.draft_probs.shape == (1, 3, 5)
    assert torch.equal(proposal.draft_probs[:, 1:], laws)
    assert not proposal.draft_probs[:, 0].any()


def test_root_only_drafts_nothing():
    proposal = Proposal.root_only(torch.tensor([4, -1]))
    assert proposal.tokens.shape == (2, 1)
    assert proposal.real.tolist() == [[True], [False]]
    assert proposal.max_depth == 0
    assert proposal.draft_probs is None


def test_a_chain_whose_rows_draft_nothing_is_a_root():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    proposal = Proposal.chain(torch.tensor([4, 5]), torch.ones(2, 3, dtype=torch.long), nothing, torch.rand(2, 3, 6))
    assert proposal.tokens.shape == (2, 1)
    assert proposal.draft_probs is None


def test_max_depth_is_derived_when_not_given():
    assert tree([[-1, 0, 0, 1, 3]]).max_depth == 3
    assert tree([[-1, 0, 0], [-1, 0, 1]]).max_depth == 2


def test_tree_mask_and_depths_follow_the_parents():
    proposal = tree([[-1, 0, 0, 1]])
    assert proposal.depths.tolist() == [[0, 1, 1, 2]]
    assert proposal.tree_mask[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


def test_is_chain_asks_every_real_node_of_every_row():
    assert Proposal(torch.zeros(2, 4).long(), chain_parents(2, 4), torch.ones(2, 4, dtype=torch.bool)).is_chain
    assert Proposal.root_only(torch.tensor([1])).is_chain
    assert not tree([[-1, 0, 0]]).is_chain
    # one row's chain as deep as the proposal is wide says nothing about another row's tree
    assert not tree([[-1, 0, 1], [-1, 0, 0]]).is_chain
    assert tree([[-1, 0, 1], [-1, 0, 0]], [[True] * 3, [True, True, False]]).is_chain


def test_point_mass_without_laws_is_every_node():
    assert tree([[-1, 0, 0]]).point_mass.all()


def test_point_mass_is_a_law_that_gives_its_token_all():
    laws = torch.tensor([[[0.0, 0, 0], [0, 1, 0], [0.5, 0, 0.5], [1, 0, 0]]])
    proposal = tree([[-1, 0, 0, 0]], draft_probs=laws, tokens=[[0, 1, 2, 1]])
    assert proposal.point_mass[0, 1:].tolist() == [True, False, False]


@pytest.mark.parametrize("field", ["tokens", "parents", "real"])
def test_unequal_shapes_are_refused(field):
    fields = {"tokens": torch.zeros(1, 3).long(), "parents": chain_parents(1, 3), "real": torch.ones(1, 3).bool()}
    fields[field] = fields[field][:, :2]
    with pytest.raises(ValueError, match=r"one shape \[B, N\]"):
        Proposal(**fields)


def test_laws_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"draft_probs must be \[B, N, V\]"):
        tree([[-1, 0, 0]], draft_probs=torch.rand(1, 2, 5))
