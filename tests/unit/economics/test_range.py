"""Limits through monotone formulae."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.interval import EMPTY, ratio
from driftwatch.economics.range import Range

from .conftest import repeatable

finite = st.floats(-1e6, 1e6)


@repeatable
@given(st.lists(finite, min_size=3, max_size=3))
def test_limits_stay_in_order(numbers: list[float]) -> None:
    low, middle, high = sorted(numbers)
    rising, falling = (
        Range(middle, low, high).map(lambda x: 2 * x),
        Range(middle, low, high).map(lambda x: -x, falling=True),
    )
    assert rising == Range(2 * middle, 2 * low, 2 * high)
    assert falling == Range(-middle, -high, -low)


def test_what_is_unknown_stays_unknown() -> None:
    assert Range().map(lambda x: x + 1) == Range()
    assert Range(1.0, None, 3.0).map(lambda x: -x, falling=True) == Range(-1.0, -3.0, None)
    assert Range(1.0, 0.5, 3.0).map(lambda x: None if x < 1 else x) == Range(1.0, None, 3.0)
    assert not Range(1.0, None, 3.0).limited


def test_of_an_estimate_and_back_from_json() -> None:
    estimate = ratio(EMPTY.with_unit(2, 3).with_unit(1, 4))
    found = Range.of(estimate)
    assert (found.value, found.lower, found.upper) == (estimate.value, estimate.lower, estimate.upper)
    assert Range.from_json(found.to_json()) == found
