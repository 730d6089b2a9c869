"""The statistics of a certificate: chi-square on merged cells, the samples it needs, and a distance with an interval.

Used by lossless.py. Sample counts come from a stated effect size (Cohen's w) and power through the non-central
chi-square law; rounding of the target's own law is allowed for by the same law (see `critical_value`).
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

LEAST_EXPECTED = 5.0  # the usual bound below which a cell's count is no longer near normal
RANK_BINS = 16
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Cells:
    """Cells of one multinomial sample: expected and observed counts, the rare outcomes merged into one.

    Attributes:
        expected, observed: counts by cell.
        impossible: observations of outcomes whose law is zero; they are in no cell.
    """

    expected: list[float]
    observed: list[int]
    impossible: int

    @property
    def degrees(self) -> int:
        """Degrees of freedom."""
        return max(len(self.expected) - 1, 0)

    @property
    def statistic(self) -> float:
        """Pearson's sum over the cells."""
        return sum((o - e) ** 2 / e for e, o in zip(self.expected, self.observed, strict=True))


def merged(law: Mapping[T, float], counts: Counter[T]) -> Cells:
    """Make cells of a law and of what was observed; outcomes expected fewer than five times share one cell.

    Args:
        law: probabilities of all possible outcomes, summing to 1.
        counts: observations.
    """
    total = sum(counts[outcome] for outcome in law)
    order = sorted(law, key=lambda outcome: law[outcome])
    expected: list[float] = []
    observed: list[int] = []
    rest, seen = 0.0, 0
    for outcome in order:
        if (rest and rest < LEAST_EXPECTED) or law[outcome] * total < LEAST_EXPECTED:
            rest += law[outcome] * total
            seen += counts[outcome]
        else:
            expected.append(law[outcome] * total)
            observed.append(counts[outcome])
    if rest and rest < LEAST_EXPECTED and expected:
        expected[0], observed[0] = expected[0] + rest, observed[0] + seen
    elif rest:
        expected.insert(0, rest)
        observed.insert(0, seen)
    impossible = sum(counts.values()) - total
    return Cells(expected, observed, impossible)


def critical_value(degrees: int, significance: float, rounding: float = 0.0) -> float:
    """Return the statistic that an exact sampler exceeds with probability `significance`.

    Args:
        degrees: of freedom.
        significance: of the test.
        rounding: non-centrality N w^2 that the target's own rounding explains: the same law computed in two plain ways
            differs by the effect size w. Practically 0 in float32.
    """
    return float(ncx2.isf(significance, degrees, rounding) if rounding > 1e-9 else chi2.isf(significance, degrees))


def p_value(statistic: float, degrees: int, rounding: float = 0.0) -> float:
    """Return the chance that an exact sampler exceeds the statistic."""
    return float(ncx2.sf(statistic, degrees, rounding) if rounding > 1e-9 else chi2.sf(statistic, degrees))


def power_of(samples: int, degrees: int, effect_size: float, significance: float, rounding: float = 0.0) -> float:
    """Return the chance that a sampler whose law is off by `effect_size` (Cohen's w) fails the test."""
    critical = critical_value(degrees, significance, rounding)
    return float(ncx2.sf(critical, degrees, samples * effect_size**2))


def samples_needed(degrees: int, effect_size: float, significance: float, power: float) -> int:
    """Return the sample count at which a law off by `effect_size` fails with probability `power`.

    Raises:
        ValueError: if an argument leaves no test.
    """
    if not (effect_size > 0 and 0 < significance < power < 1):
        raise ValueError(
            "a test needs effect_size > 0 and 0 < significance < power < 1; "
            f"got {effect_size}, {significance}, {power}."
        )
    critical = critical_value(degrees, significance)

    def short(noncentrality: float) -> float:
        return float(ncx2.sf(critical, degrees, noncentrality)) - power

    high = 1.0
    while short(high) < 0:
        high *= 2
    return math.ceil(brentq(short, 1e-9, high) / effect_size**2)


def effect_between(law: Mapping[T, float], other: Mapping[T, float]) -> float:
    """Return Cohen's w of `other` against `law`, over the outcomes that `law` allows."""
    return math.sqrt(sum((other.get(outcome, 0.0) - p) ** 2 / p for outcome, p in law.items() if p > 0))


def uniformity(places: Sequence[float]) -> float:
    """Return the p-value of the hypothesis that `places` in [0, 1] are uniform: chi-square on equal bins.

    Fewer than five a bin say nothing: the answer is then 1.
    """
    bins = min(RANK_BINS, int(len(places) // LEAST_EXPECTED))
    if bins < 2:
        return 1.0
    observed, _ = np.histogram(np.clip(places, 0.0, 1.0), bins=bins, range=(0.0, 1.0))
    expected = len(places) / bins
    return p_value(float(((observed - expected) ** 2 / expected).sum()), bins - 1)


@dataclass(frozen=True)
class TotalVariation:
    """A measured distance: half the sum of differences, an interval that holds the true one, and what exactness shows.

    Attributes:
        estimate: between the observed frequencies and the law; biased upwards by the sampling itself.
        low, high: interval of the true distance, at the stated confidence.
        exact: the estimate that an exact sampler of as many samples is expected to show at most.
    """

    estimate: float
    low: float
    high: float
    exact: float


def total_variation(law: Mapping[T, float], counts: Counter[T], confidence: float = 0.95) -> TotalVariation:
    """Measure how far observed outcomes are from a law.

    The interval is distribution-free: one sample moves the estimate by at most 1/N (McDiarmid's inequality), its mean
    lies above the true distance (Jensen's) and below it plus the expected distance of a sample from its own law.
    """
    total = sum(counts.values())
    outcomes = law.keys() | counts.keys()
    shares = {outcome: counts[outcome] / total for outcome in outcomes}
    estimate = sum(abs(shares[outcome] - law.get(outcome, 0.0)) for outcome in outcomes) / 2
    slack = math.sqrt(math.log(2 / (1 - confidence)) / (2 * total))

    def own(p: Mapping[T, float]) -> float:
        return sum(math.sqrt(share * (1 - share) / total) for share in p.values()) / 2

    return TotalVariation(estimate, max(0.0, estimate - own(shares) - slack), min(1.0, estimate + slack), own(law))
