"""The statistics of certificates against what is known of them."""

import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chi2

from spechead.bench import chi_square
from spechead.bench.chi_square import merged, power_of, samples_needed, total_variation, uniformity


def test_rare_outcomes_share_a_cell_that_is_expected_five_times() -> None:
    law = {"a": 0.6, "b": 0.3, "c": 0.05, "d": 0.03, "e": 0.02}
    cells = merged(law, Counter({"a": 55, "b": 35, "c": 7, "d": 2, "e": 1}))
    assert sorted(cells.expected) == pytest.approx([5, 5, 30, 60])
    assert cells.observed == [3, 7, 35, 55]
    assert cells.degrees == 3
    assert cells.statistic == pytest.approx(25 / 60 + 25 / 30 + 4 / 5 + 4 / 5)


def test_every_outcome_rare_makes_one_cell() -> None:
    cells = merged({"a": 0.5, "b": 0.5}, Counter({"a": 2, "b": 1}))
    assert (cells.expected, cells.observed, cells.degrees, cells.statistic) == ([3.0], [3], 0, 0.0)


def test_a_rest_below_five_joins_the_smallest_cell() -> None:
    cells = merged({"a": 0.5, "b": 0.48, "c": 0.02}, Counter({"a": 50, "b": 48, "c": 2}))
    assert sorted(cells.expected) == pytest.approx([50, 50])
    assert sum(cells.observed) == 100


def test_impossible_outcomes_are_counted_apart() -> None:
    cells = merged({"a": 1.0}, Counter({"a": 9, "z": 1}))
    assert cells.impossible == 1
    assert cells.observed == [9]


@pytest.mark.parametrize(("degrees", "effect"), [(1, 0.3), (15, 0.2), (126, 0.15)])
def test_the_sample_count_reaches_the_power_and_no_fewer_does(degrees: int, effect: float) -> None:
    count = samples_needed(degrees, effect, 1e-3, 0.95)
    assert power_of(count, degrees, effect, 1e-3) >= 0.95
    assert power_of(count - 2, degrees, effect, 1e-3) < 0.95


def test_an_exact_sampler_fails_as_often_as_stated_and_a_wrong_one_as_often_as_the_power() -> None:
    law = dict(enumerate((0.4, 0.3, 0.2, 0.1)))
    wrong = np.array((0.46, 0.27, 0.19, 0.08))
    effect = chi_square.effect_between(law, dict(enumerate(wrong)))
    count = samples_needed(3, effect, 0.05, 0.9)
    critical = chi_square.critical_value(3, 0.05)
    generator = np.random.default_rng(0)

    def failures(shares: np.ndarray) -> float:
        draws = generator.multinomial(count, shares, 2000)
        return float(
            np.mean([merged(law, Counter(dict(enumerate(map(int, row))))).statistic > critical for row in draws])
        )

    assert failures(np.array(list(law.values()))) == pytest.approx(0.05, abs=0.02)
    assert failures(wrong) == pytest.approx(0.9, abs=0.04)


def test_rounding_raises_the_critical_value_and_is_nothing_when_it_is_nothing() -> None:
    assert chi_square.critical_value(10, 1e-3, 5.0) > chi_square.critical_value(10, 1e-3)
    assert chi_square.critical_value(10, 1e-3) == pytest.approx(chi2.isf(1e-3, 10))
    assert chi_square.p_value(30.0, 10, 5.0) > chi_square.p_value(30.0, 10)


@pytest.mark.parametrize("arguments", [(0.0, 1e-3, 0.9), (0.1, 0.9, 0.5), (0.1, 0.0, 0.9), (0.1, 0.1, 1.0)])
def test_tests_that_test_nothing_are_refused(arguments: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="a test needs"):
        samples_needed(3, *arguments)


def test_uniform_places_pass_and_others_do_not() -> None:
    generator = np.random.default_rng(1)
    assert uniformity(generator.random(2000).tolist()) > 1e-3
    assert uniformity((generator.random(2000) ** 1.3).tolist()) < 1e-6
    assert uniformity([0.5] * 9) == 1.0, "nine say nothing"
    assert uniformity([0.1] * 10) < 0.01


def test_the_interval_holds_the_true_distance() -> None:
    law = dict.fromkeys(range(8), 0.125)
    wrong = np.array([0.225, 0.025, *[0.125] * 6])
    generator = np.random.default_rng(2)
    for shares, true in ((wrong, 0.1), (np.full(8, 0.125), 0.0)):
        for _ in range(50):
            counts = Counter(dict(enumerate(map(int, generator.multinomial(3000, shares)))))
            found = total_variation(law, counts)
            assert found.low <= true <= found.high
            assert found.low <= found.estimate <= found.high
        assert math.isclose(found.exact, 8 * math.sqrt(0.125 * 0.875 / 3000) / 2)
