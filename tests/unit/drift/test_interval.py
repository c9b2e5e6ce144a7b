"""The interval of a ratio: worked by hand, against tables, at its edges, and by how often it covers the truth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.interval import EMPTY, Estimate, Moments, ratio, student_quantile, wilson

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .conftest import Traffic


def moments(y: list[float], n: list[float]) -> Moments:
    total = EMPTY
    for a, b in zip(y, n, strict=True):
        total = total.with_unit(a, b)
    return total


@pytest.mark.parametrize(
    ("freedom", "confidence", "table"),
    [
        (1, 0.95, 12.7062),
        (2, 0.95, 4.3027),
        (3, 0.95, 3.1824),
        (4, 0.95, 2.7764),
        (5, 0.95, 2.5706),
        (7, 0.95, 2.3646),
        (10, 0.95, 2.2281),
        (20, 0.95, 2.0860),
        (30, 0.95, 2.0423),
        (60, 0.95, 2.0003),
        (120, 0.95, 1.9799),
        (1_000_000, 0.95, 1.95996),
        (1, 0.90, 6.3138),
        (3, 0.90, 2.3534),
        (5, 0.90, 2.0150),
        (30, 0.90, 1.6973),
        (3, 0.99, 5.8409),
        (4, 0.99, 4.6041),
        (5, 0.99, 4.0321),
        (10, 0.99, 3.1693),
        (30, 0.99, 2.7500),
        (3, 0.999, 12.9240),
        (10, 0.999, 4.5869),
        (10, 0.50, 0.6998),
    ],
)
def test_student_quantile_agrees_with_tables(freedom: int, confidence: float, table: float) -> None:
    assert student_quantile(freedom, confidence) == pytest.approx(table, rel=2e-4)


def test_student_quantile_falls_with_degrees_of_freedom() -> None:
    values = [student_quantile(k) for k in range(1, 300)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(("freedom", "confidence"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_student_quantile_refuses_what_has_none(freedom: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="no Student quantile"):
        student_quantile(freedom, confidence)


def test_worked_by_hand() -> None:
    # Three requests of 10 tested proposals, 4, 5 and 9 accepted: r = 18/30 = .6, residuals -2, -1, 3, squares 14.
    estimate = ratio(moments([4, 5, 9], [10, 10, 10]))
    error = math.sqrt(3 / 2 * 14) / 30
    assert estimate.value == pytest.approx(0.6)
    assert estimate.lower == pytest.approx(max(0.0, 0.6 - 4.30265 * error), abs=1e-5)
    assert estimate.upper == 1.0  # .6 + .657 is clipped
    assert (estimate.requests, estimate.numerator, estimate.denominator) == (3, 18, 30)


def test_unequal_units_count_as_fewer() -> None:
    # F = (10 + 10 + 100)^2 / (100 + 100 + 10000) = 1.41: one degree of freedom, not two.
    estimate = ratio(moments([5, 6, 50], [10, 10, 100]))
    r = 61 / 120
    error = math.sqrt(1.5 * ((5 - 10 * r) ** 2 + (6 - 10 * r) ** 2 + (50 - 100 * r) ** 2)) / 120
    assert estimate.upper == pytest.approx(r + 12.7062 * error, abs=1e-5)


def test_not_enough_data_is_said() -> None:
    assert ratio(EMPTY) == Estimate(None, None, None, 0, 0.0, 0.0)
    assert ratio(moments([0, 0], [0, 0])).value is None
    one = ratio(moments([3], [4]))
    assert (one.value, one.lower, one.upper, one.half_width) == (0.75, None, None, None)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_units_that_agree_give_no_zero_width(share: float) -> None:
    estimate = ratio(moments([20 * share] * 100, [20] * 100))
    assert estimate.lower is not None
    assert estimate.upper is not None
    assert (estimate.lower, estimate.upper) == pytest.approx(wilson(share, 100, student_quantile(99)))
    assert estimate.upper - estimate.lower > 0.035
    if share == 0.0:
        assert estimate.lower == 0.0
        assert 3 / 100 < estimate.upper < 4 / 100  # rule of three


def test_range_other_than_zero_to_one() -> None:
    # Acceptance length at gamma 3: every window accepted all three.
    estimate = ratio(moments([30] * 20, [10] * 20), low=1.0, high=4.0, shift=1.0)
    assert (estimate.value, estimate.upper) == (4.0, 4.0)
    assert estimate.lower == pytest.approx(1 + 3 * wilson(1.0, 20, student_quantile(19))[0])


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 1000)), min_size=2, max_size=30),
    st.floats(0.01, 100),
)
def test_ordered_inside_the_range_and_free_of_scale(units: list[tuple[float, float]], scale: float) -> None:
    y, n = [share * size for share, size in units], [size for _, size in units]
    estimate = ratio(moments(y, n))
    assert estimate.value is not None
    assert estimate.lower is not None
    assert estimate.upper is not None
    assert 0.0 <= estimate.lower <= estimate.value <= estimate.upper <= 1.0
    assert estimate.upper > estimate.lower
    scaled = ratio(moments([scale * a for a in y], [scale * b for b in n]))
    assert scaled.value == pytest.approx(estimate.value)


def test_since_is_what_came_after() -> None:
    early = moments([1, 2], [3, 4])
    late = early.with_unit(5, 6, requests=2)
    assert late.since(early) == Moments(1, 2, 5, 6, 25, 30, 36)


def _columns(y: NDArray[np.float64], n: NDArray[np.float64]) -> list[Moments]:
    count = y.shape[1]
    sums = [x.sum(axis=1).tolist() for x in (y, n, y * y, y * n, n * n)]
    return [Moments(count, count, *row) for row in zip(*sums, strict=True)]


@pytest.mark.parametrize("requests", [40, 200])
def test_covers_the_truth_as_often_as_it_says(traffic: Traffic, requests: int) -> None:
    # 2,000 runs: a perfect interval leaves 93-97% about once in 25,000 tries.
    rng = np.random.default_rng(20 + requests)
    accepted, tested = traffic(rng, 400_000, 0.6, swing=0.0)
    truth = accepted.sum() / tested.sum()
    runs = [ratio(m) for m in _columns(*(x[: 2000 * requests].reshape(2000, requests) for x in (accepted, tested)))]
    covered = np.mean([r.lower <= truth <= r.upper for r in runs])
    assert 0.93 <= covered <= 0.97


def test_covers_the_truth_with_sampling_weights(traffic: Traffic) -> None:
    # Horvitz-Thompson: weights of 1 to 8, and requests that are harder where weights are larger.
    rng = np.random.default_rng(7)
    weights = rng.choice([1.0, 2.0, 8.0], 200_000)
    accepted, tested = traffic(rng, 200_000, 0.6, swing=0.0)
    hard, more = traffic(rng, 200_000, 0.4, swing=0.0)
    accepted, tested = np.where(weights > 4, hard, accepted), np.where(weights > 4, more, tested)
    y, n = weights * accepted, weights * tested
    truth = y.sum() / n.sum()
    runs = [ratio(m) for m in _columns(y.reshape(2000, 100), n.reshape(2000, 100))]
    covered = np.mean([r.lower <= truth <= r.upper for r in runs])
    assert 0.93 <= covered <= 0.97
