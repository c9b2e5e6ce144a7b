"""Quantiles by order statistics: against exact binomials, known thresholds, and how often they hold the truth."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.economics.quantile import effective, quantile, ranks
from driftwatch.economics.range import Range

from .conftest import repeatable


@settings(repeatable, max_examples=40)
@given(st.integers(1, 120), st.sampled_from(["1/2", "19/20", "99/100", "1/10"]))
def test_ranks_against_exact_binomials(n: int, level: str) -> None:
    q = Fraction(level)
    mass = [comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(n + 1)]
    tail = Fraction(1, 40)
    lower = max((k + 1 for k in range(n) if sum(mass[: k + 1]) <= tail), default=None)
    upper = min((k for k in range(1, n + 1) if sum(mass[k:]) <= tail), default=None)
    assert ranks(n, float(q)) == (lower, upper)


def test_from_how_many_on_the_p99_has_an_upper_limit() -> None:
    # 0.99^n <= 0.05 from 299 on (one-sided 95 % = each side of 90 %), <= 0.025 from 368 on.
    assert ranks(298, 0.99, 0.90)[1] is None
    assert ranks(299, 0.99, 0.90)[1] == 299
    assert ranks(367, 0.99)[1] is None
    assert ranks(368, 0.99)[1] == 368
    assert ranks(0, 0.5) == (None, None)
    assert ranks(5, 0.5) == (None, None)
    assert ranks(6, 0.5) == (1, 6)


def test_large_numbers_neither_overflow_nor_drift() -> None:
    lower, upper = ranks(10_000_000, 0.99)
    reach = 1.959964 * (10_000_000 * 0.99 * 0.01) ** 0.5
    assert lower == pytest.approx(9_900_000 - reach, abs=3)
    assert upper == pytest.approx(9_900_000 + reach, abs=3)


@pytest.mark.parametrize(("n", "q", "confidence"), [(-1, 0.5, 0.95), (5, 1.0, 0.95), (5, 0.5, 1.0)])
def test_impossible_quantiles_are_refused(n: int, q: float, confidence: float) -> None:
    with pytest.raises(ValueError, match="quantile of"):
        ranks(n, q, confidence)


def test_of_values() -> None:
    x = np.arange(1, 101)
    assert quantile(x, 0.5) == Range(50, 40, 61)
    assert quantile(x, 0.95).value == 95
    assert quantile(x, 0.99) == Range(99, 97, None)
    assert quantile([], 0.5) == Range()
    assert quantile([3.0], 0.5) == Range(3.0, None, None)


@repeatable
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.sampled_from([0.5, 0.95, 0.99]), st.floats(0.1, 9.0))
def test_equal_weights_are_no_weights(values: list[float], q: float, weight: float) -> None:
    assert quantile(values, q, np.full(len(values), weight)) == quantile(values, q)


@repeatable
@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 5)), min_size=1, max_size=30), st.sampled_from([0.5, 0.9]))
def test_the_weighted_value_is_that_of_repeated_ones(pairs: list[tuple[float, int]], q: float) -> None:
    values, weights = np.array([x for x, _ in pairs]), np.array([w for _, w in pairs], dtype=float)
    repeated = np.repeat(values, weights.astype(int))
    found = quantile(values, q, weights)
    assert found.value == quantile(repeated, q).value
    for limit, inner in ((found.lower, -1), (found.upper, 1)):
        assert limit is None or found.value is None or (limit - found.value) * inner >= 0


def test_weights_cost_requests() -> None:
    assert effective(np.ones(50)) == 50
    assert effective(np.array([10.0] * 10 + [1.0] * 10)) == pytest.approx(110**2 / 1010)
    assert effective(np.array([])) == 0.0
    with pytest.raises(ValueError, match="positive weight"):
        quantile([1.0, 2.0], 0.5, [1.0, 0.0])


@pytest.mark.parametrize(("q", "requests"), [(0.5, 40), (0.95, 200), (0.99, 600)])
def test_limits_hold_the_truth_at_the_nominal_rate(rng: np.random.Generator, q: float, requests: int) -> None:
    """2,000 runs on a skewed distribution: at least nominal, and not far above (discreteness)."""
    truth = -np.log(1 - q)
    lower, upper = ranks(requests, q)
    assert lower is not None
    assert upper is not None
    x = np.sort(rng.exponential(size=(2000, requests)), axis=1)
    held = np.mean((x[:, lower - 1] <= truth) & (truth <= x[:, upper - 1]))
    assert 0.94 <= held <= 0.985


def test_weighted_limits_hold_the_truth(rng: np.random.Generator) -> None:
    """Sampling by size: weights 1 and 4, unrelated and related to the value."""
    held = 0
    for _ in range(2000):
        heavy = rng.random(400) < 0.3
        # Heavy requests stand for four each and are slower; the population is their mixture.
        x = rng.exponential(np.where(heavy, 2.0, 1.0))
        found = quantile(x, 0.9, np.where(heavy, 4.0, 1.0))
        assert found.lower is not None
        assert found.upper is not None
        held += found.lower <= MIXED_P90 <= found.upper
    assert 0.93 <= held / 2000 <= 0.99


def _mixed_p90() -> float:
    """0.9-quantile of exponentials of mean 2 (share 1.2 / 1.9) and 1 (share 0.7 / 1.9)."""
    slow = 1.2 / 1.9
    low, high = 0.0, 50.0
    for _ in range(100):
        x = 0.5 * (low + high)
        below = slow * (1 - np.exp(-x / 2)) + (1 - slow) * (1 - np.exp(-x))
        low, high = (x, high) if below < 0.9 else (low, x)
    return low


MIXED_P90 = _mixed_p90()
