"""What auto learns: costs by node count, survival by depth."""

import pytest

from spechead.proposers.costs import DECAY, RECENT, Clock, Clocks, Ledger, Paces, Survival, margin_of


class TestClock:
    def test_nothing_seen_costs_nothing(self) -> None:
        assert Clock().seconds(5) == 0.0
        assert Clock().sizes == []

    def test_one_size_is_scaled_by_the_guessed_slope(self) -> None:
        clock = Clock(slope=0.5)
        clock.add(1, 2.0)
        assert clock.seconds(1) == 2.0
        assert clock.seconds(3) == pytest.approx(4.0)
        other = Clock(slope=0.5)
        other.add(3, 4.0)
        assert other.seconds(1) == pytest.approx(2.0)

    def test_between_and_beyond_two_sizes_lies_a_line(self) -> None:
        clock = Clock()
        clock.add(1, 1.0)
        clock.add(5, 3.0)
        assert clock.seconds(3) == pytest.approx(2.0)
        assert clock.seconds(9) == pytest.approx(5.0)
        assert clock.seconds(5) == 3.0

    def test_more_nodes_never_cost_less(self) -> None:
        clock = Clock()
        clock.add(1, 2.0)
        clock.add(5, 1.0)  # a disturbed measurement
        assert clock.seconds(9) >= 1.0
        assert clock.seconds(3) >= 1.0

    def test_fewer_nodes_than_were_seen_cost_less_but_not_nothing(self) -> None:
        clock = Clock()
        clock.add(40, 2.0)
        clock.add(80, 3.0)
        assert clock.seconds(16) == pytest.approx(1.4)
        clock.add(80, 9.0)
        clock.add(80, 9.0)
        assert clock.seconds(20) == pytest.approx(1.0), "half the nodes, at least half the cost"

    def test_outliers_and_old_samples_fall_out(self) -> None:
        clock = Clock()
        for seconds in (1.0, 1.0, 50.0):
            clock.add(1, seconds)
        assert clock.seconds(1) == 1.0
        for _ in range(RECENT):
            clock.add(1, 3.0)
        assert clock.seconds(1) == 3.0


class TestClocks:
    def test_batches_of_other_sizes_keep_their_own_figures(self) -> None:
        clocks = Clocks()
        clocks.add(1, 16, 1.0)
        clocks.add(16, 16, 3.0)
        assert (clocks.seconds(1, 16), clocks.seconds(16, 16)) == (1.0, 3.0)
        assert clocks.seconds(17, 16) == 3.0, "one clock from 16 to 31 rows"
        assert clocks.samples == 2

    def test_a_size_not_seen_is_read_off_the_nearest(self) -> None:
        clocks = Clocks()
        assert clocks.seconds(4, 4) == 0.0
        clocks.add(2, 4, 1.0)
        clocks.add(64, 4, 9.0)
        assert clocks.seconds(4, 4) == 1.0
        assert clocks.seconds(40, 4) == 9.0

    def test_how_cost_grows_is_taken_from_another_batch_until_it_is_known(self) -> None:
        clocks = Clocks()
        clocks.add(8, 8, 1.0)
        clocks.add(8, 40, 3.0)
        clocks.add(2, 8, 0.5)
        assert clocks.seconds(2, 40) == pytest.approx(1.5)
        clocks.add(2, 40, 0.7)
        assert clocks.seconds(2, 40) == pytest.approx(0.7)


def test_a_plain_step_is_known_once_one_was_timed_in_such_a_batch() -> None:
    """Were it read off drafted steps alone, it would seem as dear as they, and nothing would ever correct that."""
    ledger = Ledger()
    ledger.step_clocks.add(12, 60, 2.0)
    ledger.step_clocks.add(3, 3, 1.0)
    assert ledger.plain_cost(12) == 0.0
    ledger.step_clocks.add(9, 9, 1.0)
    assert 1.0 < ledger.plain_cost(12) < 1.1
    assert Ledger(step_seconds=lambda nodes: 5.0).plain_cost(12) == 5.0


class TestSurvival:
    def test_the_prior_rules_until_something_was_tried(self) -> None:
        assert Survival(0.5).curve(3) == [0.5, 0.25, 0.125]
        assert Survival(0.5).curve(0) == []

    def test_a_depth_counts_only_where_the_one_above_was_kept(self) -> None:
        survival = Survival(0.5)
        survival.add(3, 0)
        first, second, _ = survival.curve(3)
        assert first == pytest.approx(0.5 * DECAY / (DECAY + 1))
        assert second == pytest.approx(first * 0.5), "depth 2 was not reached: it keeps its prior"

    def test_it_approaches_what_happens(self) -> None:
        survival = Survival(0.9)
        for trial in range(400):
            survival.add(2, (trial % 2) * 2)
        first, second = survival.curve(2)
        assert first == pytest.approx(0.5, abs=0.05)
        assert second == pytest.approx(first, abs=0.02), "where depth 1 was kept, depth 2 always was"
        assert survival.trials == 400

    def test_it_forgets(self) -> None:
        survival = Survival(0.5)
        for _ in range(100):
            survival.add(1, 1)
        for _ in range(100):
            survival.add(1, 0)
        assert survival.curve(1)[0] < 0.1

    def test_depths_beyond_what_was_tried_promise_no_more_than_the_last(self) -> None:
        survival = Survival(0.6)
        for _ in range(50):
            survival.add(1, 0)
        curve = survival.curve(3)
        assert curve[1] <= curve[0] * 0.05


class TestLedger:
    def test_given_costs_are_used_instead_of_measured_ones(self) -> None:
        ledger = Ledger(step_seconds=lambda nodes: 3.0 * nodes, draft_seconds=lambda depth: 7.0 * depth)
        ledger.step_clocks.add(1, 2, 100.0)
        ledger.draft_clocks.add(1, 2, 100.0)
        assert ledger.step_cost(1, 2) == 6.0
        assert ledger.draft_cost(1, 2) == 14.0
        assert ledger.draft_cost(1, 0) == 0.0

    def test_copies_are_kept_apart_by_the_length_of_their_match(self) -> None:
        ledger = Ledger()
        for _ in range(20):
            ledger.copy_of(1).add(1, 0)
        assert ledger.copy_of(1).curve(1)[0] < 0.1
        assert ledger.copy_of(2).curve(1)[0] == pytest.approx(0.55)
        assert ledger.copy_of(3) is ledger.copy_of(9)


class TestPaces:
    def test_a_row_is_expected_to_go_on_as_it_did(self) -> None:
        paces = Paces()
        assert paces.of(3) == 1.0
        for _ in range(60):
            paces.add([3, 1, 0])
        assert paces.of(0) == pytest.approx(3.0, abs=0.02)
        assert paces.of(1) == 1.0
        assert paces.of(2) == 1.0, "a row that had stopped was not slow"

    def test_one_lucky_step_does_not_make_a_row_fast(self) -> None:
        paces = Paces()
        paces.add([5])
        assert 1.5 < paces.of(0) < 3

    def test_rows_keep_theirs_where_others_leave(self) -> None:
        paces = Paces()
        paces.add([5, 1, 3])
        kept = [paces.of(2), paces.of(0)]
        paces.select_rows([2, 0])
        assert [paces.of(0), paces.of(1)] == kept

    def test_a_row_that_came_since_is_selected_with_the_others(self) -> None:
        paces = Paces()
        paces.add([5])
        quick = paces.of(0)
        paces.select_rows([1, 0])
        assert [paces.of(0), paces.of(1)] == [1.0, quick]


def test_a_closed_batch_asks_for_more_the_more_rows_it_has() -> None:
    closed = [margin_of(rows, joined=False) for rows in (1, 2, 4, 8, 16)]
    assert closed == sorted(closed)
    assert closed[-1] > closed[1] > closed[0] > 1
    assert margin_of(16, joined=True) == margin_of(2, joined=True) < closed[-1]
