"""A cell from its first request to a closed event, with sessions, restarts and the sizes of a demonstration."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from driftwatch.drift.baseline import Baseline
from driftwatch.drift.cell import BaselineFrozen, CellState, DriftClosed, DriftOpened, Rules, Transition

if TYPE_CHECKING:
    from .conftest import Counts, Traffic


def feed(cell: CellState, counts: Counts, first: int = 0, turns: int | None = None) -> list[Transition]:
    found = []
    for index, (a, t) in enumerate(zip(counts[0].tolist(), counts[1].tolist(), strict=True), start=first):
        found += cell.observe(60.0 * index, index, None if turns is None else f"s{index // turns}", a, t)
    return found


def test_learns_watches_drifts_and_recovers(traffic: Traffic) -> None:
    rng = np.random.default_rng(1)
    cell = CellState.start(Rules(tolerance=0.05, threshold=10_000.0, min_requests=500, min_hours=12.0))
    assert (cell.state, cell.evidence_ratio) == ("learning", 0.0)
    (frozen,) = feed(cell, traffic(rng, 1500, 0.7))
    assert isinstance(frozen, BaselineFrozen)
    assert (frozen.index, frozen.time_s) == (720, 720 * 60.0)  # twelve hours at one a minute
    assert str(cell.state) == "watching"
    assert cell.detector is not None
    assert cell.detector.lower == frozen.estimate.lower
    (opened,) = feed(cell, traffic(rng, 1000, 0.55), first=1500)
    assert isinstance(opened, DriftOpened)
    assert 1500 < opened.index < 1700
    assert opened.baseline == frozen.estimate
    assert opened.floor == cell.detector.floor
    assert str(cell.state) == "drifting"
    assert cell.evidence_ratio > 1
    (closed,) = feed(cell, traffic(rng, 2000, 0.7), first=2500)
    assert isinstance(closed, DriftClosed)
    assert closed.opened_index == opened.index
    assert cell.state == "watching"


def test_a_given_baseline_watches_from_the_first_request(traffic: Traffic) -> None:
    cell = CellState.start(Rules(threshold=1000.0, given=0.684))
    assert cell.state == "watching"
    found = feed(cell, traffic(np.random.default_rng(2), 400, 0.5))
    assert [type(x) for x in found] == [DriftOpened]


def test_new_rules_may_keep_the_old_baseline() -> None:
    old = Baseline.given(0.6, 0.03)
    cell = CellState.start(Rules(tolerance=0.1), old)
    assert cell.detector is not None
    assert cell.detector.floor == pytest.approx(0.5)


def test_sessions_alarm_when_they_close(traffic: Traffic) -> None:
    rng = np.random.default_rng(3)
    rules = Rules(tolerance=0.1, threshold=1000.0, min_requests=200, min_hours=0.0)
    cell = CellState.start(rules)
    frozen, opened = feed(cell, (traffic(rng, 1500, 0.7)), turns=3), feed(cell, traffic(rng, 900, 0.4), 1500, turns=3)
    assert [type(x) for x in frozen + opened] == [BaselineFrozen, DriftOpened]
    event = opened[0]
    assert isinstance(event, DriftOpened)
    assert event.index - event.start_index > 30  # a session is judged half an hour after its last turn
    assert len(cell.units.open) <= 11
    late = CellState.start(rules)
    late.observe(0.0, 0, "s", 3, 5)
    assert late.baseline.moments.units == 0
    assert late.expire(10.0, 0) == []
    late.finish(10.0, 0)
    assert late.baseline.moments.units == 1


@pytest.mark.parametrize("turns", [None, 4])
def test_a_restart_anywhere_changes_nothing(traffic: Traffic, turns: int | None) -> None:
    rng = np.random.default_rng(4)
    parts = [traffic(rng, count, match) for count, match in ((500, 0.7), (400, 0.4), (900, 0.7))]
    counts = tuple(np.concatenate([p[i] for p in parts]) for i in (0, 1))
    rules = Rules(tolerance=0.1, threshold=1000.0, min_requests=100, min_hours=1.0)
    one = CellState.start(rules)
    straight = feed(one, (counts[0], counts[1]), turns=turns)
    assert [type(x) for x in straight] == [BaselineFrozen, DriftOpened, DriftClosed]
    for cut in (0, 50, 450, 700, 1700):
        other = CellState.start(rules)
        found = feed(other, (counts[0][:cut], counts[1][:cut]), turns=turns)
        text = json.dumps(other.to_json())
        other = CellState.from_json(json.loads(text))
        assert json.dumps(other.to_json()) == text
        found += feed(other, (counts[0][cut:], counts[1][cut:]), cut, turns)
        assert found == straight
        assert other == one


def test_state_stays_small(traffic: Traffic) -> None:
    cell = CellState.start(Rules(min_hours=0.0))
    sizes = []
    for start in range(0, 6000, 2000):
        feed(cell, traffic(np.random.default_rng(start), 2000, 0.7), start)
        sizes.append(len(json.dumps(cell.to_json())))
    assert max(sizes) < 4000


@pytest.mark.parametrize("after", [0.09, 0.15])
def test_demonstration_size(traffic: Traffic, after: float) -> None:
    """32 tokens, gamma 5, match .45 -> .09 or .15: what ``Rules`` lets a demonstration finish in some 200 requests."""
    rng = np.random.default_rng(70)
    shape = {"gamma": 5, "median_tokens": 32.0, "length_sigma": 0.0, "swing": 0.0}
    rules = Rules(tolerance=0.08, threshold=10_000.0, min_requests=60, min_hours=0.0)
    delays = []
    for _ in range(40):
        cell = CellState.start(rules)
        found = feed(cell, traffic(rng, 300, 0.45, **shape))  # type: ignore[arg-type]
        assert [type(x) for x in found] == [BaselineFrozen]  # and no alarm in 200 stable requests
        assert found[0].index < 100
        (opened,) = feed(cell, traffic(rng, 150, after, **shape), first=300)  # type: ignore[arg-type]
        delays.append(opened.index - 299)
    assert np.median(delays) <= 50
    assert np.quantile(delays, 0.9) <= 65
