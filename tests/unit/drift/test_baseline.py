"""The baseline: which mean it takes, when it freezes, and that it never moves afterwards."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.baseline import Baseline
from driftwatch.drift.interval import Moments, ratio
from driftwatch.drift.season import HOUR_S
from driftwatch.drift.units import Unit

if TYPE_CHECKING:
    from .conftest import Traffic


def unit(index: int, accepted: float, tested: float, time_s: float = 0.0) -> Unit:
    return Unit(index, time_s, time_s, 1, accepted, tested)


def varied(count: int, step_s: float = 0.0) -> list[Unit]:
    """Rates .5 and .7 in turn."""
    return [unit(i, 10 + 4 * (i % 2), 20, i * step_s) for i in range(count)]


def test_takes_the_weighted_mean_of_rates_and_not_the_pooled_ratio() -> None:
    baseline = Baseline(0.05)
    baseline.add(unit(0, 5, 5))  # weight 1/2, rate 1
    baseline.add(unit(1, 9, 45))  # weight 9/10, rate 1/5
    assert baseline.estimate.value == pytest.approx((0.5 * 1.0 + 0.9 * 0.2) / 1.4)
    assert baseline.estimate.value != pytest.approx(14 / 50)


def test_freezes_when_all_three_hold_and_stays() -> None:
    baseline = Baseline(tolerance=0.05, min_requests=100, min_hours=1.0)
    frozen_at = [u.index for u in varied(500, step_s=30.0) if baseline.add(u)]
    assert frozen_at == [120]  # 100 requests after 49 minutes, then the hour
    assert baseline.state == "frozen"
    assert baseline.progress.missing == []
    lower = baseline.lower
    assert lower is not None
    assert 0.575 < lower < 0.6
    before = baseline.to_json()
    assert not baseline.add(unit(999, 0, 50, 1e9))
    assert baseline.to_json() == before


def test_waits_for_the_interval() -> None:
    baseline = Baseline(tolerance=0.02, min_requests=10, min_hours=0.0)
    frozen_at = [u.index for u in varied(2000) if baseline.add(u)]
    # Half-width 1.97 * .1 / sqrt(n) reaches .01 near n = 387.
    assert len(frozen_at) == 1
    assert 375 <= frozen_at[0] <= 395
    half_width = baseline.estimate.half_width
    assert half_width is not None
    assert half_width <= 0.01


def test_says_what_is_missing() -> None:
    baseline = Baseline(tolerance=0.03, min_requests=500, min_hours=24.0)
    assert baseline.progress.missing == ["0 of 500 requests", "0.0 of 24 hours", "no interval yet"]
    for u in varied(120, step_s=60.0):
        baseline.add(u)
    requests, hours, interval = baseline.progress.missing
    assert requests == "120 of 500 requests"
    assert hours == "2.0 of 24 hours"
    assert interval.startswith("interval ±0.018")
    assert interval.endswith("needs ±0.0150")


def test_a_session_counts_its_requests_but_is_one_unit() -> None:
    baseline = Baseline(tolerance=0.5, min_requests=10, min_hours=0.0)
    assert not baseline.add(Unit(0, 0.0, 0.0, 10, 30.0, 60.0))  # 10 requests, no interval from one unit
    assert baseline.progress.missing == ["no interval yet"]


def test_a_perfect_draft_freezes_too() -> None:
    baseline = Baseline(tolerance=0.03, min_requests=500, min_hours=0.0)
    assert [i for i in range(1000) if baseline.add(unit(i, 40, 40))] == [499]
    assert baseline.lower is not None
    assert 0.99 < baseline.lower < 1.0


def test_given_is_frozen_at_that_value() -> None:
    baseline = Baseline.given(0.62, 0.03)
    assert (baseline.state, baseline.lower, baseline.source) == ("frozen", 0.62, "given")
    assert not baseline.add(unit(0, 1, 2))
    assert baseline.lower == 0.62
    with pytest.raises(ValueError, match="between 0 and 1"):
        Baseline.given(62, 0.03)


def test_a_restart_changes_nothing() -> None:
    rng = np.random.default_rng(8)
    units = [unit(i, int(rng.binomial(30, 0.6)), 30, i * 7.3) for i in range(400)]
    for cut in (0, 57, 399):
        one = Baseline(0.03, 200, 0.5)
        other = Baseline(0.03, 200, 0.5)
        for u in units:
            if u.index == cut:
                other = Baseline.from_json(json.loads(json.dumps(other.to_json())))
            assert one.add(u) == other.add(u)
        assert one == other
        assert isinstance(other.moments, Moments)
        assert one.state == "frozen"


def test_freezing_at_the_first_narrow_enough_look_keeps_the_interval_honest(traffic: Traffic) -> None:
    # Stopping on the width looks at the spread only; the lower limit stays below the truth about 97.5% of the time.
    rng = np.random.default_rng(30)
    accepted, tested = traffic(rng, 300_000, 0.6, median_tokens=30.0, length_sigma=0.3, swing=0.0)
    weight = tested / (tested + 5)
    truth = (weight * accepted / tested).sum() / weight.sum()
    below = []
    for a, t in zip(accepted.reshape(500, 600).tolist(), tested.reshape(500, 600).tolist(), strict=True):
        baseline = Baseline(tolerance=0.05, min_requests=60, min_hours=0.0)
        for i, (x, y) in enumerate(zip(a, t, strict=True)):
            if baseline.add(unit(i, x, y)):
                break
        assert baseline.lower is not None
        below.append(baseline.lower <= truth)
    assert np.mean(below) >= 0.955  # 97.5% less 3 standard deviations of 500 runs


def test_interval_is_the_shared_one() -> None:
    baseline = Baseline(0.05)
    for u in varied(10):
        baseline.add(u)
    assert baseline.estimate == ratio(baseline.moments)


@pytest.mark.parametrize("wrong", [1, 3, 19])
def test_wrong_clocks_at_the_start_do_not_pass_for_a_day(wrong: int) -> None:
    """What came in an hour has not seen a day, whatever the first requests said of their time."""
    now = 1.7e9
    baseline = Baseline(tolerance=0.05, min_requests=100, min_hours=1.0)
    for one in varied(wrong):
        baseline.add(one)
    right = [unit(i, 10 + 4 * (i % 2), 20, now + 12.0 * i) for i in range(500)]
    frozen_at = [u.index for u in right if baseline.add(u)]
    assert frozen_at == [300]  # an hour after the first right clock


def test_a_night_counts_and_a_longer_silence_as_one() -> None:
    baseline = Baseline(tolerance=0.05, min_requests=500, min_hours=24.0)
    for start in (0.0, 60_000.0, 700_000.0):  # an hour each, 15 hours and then a week apart
        for one in varied(31, step_s=120.0):
            baseline.add(unit(one.index, one.accepted, one.tested, start + one.first_s))
    assert baseline.hours == pytest.approx(1.0 + 12.0 + 1.0 + 12.0 + 1.0)


def test_few_requests_with_long_silences_learn_too() -> None:
    baseline = Baseline(tolerance=0.05, min_requests=60, min_hours=24.0)
    assert any(baseline.add(one) for one in varied(90, step_s=3 * 3600.0))


@given(st.lists(st.floats(-50_000.0, 400_000.0), min_size=1, max_size=80))
def test_hours_are_never_more_than_passed(steps: list[float]) -> None:
    """Whatever clocks say: time that runs backwards adds nothing, and no silence more than a night."""
    baseline = Baseline(tolerance=0.05)
    now, latest = 1.7e9, 1.7e9
    for index, step in enumerate(steps):
        now += step
        before = baseline.hours
        baseline.add(unit(index, 10, 20, now))
        gone = max(now - latest, 0.0) / HOUR_S if index else 0.0
        latest = max(latest, now) if index else now
        assert 0.0 <= baseline.hours - before <= min(gone, 12.0) + 1e-6
        if gone <= 2.0:
            assert baseline.hours - before == pytest.approx(gone, abs=1e-6)
