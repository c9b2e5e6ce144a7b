"""The fit: exact on exact points, honest about its error on noisy ones, and never negative."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.economics.fit import fit, nonnegative
from driftwatch.economics.profile import CostProfile
from driftwatch.economics.step import StepTime, Timing

from .conftest import BOUND, profiles, repeatable

BATCHES = (1, 2, 4, 8, 16, 32, 64)


def measured(
    target: StepTime,
    draft: StepTime,
    rng: np.random.Generator | None = None,
    noise: float = 0.0,
    contexts: tuple[float, ...] = (512.0,),
) -> list[Timing]:
    def noisy(seconds: float) -> float:
        return seconds if rng is None else float(seconds * np.exp(rng.normal(0.0, noise)))

    points = []
    for batch in BATCHES:
        for context in contexts:
            points.append(Timing("draft", batch, noisy(draft.seconds(batch, 0, context)), context=context))
            for gamma in (0, 1, 3, 5, 8):
                seconds = noisy(target.seconds(batch, gamma, context))
                points.append(Timing("target", batch, seconds, gamma, context))
    return points


def ratios(target: StepTime, draft: StepTime, batch: float, gamma: int) -> tuple[float, float]:
    plain = target.seconds(batch, 0, 512.0)
    return draft.seconds(batch, 0, 512.0) / plain, target.seconds(batch, gamma, 512.0) / plain


@settings(repeatable, max_examples=15)
@given(profiles(), st.sampled_from(BATCHES), st.sampled_from((1, 3, 5, 8)))
def test_exact_points_give_their_costs_back(profile: CostProfile, batch: int, gamma: int) -> None:
    # The knee is on a grid, so points around it are off by up to a fraction of the grid's step.
    found = fit(measured(profile.target, profile.drafting))
    assert found.draft is not None
    assert found.error.rms < 0.01
    expected = ratios(profile.target, profile.drafting, batch, gamma)
    assert ratios(found.target, found.draft, batch, gamma) == pytest.approx(expected, rel=0.06)


def test_a_plain_sum_buys_no_knee() -> None:
    target, draft = StepTime(0.02, 1e-4, extra=1e-3, context=2e-8), StepTime(0.002, 1e-5)
    found = fit(measured(target, draft, contexts=(512.0, 4096.0)))
    assert found.draft is not None
    for part, truth in ((found.target, target), (found.draft, draft)):
        numbers = [{k: v for k, v in one.to_json().items() if k != "stairs"} for one in (part, truth)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-6, abs=1e-12)
        assert part.stairs == ()
    assert found.error.rms < 1e-9


def test_a_roofline_is_found_with_its_knee() -> None:
    found = fit(measured(StepTime(roof=1e-4, knee=200.0), StepTime(0.002)))
    assert found.target.knee == pytest.approx(200.0, rel=0.1)
    assert found.target.seconds(1) == pytest.approx(0.02, rel=0.02)
    assert found.target.seconds(64, 8) == pytest.approx(0.0576, rel=0.02)
    assert found.error.rms < 0.02


def test_tiles_are_found_as_stairs_and_no_line_is_drawn_through_them() -> None:
    # Medians of a CPU thread, 135 M parameters in float32, at two contexts: a window of four costs a tile more.
    seconds = {
        32: {0: 0.05375, 1: 0.06381, 2: 0.06850, 3: 0.09820, 5: 0.10306, 8: 0.13564},
        128: {0: 0.05924, 1: 0.06765, 2: 0.07344, 3: 0.10393, 5: 0.11834, 8: 0.13858},
    }
    points = [Timing("target", 1, s, gamma, context) for context in seconds for gamma, s in seconds[context].items()]
    found = fit(points)
    assert abs(found.error.worst) < 0.05
    assert [gamma for gamma, _ in found.target.stairs] == [1, 2, 3, 5, 8]
    assert StepTime.from_json(json.loads(json.dumps(found.target.to_json()))) == found.target
    doubled = found.target.scaled(2.0)
    for gamma in (1, 2, 2.5, 3, 8, 20):
        assert doubled.seconds(1, gamma, 80.0) == pytest.approx(2.0 * found.target.seconds(1, gamma, 80.0))
    between = [found.target.seconds(1, gamma, 80.0) for gamma in (2, 2.5, 3)]
    assert between[1] == pytest.approx((between[0] + between[2]) / 2.0)


def test_the_reported_error_is_the_noise(rng: np.random.Generator) -> None:
    # 4 % of noise on every point: the left-out error says so, the fit's own residuals flatter it.
    own, left_out = [], []
    for _ in range(10):
        error = fit(measured(StepTime(0.02, 1e-5, 5e-5, 60.0, 1e-3), StepTime(0.002, 1e-5), rng, 0.04)).error
        assert error.left_out is not None
        assert error.points == 42
        assert abs(error.worst) >= error.rms
        assert error.left_out > error.rms
        own.append(error.rms)
        left_out.append(error.left_out)
    assert np.mean(left_out) == pytest.approx(0.04, rel=0.1)
    assert np.mean(own) < 0.04


def test_a_point_that_alone_fixes_a_coefficient_leaves_no_left_out_error() -> None:
    error = fit([Timing("target", 1, 0.02), Timing("draft", 1, 0.002)]).error
    assert error.left_out is None
    assert error.unchecked == error.points == 2
    assert error.rms == pytest.approx(0.0, abs=1e-12)
    # The draft's second point can be spared, and is predicted from the first: 10 % off.
    error = fit([Timing("target", 1, 0.02), Timing("draft", 1, 0.002), Timing("draft", 1, 0.0022)]).error
    assert error.unchecked == 1
    assert error.left_out == pytest.approx(0.1, rel=0.06)


def test_repeats_are_weights() -> None:
    # Two contradicting values for one point: 9 repeats pull nine times as hard, in relative terms.
    found = fit([Timing("target", 1, 0.020, repeats=9), Timing("target", 1, 0.030, repeats=1)])
    weights = np.array([9 / 0.020**2, 1 / 0.030**2])
    assert found.target.seconds(1) == pytest.approx(float(weights @ [0.020, 0.030] / weights.sum()))


def test_windows_of_an_engine_and_its_plain_steps_fit_together(rng: np.random.Generator) -> None:
    target, draft = StepTime(0.02, 1e-4), StepTime(0.002, 1e-5)
    points = []
    for batch in rng.uniform(1, 64, 40):
        points.append(Timing.exported(batch=batch, gamma=0, token_seconds=target.seconds(batch)))
        for gamma in (2, 5):
            window = gamma * draft.seconds(batch) + target.seconds(batch, gamma)
            points.append(Timing.exported(batch=batch, gamma=gamma, token_seconds=window / 1.7, length=1.7))
    found = fit(points)
    assert found.draft is not None
    assert ratios(found.target, found.draft, 20.0, 4) == pytest.approx(ratios(target, draft, 20.0, 4), rel=1e-6)


def test_without_a_plain_step_there_is_no_fit() -> None:
    with pytest.raises(ValueError, match="no plain decode step"):
        fit([Timing("window", 4, 0.03, 3), Timing("draft", 4, 0.002)])


@settings(repeatable, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(6, 12))
def test_nonnegative_least_squares_meets_its_optimality_conditions(seed: int, columns: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    x = nonnegative(a, b)
    gradient = a.T @ (b - a @ x)
    assert (x >= 0.0).all()
    assert (gradient <= 1e-8).all()  # no coefficient at zero wants to grow
    assert np.abs(gradient[x > 0.0]).max(initial=0.0) <= 1e-8  # and none in use wants to move


@pytest.mark.parametrize("window", [0.9, 1.2, 1.7, 2.5, 6.0])
def test_one_batch_of_two_engines_gives_a_profile_of_that_batch(window: float) -> None:
    """Nothing varies: whatever the split into coefficients, both times come back, and a plain step takes time."""
    points = [
        Timing.exported(batch=2.0, gamma=0, token_seconds=0.004, context=83.0),
        Timing.exported(batch=2.0, gamma=3, token_seconds=0.004 * window / 2.0, length=2.0, context=83.0),
    ]
    found = CostProfile.fitted(BOUND, points, "engine")
    cost = found.cost(2.0, 3, 83.0)
    assert not cost.outside
    if window >= 1.0:  # no window is cheaper than a step: then the two are fitted alike
        assert cost.plain_s == pytest.approx(0.004)
        assert cost.window == pytest.approx(window)
    assert found.target.seconds(1.0) > 0.0
