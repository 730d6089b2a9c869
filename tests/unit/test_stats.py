"""spechead.stats: every figure counted on steps worked out by hand."""

import json

import pytest
import torch

from spechead import Acceptance, DecodeStats, Proposal


def acceptance(paths, kept, next_token=None):
    path = torch.tensor(paths)
    length = (path >= 0).sum(1)
    return Acceptance(path, length, torch.zeros_like(length), torch.tensor(kept))


def chain(batch, drafted, real=None):
    tokens = torch.ones(batch, drafted, dtype=torch.long)
    real = torch.ones(batch, drafted, dtype=torch.bool) if real is None else torch.tensor(real)
    root = torch.where(real.any(1) | (torch.arange(batch) == 0), 1, -1)
    return Proposal.chain(root, tokens, real)


def new_stats(batch=1):
    return DecodeStats(emitted_per_step=[[] for _ in range(batch)])


def test_nothing_yet_is_zero_and_not_an_error():
    stats = new_stats()
    assert (stats.acceptance_length, stats.acceptance_rate, stats.acceptance_rate_by_depth) == (0.0, 0.0, [])
    assert stats.target_forwards == 0


def test_a_chain_step_of_one_row():
    stats = new_stats()
    stats.add(chain(1, 4), acceptance([[0, 1, 2, -1, -1]], [2]))
    assert (stats.steps, stats.row_steps, stats.nodes_fed) == (1, 1, 5)
    assert (stats.drafted_tokens, stats.kept_tokens, stats.emitted_tokens) == (4, 2, 3)
    assert stats.acceptance_length == 3.0
    assert stats.acceptance_rate == 0.5
    assert stats.acceptance_rate_by_depth == [1.0, 1.0, 0.0, 0.0]
    assert stats.emitted_per_step == [[(3, 2)]]


def test_steps_add_up_also_when_a_later_one_is_shorter():
    stats = new_stats()
    stats.add(chain(1, 3), acceptance([[0, 1, -1, -1]], [1]))
    stats.add(chain(1, 1), acceptance([[0, 1]], [1]))
    stats.add(Proposal.root_only(torch.tensor([1])), acceptance([[0]], [0]))
    assert (stats.steps, stats.nodes_fed, stats.drafted_tokens) == (3, 4 + 2 + 1, 4)
    assert (stats.emitted_tokens, stats.acceptance_length) == (5, pytest.approx(5 / 3))
    assert stats.acceptance_rate == 0.5
    assert (stats.tried_by_depth, stats.kept_by_depth) == ([2, 1, 1], [2, 0, 0])


def test_a_row_that_stops_on_a_drafted_token_kept_it_without_a_bonus():
    stats = new_stats()
    stats.add(chain(1, 3), acceptance([[0, 1, -1, -1]], [2]))  # the second drafted token ended the row
    assert (stats.emitted_tokens, stats.kept_tokens) == (2, 2)
    assert stats.acceptance_rate == pytest.approx(2 / 3)


def test_rows_count_on_their_own_and_done_rows_not_at_all():
    stats = new_stats(3)
    real = [[True, True, True], [True, False, False], [False, False, False]]
    stats.add(chain(3, 3, real), acceptance([[0, 1, 2, 3], [0, -1, -1, -1], [-1, -1, -1, -1]], [3, 0, 0]))
    assert (stats.steps, stats.row_steps) == (1, 2)
    assert stats.nodes_fed == 12  # padding is fed too
    assert (stats.drafted_tokens, stats.kept_tokens, stats.emitted_tokens) == (4, 3, 5)
    assert stats.acceptance_length == 2.5
    assert (stats.tried_by_depth, stats.kept_by_depth) == ([2, 1, 1], [1, 1, 1])
    assert stats.emitted_per_step == [[(4, 3)], [(1, 0)], []]


def test_a_tree_counts_depths_and_not_nodes():
    stats = new_stats()
    parents = torch.tensor([[-1, 0, 0, 0, 1, 2]])
    tree = Proposal(torch.arange(6)[None], parents, torch.ones(1, 6, dtype=torch.bool))
    stats.add(tree, acceptance([[0, 2, -1]], [1]))
    assert (stats.nodes_fed, stats.drafted_tokens) == (6, 5)
    assert stats.acceptance_rate == 0.5
    assert stats.acceptance_rate_by_depth == [1.0, 0.0]


def test_nodes_taken_out_of_a_tree_are_no_tried_depth():
    stats = new_stats()
    parents = torch.tensor([[-1, 0, 0, 1]])
    real = torch.tensor([[True, True, True, False]])
    stats.add(Proposal(torch.arange(4)[None], parents, real), acceptance([[0, 1, -1]], [1]))
    assert stats.acceptance_rate == 1.0
    assert stats.to_dict()["acceptance_rate_by_depth"] == [1.0]


def test_reports_hold_every_figure_and_are_json():
    stats = new_stats()
    stats.method, stats.notes = "prompt_lookup", ["a note"]
    stats.add(chain(1, 2), acceptance([[0, 1, -1]], [1]))
    report = json.loads(json.dumps(stats.to_dict()))
    assert report["acceptance_length"] == 2.0
    assert report["acceptance_rate"] == 0.5
    assert report["acceptance_rate_by_depth"] == [1.0, 0.0]
    assert report["target_forwards"] == 1
    assert report["method"] == "prompt_lookup"
    assert report["notes"] == ["a note"]
    assert "emitted_per_step" not in report
    assert set(vars(stats)) - set(report) == {"emitted_per_step"}


def test_steps_count_where_they_begin():
    stats = new_stats(2)
    stats.emitted_per_step = [[(30, 29), (4, 3), (1, 0)], [(1, 0)]]  # rows begin at 1; the steps of row 0 at 1, 31, 35
    assert stats.by_position == [(3, 35), (1, 1)]
    assert stats.to_dict()["by_position"] == [(3, 35), (1, 1)]
    assert new_stats().by_position == []
    stats.first_tokens = 2  # emitted before the first step
    assert stats.by_position == [(2, 31), (2, 5)]
