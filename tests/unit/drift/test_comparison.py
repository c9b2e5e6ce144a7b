"""Old against new deployment: what counts as worse, how often it errs, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from driftwatch.drift.baseline import Baseline
from driftwatch.drift.comparison import compare
from driftwatch.drift.units import Unit


def learnt(rng: np.random.Generator, rate: float, requests: int = 300) -> Baseline:
    baseline = Baseline(0.06, requests, 0.0, narrow=False)
    for i in range(requests):
        tested = int(rng.integers(20, 200))
        hits = rng.binomial(tested, float(np.clip(rng.normal(rate, 0.11), 0, 1)))
        baseline.add(Unit(i, 0.0, 0.0, 1, float(hits), float(tested)))
    assert baseline.state == "frozen"
    return baseline


def test_worse_better_or_neither() -> None:
    rng = np.random.default_rng(1)
    old = learnt(rng, 0.7)
    worse = compare(old, learnt(rng, 0.55), tolerance=0.03)
    assert (worse.regressed, worse.improved) == (True, False)
    assert worse.difference == pytest.approx(-0.15, abs=0.03)
    assert worse.upper is not None
    assert worse.upper < -0.03
    same = compare(old, learnt(rng, 0.69), tolerance=0.03)
    assert (same.regressed, same.improved) == (False, False)
    assert compare(old, learnt(rng, 0.8), tolerance=0.03).improved
    assert compare(Baseline.given(0.8, 0.03), learnt(rng, 0.7), tolerance=0.03).regressed


def test_errs_as_rarely_as_it_says_at_the_tolerance_itself() -> None:
    rng = np.random.default_rng(2)
    wrong = covered = 0
    for _ in range(200):
        found = compare(learnt(rng, 0.7, 120), learnt(rng, 0.6, 120), tolerance=0.1, confidence=0.9)
        assert found.lower is not None
        assert found.upper is not None
        wrong += bool(found.regressed)
        covered += found.lower <= -0.1 <= found.upper
    assert wrong <= 200 * 0.05 + 3 * np.sqrt(200 * 0.05 * 0.95)
    assert covered >= 200 * 0.9 - 3 * np.sqrt(200 * 0.9 * 0.1)


def test_what_cannot_be_compared() -> None:
    given = Baseline.given(0.7, 0.03)
    with pytest.raises(ValueError, match="once both are frozen"):
        compare(given, Baseline(0.03), tolerance=0.03)
    other = Baseline.given(0.7, 0.03)
    other.half_weight = 0.0
    with pytest.raises(ValueError, match="different figures"):
        compare(given, other, tolerance=0.03)
