"""The detector on simulated traffic: silence when nothing changes, delay when something does, one event per change."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.detector import Closed, Detector, Opened
from driftwatch.drift.evidence import BETS, Evidence, Mark, fall
from driftwatch.drift.interval import EMPTY
from driftwatch.drift.units import Unit, Units

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .conftest import Traffic

Change = Opened | Closed


def weighted_mean(accepted: NDArray[np.float64], tested: NDArray[np.float64]) -> float:
    weight = tested / (tested + 5)
    return float((weight * accepted / tested).sum() / weight.sum())


def feed(
    detector: Detector, accepted: NDArray[np.float64], tested: NDArray[np.float64], first: int = 0
) -> list[Change]:
    changes = []
    for index, (a, t) in enumerate(zip(accepted.tolist(), tested.tolist(), strict=True), start=first):
        change = detector.update(Unit(index, 0.0, 0.0, 1, a, t))
        if change is not None:
            changes.append(change)
    return changes


@pytest.fixture(scope="module")
def normal(traffic: Traffic) -> float:
    return weighted_mean(*traffic(np.random.default_rng(99), 500_000, 0.7))


def test_one_update_by_hand() -> None:
    detector = Detector(lower=0.65, tolerance=0.05, threshold=100.0)
    assert detector.floor == pytest.approx(0.6)
    assert detector.recovery_floor == pytest.approx(0.625)
    assert detector.update(Unit(4, 0.0, 0.0, 1, 3.0, 15.0)) is None
    z = 0.75 * (0.2 - 0.6) / 0.4
    assert detector.falling.value == pytest.approx(math.log(sum(1 - bet * z for bet in BETS) / len(BETS)))
    assert detector.evidence_ratio == pytest.approx(detector.falling.value / math.log(100))
    assert detector.start_index == 4
    assert detector.estimate.value == pytest.approx(0.2)


def test_no_tested_proposals_no_change() -> None:
    detector = Detector(0.65, 0.05, 100.0)
    detector.update(Unit(0, 0.0, 0.0, 1, 1.0, 5.0))
    before = detector.to_json()
    assert detector.update(Unit(1, 0.0, 0.0, 1, 0.0, 0.0)) is None
    assert detector.to_json() == before


def test_floors_stay_inside() -> None:
    assert Detector(0.01, 0.05, 100.0).floor == 0.001
    assert Detector(1.0, 1e-6, 100.0).floor == 0.999


def test_a_baseline_below_the_tolerance_has_nothing_to_fall_to() -> None:
    assert not Detector(0.06, 0.05, 100.0).blind
    silent = Detector(0.01, 0.05, 1e4)
    assert silent.blind
    for index in range(5000):
        assert silent.update(Unit(index, 0.0, 0.0, 1, 0.0, 50.0)) is None  # break-even's business


@pytest.mark.parametrize(("lower", "tolerance", "threshold"), [(1.2, 0.03, 1e4), (0.5, 0.0, 1e4), (0.5, 0.03, 1.0)])
def test_settings_without_meaning_are_refused(lower: float, tolerance: float, threshold: float) -> None:
    with pytest.raises(ValueError, match="a detector needs"):
        Detector(lower, tolerance, threshold)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=15), st.data())
def test_more_hits_never_mean_more_evidence(requests: list[tuple[int, int]], data: st.DataObject) -> None:
    counts = [(min(a, t), t) for a, t in requests]
    at = data.draw(st.integers(0, len(counts) - 1))
    ratios = []
    for extra in (0, 1):
        detector = Detector(0.65, 0.05, 1e9)
        for i, (a, t) in enumerate(counts):
            detector.update(Unit(i, 0.0, 0.0, 1, float(min(a + extra * (i == at), t)), float(t)))
        ratios.append(detector.evidence_ratio)
    assert ratios[1] <= ratios[0] + 1e-12


def test_stable_traffic_is_silent(traffic: Traffic, normal: float) -> None:
    # 5 x 50,000 requests at the baseline itself: the promise allows 25 alarms at the floor; here none is to be seen.
    for seed in range(5):
        detector = Detector(normal, 0.03, 10_000.0)
        assert feed(detector, *traffic(np.random.default_rng(seed), 50_000, 0.7)) == []


def test_alarms_at_the_floor_keep_the_promise(traffic: Traffic, normal: float) -> None:
    # The true rate exactly on the floor, 150,000 requests at 1,000: at most 150 expected, alarms are near Poisson.
    accepted, tested = traffic(np.random.default_rng(21), 150_000, 0.7)
    alarms, evidence = 0, Evidence()
    for a, t in zip(accepted.tolist(), tested.tolist(), strict=True):
        unit = Unit(0, 0.0, 0.0, 1, a, t)
        if evidence.update(fall(unit.rate, normal, unit.weight), Mark(0, EMPTY)) >= math.log(1000):
            alarms, evidence = alarms + 1, Evidence()
    assert 40 <= alarms <= 150 + 3 * math.sqrt(150)


@pytest.mark.parametrize(("tolerance", "typical"), [(0.03, (50, 125)), (0.02, (40, 100)), (0.01, (35, 90))])
def test_a_fall_is_found_and_dated(traffic: Traffic, normal: float, tolerance: float, typical: tuple[int, int]) -> None:
    rng = np.random.default_rng(40)
    delays, errors, levels = [], [], []
    for _ in range(40):
        detector = Detector(normal, tolerance, 10_000.0)
        assert feed(detector, *traffic(rng, 300, 0.7)) == []
        first = feed(detector, *traffic(rng, 600, 0.6), first=300)[0]
        assert isinstance(first, Opened)
        delays.append(first.index - 299)
        errors.append(abs(first.start_index - 300))
        assert first.evidence >= math.log(10_000)
        assert first.estimate.value is not None
        assert first.estimate.lower is not None
        levels.append(first.estimate.value)
        assert first.estimate.requests == first.index - first.start_index + 1
    assert typical[0] <= np.median(delays) <= typical[1]
    assert np.median(errors) <= 25
    assert 0.52 < np.median(levels) < 0.61  # true: .59; the chosen start leans low


@pytest.mark.parametrize("tolerance", [0.03, 0.05])
def test_one_event_per_change_and_closed_after_recovery(traffic: Traffic, normal: float, tolerance: float) -> None:
    rng = np.random.default_rng(50)
    detector = Detector(normal - 0.005, tolerance, 100_000.0)
    changes: list[Change] = []
    for start, count, match in ((0, 500, 0.7), (500, 20_000, 0.6), (20_500, 3000, 0.7), (23_500, 2000, 0.58)):
        changes += feed(detector, *traffic(rng, count, match), first=start)
    opened, closed, again = changes
    assert isinstance(opened, Opened)
    assert isinstance(closed, Closed)
    assert isinstance(again, Opened)
    assert 500 <= opened.index < 1100
    assert 20_500 <= closed.index < 22_500
    assert closed.opened_index == opened.index
    assert abs(closed.start_index - 20_500) < 200
    assert 23_500 <= again.index < 23_800
    assert detector.latched


def test_evidence_goes_on_while_an_event_is_open(traffic: Traffic, normal: float) -> None:
    detector = Detector(normal, 0.03, 10_000.0)
    assert len(feed(detector, *traffic(np.random.default_rng(5), 3000, 0.5))) == 1
    assert detector.evidence_ratio > 10
    assert detector.recovery_ratio < 1
    value = detector.estimate.value
    assert value is not None
    assert value == pytest.approx(0.495, abs=0.02)


def test_sessions_break_request_units_and_not_session_units(traffic: Traffic) -> None:
    # Turns of a session share a level (sd .12): the mean of the next request given the last ones dips below the floor.
    shape = {"session_sd": 0.12, "turns": 5, "median_tokens": 40.0}
    requests, threshold = 150_000, 1000.0

    def units(seed: int, labelled: bool) -> list[Unit]:
        accepted, tested = traffic(np.random.default_rng(seed), requests, 0.6, **shape)  # type: ignore[arg-type]
        found, collector = [], Units(idle_s=50.0)
        for i, (a, t) in enumerate(zip(accepted.tolist(), tested.tolist(), strict=True)):
            session = f"s{i // 5}" if labelled else None
            found += collector.add(index=i, time_s=float(i), session=session, accepted=a, tested=t)
        return found + collector.drain()

    alarms = {}
    for labelled in (False, True):
        past = units(1, labelled)
        floor = sum(u.weight * u.rate for u in past) / sum(u.weight for u in past)
        evidence, count = Evidence(), 0
        for u in units(2, labelled):
            if evidence.update(fall(u.rate, floor, u.weight), Mark(0, EMPTY)) >= math.log(threshold):
                evidence, count = Evidence(), count + 1
        alarms[labelled] = count
    promised = requests / threshold
    assert alarms[True] <= promised
    assert alarms[False] > 1.5 * promised
    assert alarms[False] > 5 * alarms[True]


def test_a_restart_changes_nothing(traffic: Traffic, normal: float) -> None:
    rng = np.random.default_rng(60)
    parts = [traffic(rng, count, match) for count, match in ((200, 0.7), (300, 0.55), (900, 0.7))]
    accepted, tested = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    one = Detector(normal, 0.03, 1000.0)
    straight = feed(one, accepted, tested)
    assert [type(change) for change in straight] == [Opened, Closed]
    for cut in (0, 1, 100, 350, 1000):
        other = Detector(normal, 0.03, 1000.0)
        changes = feed(other, accepted[:cut], tested[:cut])
        other = Detector.from_json(json.loads(json.dumps(other.to_json())))
        changes += feed(other, accepted[cut:], tested[cut:], first=cut)
        assert changes == straight
        assert other == one
