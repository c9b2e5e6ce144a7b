"""The e-detector's core: worked values, the supermartingale by exact enumeration, run length, arithmetic."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.drift.evidence import BETS, Evidence, Mark, fall, rise
from driftwatch.drift.interval import EMPTY


def fed(*increments: float) -> Evidence:
    evidence = Evidence()
    for at, z in enumerate(increments):
        evidence.update(z, Mark(at, EMPTY))
    return evidence


def test_increments() -> None:
    assert fall(0.3, 0.6) == pytest.approx(-0.75)
    assert fall(1.0, 0.6) == 1.0
    assert fall(0.0, 0.6, 0.5) == pytest.approx(-0.75)
    assert rise(0.9, 0.6) == pytest.approx(-0.5)
    assert rise(0.0, 0.6) == 1.0
    assert rise(1.0, 0.6) == pytest.approx(-(1 - 0.6) / 0.6)


def test_worked_by_hand() -> None:
    evidence = fed(-1.0, 0.5)
    first = [1 + bet for bet in BETS]
    second = [(m + 1) * (1 - bet / 2) for m, bet in zip(first, BETS, strict=True)]
    assert [math.exp(x) for x in evidence.logs] == pytest.approx(second)
    assert evidence.value == pytest.approx(math.log(sum(second) / len(BETS)))


def test_before_the_first_update_there_is_nothing() -> None:
    assert Evidence().value == -math.inf
    assert Evidence().start is None


def test_start_is_that_of_the_largest_term_of_the_sum() -> None:
    zs = np.random.default_rng(3).uniform(-1.0, 1.0, 60)
    zs[35:] -= 0.6
    zs = np.clip(zs, -1.0, 1.0)
    evidence = fed(*zs.tolist())
    best = BETS[int(np.argmax(evidence.logs))]
    suffix = np.cumsum(np.log1p(-best * zs)[::-1])[::-1]  # log of the e-process started at each position
    assert evidence.start is not None
    assert evidence.start.at == int(np.argmax(suffix))
    assert max(evidence.logs) == pytest.approx(math.log(np.exp(suffix).sum()))


null = st.lists(st.tuples(st.floats(-1.0, 1.0), st.floats(0.05, 1.0)), min_size=2, max_size=3)


@given(null, st.integers(1, 5), st.floats(0.0, 0.3))
@settings(max_examples=40, deadline=None)
def test_mean_of_m_is_at_most_n_under_any_null(points: list[tuple[float, float]], steps: int, slack: float) -> None:
    # Exact: every path of a distribution on two or three points whose mean is ``slack`` (or less where cut at 1).
    mass = sum(p for _, p in points)
    values = [(z, p / mass) for z, p in points]
    centre = sum(z * p for z, p in values)
    scale = 1.0 / max(1.0, *(z - centre for z, _ in values))
    values = [((z - centre) * scale, p) for z, p in values]
    slack = min(slack, 1.0 - max(z for z, _ in values))
    expected = 0.0
    for path in itertools.product(values, repeat=steps):
        chance = math.prod(p for _, p in path)
        expected += chance * math.exp(fed(*(z + slack for z, _ in path)).value)
    assert expected <= steps * (1 + 1e-9)
    if slack == 0.0:
        assert expected == pytest.approx(steps)


def test_mean_run_length_at_the_boundary_is_at_least_the_threshold() -> None:
    # Whole requests right or wrong: the most dependent, hence the most jumpy null with mean exactly at the floor.
    rng, threshold, floor = np.random.default_rng(12), 200.0, 0.6
    runs = []
    for _ in range(400):
        evidence, n = Evidence(), 0
        while n == 0 or evidence.value < math.log(threshold):
            n += 1
            evidence.update(fall(float(rng.random() < floor), floor, rng.uniform(0.3, 1.0)), Mark(n, EMPTY))
        runs.append(n)
    error = np.std(runs) / math.sqrt(len(runs))
    assert np.mean(runs) >= threshold - 2 * error
    assert np.mean(runs) <= 2.5 * threshold  # and not because it never alarms


def test_a_million_hard_updates_overflow_nothing() -> None:
    down = Evidence()
    mark = Mark(0, EMPTY)
    worst = fall(0.0, 0.999)
    for _ in range(500_000):
        down.update(worst, mark)
    assert math.isfinite(down.value)
    assert down.value > 500_000 * math.log1p(BETS[-1] * 999) * 0.999
    for _ in range(500_000):
        down.update(1.0, mark)
    assert all(math.isfinite(x) for x in down.logs + down.peaks)
    assert Evidence.from_json(json.loads(json.dumps(down.to_json()))) == down


@given(st.lists(st.floats(-3.0, 1.0), min_size=1, max_size=20), st.data())
def test_evidence_never_grows_with_a_better_request(zs: list[float], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(zs) - 1))
    better = list(zs)
    better[at] = data.draw(st.floats(zs[at], 1.0))
    assert fed(*better).value <= fed(*zs).value + 1e-12


@pytest.mark.parametrize("z", [1.0000001, math.nan, -math.inf, math.inf])
def test_increments_that_void_the_promise_are_refused(z: float) -> None:
    with pytest.raises(ValueError, match="at most 1"):
        Evidence().update(z, Mark(0, EMPTY))


@given(st.lists(st.floats(-3.0, 1.0), max_size=30), st.integers(0, 30))
def test_a_restart_changes_nothing(zs: list[float], cut: int) -> None:
    evidence = fed(*zs[:cut])
    evidence = Evidence.from_json(json.loads(json.dumps(evidence.to_json())))
    for at, z in enumerate(zs[cut:], start=len(zs[:cut])):
        evidence.update(z, Mark(at, EMPTY))
    assert evidence == fed(*zs)
