"""What a fall of acceptance costs a day."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.economics.range import Range
from driftwatch.economics.stake import per_day


def test_worked_by_hand() -> None:
    found = per_day(Range(2.0, 1.7, 2.3), Range(3.0, 2.6, 3.4), 50e6)
    assert found.to_json() == pytest.approx([50.0, 25.0, 75.0])


def test_what_is_not_known_stays_unknown() -> None:
    known = Range(2.0, 1.0, 3.0)
    assert per_day(Range(), known, 1e6) == per_day(known, Range(), 1e6) == Range()
    assert per_day(known, Range(5.0), 1e6) == Range(3.0)
    assert per_day(known, known, 0.0) == Range(0.0, 0.0, 0.0)


prices = st.tuples(st.floats(0.01, 100), st.floats(0, 10), st.floats(0, 10)).map(
    lambda at: Range(at[0], at[0] - at[1], at[0] + at[2])
)


@given(prices, prices, st.floats(0, 1e12))
def test_the_limits_hold_the_value_and_turn_with_the_sides(before: Range, now: Range, tokens: float) -> None:
    found, other = per_day(before, now, tokens), per_day(now, before, tokens)
    assert found.value is not None
    assert found.lower is not None
    assert found.upper is not None
    assert found.lower <= found.value <= found.upper
    assert other.to_json() == pytest.approx([-found.value, -found.upper, -found.lower])


def test_the_interval_holds_the_truth_nineteen_times_in_twenty() -> None:
    """Means of 100 skewed draws each, with their own intervals."""
    rng = np.random.default_rng(3)
    held, trials = 0, 4000
    for _ in range(trials):
        sides = []
        for mean in (2.0, 3.0):
            draws = rng.gamma(2.0, mean / 2.0, 100)
            reach = 1.984 * draws.std(ddof=1) / 10.0
            sides.append(Range(float(draws.mean()), float(draws.mean() - reach), float(draws.mean() + reach)))
        found = per_day(sides[0], sides[1], 1e6)
        assert found.lower is not None
        assert found.upper is not None
        held += found.lower <= 1.0 <= found.upper
    assert 0.935 < held / trials < 0.965
