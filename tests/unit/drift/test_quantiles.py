"""Quantiles: order statistics by exact sums, coverage, the error stated, exact merging, short requests apart."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.quantiles import Grid, Quantiles, order_limits, rolled_up


def filled(grid: Grid, values: list[float], min_length: float = 0.0) -> Quantiles:
    found = Quantiles(grid, min_length)
    for value in values:
        found.add(value, 100.0)
    return found


def binomial(n: int, q: float, j: int) -> float:
    return sum(math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(j + 1))


@given(st.integers(1, 400), st.floats(0.01, 0.99), st.sampled_from([0.8, 0.95, 0.99]))
def test_ranks_against_exact_sums(n: int, q: float, confidence: float) -> None:
    tail = (1 - confidence) / 2
    low, high = order_limits(n, q, confidence)
    slack = 1e-9
    if low is None:
        assert binomial(n, q, 0) > tail - slack
    else:
        assert binomial(n, q, low - 1) <= tail + slack
        assert binomial(n, q, low) > tail - slack
    if high is None:
        assert binomial(n, q, n - 1) < 1 - tail + slack
    else:
        assert binomial(n, q, high - 1) >= 1 - tail - slack
        assert high == 1 or binomial(n, q, high - 2) < 1 - tail + slack


def test_how_many_requests_a_p99_takes() -> None:
    assert order_limits(298, 0.99, 0.90)[1] is None
    assert order_limits(299, 0.99, 0.90)[1] == 299  # 95% on one side
    assert order_limits(367, 0.99)[1] is None
    assert order_limits(368, 0.99)[1] == 368
    low, high = order_limits(10_000_000, 0.99)
    assert low is not None
    assert high is not None
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(1e7 * 0.99 * 0.01), rel=0.01)


@pytest.mark.parametrize("q", [0.5, 0.95])
def test_intervals_cover_without_assuming_a_shape(q: float) -> None:
    rng = np.random.default_rng(1)
    grid = Grid.steps_per_token(3)
    truth = float(np.quantile(np.clip(0.25 + rng.gamma(2.0, 0.1, 400_000), 0.25, 1.0), q))
    covered = 0
    for _ in range(400):
        found = filled(grid, np.clip(0.25 + rng.gamma(2.0, 0.1, 200), 0.25, 1.0).tolist()).quantile(q)
        assert found.lower is not None
        assert found.upper is not None
        assert found.value is not None
        assert found.lower <= found.value <= found.upper
        covered += int(found.lower <= truth <= found.upper)
    assert covered >= 400 * 0.95 - 3 * math.sqrt(400 * 0.05 * 0.95)


@given(st.lists(st.floats(0.25, 1.0), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_bounded_error_is_half_a_step(values: list[float], q: float) -> None:
    grid = Grid.steps_per_token(3)
    found = filled(grid, values).quantile(q).value
    exact = sorted(values)[max(1, math.ceil(len(values) * q - 1e-9)) - 1]
    assert found is not None
    assert abs(found - exact) <= grid.step / 2 + 1e-12


@given(st.lists(st.floats(0.0005, 3600.0), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_latency_error_is_relative(values: list[float], q: float) -> None:
    found = filled(Grid.latency(), values).quantile(q).value
    exact = sorted(values)[max(1, math.ceil(len(values) * q - 1e-9)) - 1]
    assert found is not None
    assert 1 / 1.0101 <= found / exact <= 1.0101


def test_the_ends_are_exact_or_open() -> None:
    steps = filled(Grid.steps_per_token(3), [1.0] * 500).quantile(0.99)
    assert (steps.value, steps.upper) == (1.0, 1.0)
    slow = filled(Grid.latency(), [9000.0] * 500).quantile(0.5)
    assert slow.upper is None
    fast = filled(Grid.latency(), [0.0] * 500).quantile(0.5)
    assert fast.lower == 0.0
    assert Grid.latency().points == 795


@given(st.lists(st.floats(0.0, 2.0), max_size=40), st.integers(1, 4))
def test_merging_is_exact_in_any_order(values: list[float], parts: int) -> None:
    grid = Grid.bounded(0.0, 2.0, 50)
    whole = filled(grid, values)
    pieces = [filled(grid, values[i::parts]) for i in range(parts)]
    for order in itertools.islice(itertools.permutations(pieces), 4):
        merged = sum(order[1:], order[0])
        assert merged.to_json() == whole.to_json()
    assert Quantiles.from_json(json.loads(json.dumps(whole.to_json()))).to_json() == whole.to_json()


def test_short_requests_are_counted_apart() -> None:
    found = Quantiles(Grid.steps_per_token(3), min_length=32)
    for length in (10, 31, 32, 400):
        found.add(0.5, length)
    assert (found.requests, found.left_out) == (2, 0.5)
    assert found.quantile(0.5).left_out == 0.5
    with pytest.raises(ValueError, match="same least length"):
        found + Quantiles(Grid.steps_per_token(3), min_length=16)
    empty = Quantiles(Grid.latency()).quantile(0.99)
    assert (empty.value, empty.left_out) == (None, None)
    with pytest.raises(ValueError, match="a number"):
        found.add(math.nan, 100)


def test_share_above_break_even() -> None:
    found = filled(Grid.bounded(0.0, 1.0, 101), [0.2, 0.4, 0.6, 0.8])
    assert found.share_above(0.505) == 0.5


def test_a_roll_up_weighs_its_cells() -> None:
    # 99% of the traffic at .3, 1% at .9, judged equally often.
    rng = np.random.default_rng(2)
    grid = Grid.bounded(0.0, 1.0)
    parts = [(filled(grid, rng.normal(at, 0.02, 500).tolist()), weight) for at, weight in ((0.3, 99.0), (0.9, 1.0))]
    median = rolled_up(parts, 0.5)
    assert median.value == pytest.approx(0.3, abs=0.01)
    assert rolled_up([(part, 1.0) for part, _ in parts], 0.75).value == pytest.approx(0.9, abs=0.01)
    assert median.value is not None
    assert median.lower is not None
    assert median.upper is not None
    assert median.lower < median.value < median.upper
    with pytest.raises(ValueError, match="at least one cell"):
        rolled_up([], 0.5)


def test_a_roll_up_covers() -> None:
    rng = np.random.default_rng(3)
    grid = Grid.bounded(0.0, 1.0)
    truth, covered = 0.5 * (0.3 + 0.5), 0  # two normal cells, weights 3 : 1 and q so that the limit lies between
    q = 0.75 * _normal((truth - 0.3) / 0.1) + 0.25 * _normal((truth - 0.5) / 0.1)
    for _ in range(300):
        parts = [(filled(grid, rng.normal(at, 0.1, 150).tolist()), w) for at, w in ((0.3, 3.0), (0.5, 1.0))]
        found = rolled_up(parts, q)
        assert found.lower is not None
        assert found.upper is not None
        covered += found.lower <= truth <= found.upper
    assert covered >= 300 * 0.95 - 3 * math.sqrt(300 * 0.05 * 0.95)


def _normal(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


@pytest.mark.parametrize(("low", "high", "points"), [(1.0, 1.0, 5), (0.0, 1.0, 1)])
def test_grids_without_meaning_are_refused(low: float, high: float, points: int) -> None:
    with pytest.raises(ValueError, match="no grid"):
        Grid.bounded(low, high, points)
