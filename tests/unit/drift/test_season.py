"""Hours of the day: dips are found, chance makes none, and a swing wider than the tolerance is silent."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from driftwatch.drift.baseline import Baseline
from driftwatch.drift.cell import CellState, DriftOpened, Rules, Transition
from driftwatch.drift.interval import EMPTY, Moments
from driftwatch.drift.season import HOURS, dip_at, dips, hour_of


def hours(rng: np.random.Generator, means: list[float], units: int, sd: float = 0.12) -> dict[int, Moments]:
    found = {}
    for hour, mean in enumerate(means):
        moments = EMPTY
        for x in rng.normal(mean, sd, units).tolist():
            moments = moments.with_unit(x, 1.0)
        found[hour] = moments
    return found


def day(amplitude: float) -> list[float]:
    return [0.65 + amplitude * math.sin(2 * math.pi * (hour + 0.5) / HOURS) for hour in range(HOURS)]


def test_finds_the_dips_and_only_lowers() -> None:
    found = dips(hours(np.random.default_rng(1), day(0.06), 200))
    assert found is not None
    assert max(found) == 0.0
    assert all(
        dip == pytest.approx(min(0.0, mean - 0.65), abs=0.025) for dip, mean in zip(found, day(0.06), strict=True)
    )


def test_chance_makes_almost_none() -> None:
    rng = np.random.default_rng(2)
    deepest = [min(dips(hours(rng, day(0.0), 100)) or [0.0]) for _ in range(100)]
    assert np.mean(deepest) > -0.01  # the raw means would dip by .025
    assert np.mean([x == 0.0 for x in deepest]) > 0.3


def test_hours_without_data_get_the_deepest_dip() -> None:
    known = hours(np.random.default_rng(3), day(0.06), 200)
    del known[3]
    found = dips(known)
    assert found is not None
    assert found[3] == min(found)
    assert dips({hour: known[hour] for hour in range(3, 12) if hour in known}) is None
    assert (hour_of(0.0), hour_of(90_000.0), dip_at(None, 5.0), dip_at(found, 3 * 3600.0)) == (0, 1, 0.0, found[3])


def run(cell: CellState, rng: np.random.Generator, days: range, amplitude: float, level: float) -> list[Transition]:
    found = []
    for index in range(days.start * 2000, days.stop * 2000):
        time_s = index * 86_400.0 / 2000
        mean = level + amplitude * math.sin(2 * math.pi * time_s / 86_400.0)
        hits = rng.binomial(60, float(np.clip(rng.normal(mean, 0.1), 0, 1)))
        found += cell.observe(time_s, index, None, float(hits), 60.0)
    return found


def test_a_swing_wider_than_the_tolerance_is_silent_and_a_fall_in_it_is_not() -> None:
    rng = np.random.default_rng(4)
    cell = CellState.start(Rules(tolerance=0.03, threshold=1000.0))
    learnt = run(cell, rng, range(2), 0.07, 0.65)
    assert len(learnt) == 1
    assert cell.detector is not None
    assert cell.detector.dips == cell.baseline.dips
    assert cell.baseline.by_hour == {}
    assert run(cell, rng, range(2, 6), 0.07, 0.65) == []
    blind = CellState.start(cell.rules, Baseline.given(cell.detector.lower, 0.03))
    assert run(blind, rng, range(4), 0.07, 0.65) != []  # what would happen without
    (opened,) = run(cell, rng, range(6, 8), 0.07, 0.5)
    assert isinstance(opened, DriftOpened)
    assert opened.index < 13_000
    text = json.dumps(cell.to_json())
    assert json.dumps(CellState.from_json(json.loads(text)).to_json()) == text


def test_less_than_a_day_knows_no_hours() -> None:
    rng = np.random.default_rng(5)
    cell = CellState.start(Rules(tolerance=0.06, threshold=1000.0, min_requests=300, min_hours=0.0))
    run(cell, rng, range(1), 0.07, 0.65)
    assert cell.detector is not None
    assert cell.baseline.dips is None
