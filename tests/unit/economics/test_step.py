"""One pass: the two properties that the fixed point rests on, and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from driftwatch.economics.profile import CostProfile
from driftwatch.economics.step import StepTime, Timing

from .conftest import profiles, repeatable

batches = st.floats(0.01, 1e4)
gammas = st.integers(0, 8)


@repeatable
@given(profiles(), batches, batches, gammas)
def test_time_never_falls_and_time_per_sequence_never_rises(
    profile: CostProfile, one: float, other: float, gamma: int
) -> None:
    low, high = sorted((one, other))
    t = profile.target
    assert t.seconds(low, gamma) <= t.seconds(high, gamma)
    assert t.seconds(high, gamma) / high <= t.seconds(low, gamma) / low * (1 + 1e-12)


@repeatable
@given(profiles(), batches, gammas)
def test_more_tokens_never_take_less_time(profile: CostProfile, batch: float, gamma: int) -> None:
    """Unless it was measured so: a fit draws its stairs as high as they were, and they may fall."""
    heights = [seconds for _, seconds in profile.target.stairs]
    assume(heights == sorted(heights))
    assert profile.target.seconds(batch, gamma) <= profile.target.seconds(batch, gamma + 1)


def test_the_roofline_is_a_special_case() -> None:
    roofline = StepTime(roof=1e-4, knee=200.0)  # max(20 ms, 0.1 ms per token)
    assert roofline.seconds(1) == roofline.seconds(200) == pytest.approx(0.02)
    assert roofline.seconds(400) == pytest.approx(0.04)
    assert roofline.seconds(100, gamma=3) == pytest.approx(0.04)


def test_below_one_sequence_a_pass_still_runs_one() -> None:
    assert StepTime(0.01, 0.001).seconds(0.2) == StepTime(0.01, 0.001).seconds(1.0)


@repeatable
@given(profiles(), st.floats(0.1, 10.0), batches, gammas, st.floats(0.0, 1e5))
def test_scaling_scales_every_time(
    profile: CostProfile, factor: float, batch: float, gamma: int, context: float
) -> None:
    scaled = profile.target.scaled(factor).seconds(batch, gamma, context)
    assert scaled == pytest.approx(factor * profile.target.seconds(batch, gamma, context))


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_impossible_coefficients_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="slope must be finite and not negative"):
        StepTime(slope=value)


@pytest.mark.parametrize(
    "bad",
    [
        {"part": "target", "batch": 1, "seconds": 0.0},
        {"part": "target", "batch": 0.5, "seconds": 0.1},
        {"part": "target", "batch": 1, "seconds": 0.1, "context": -1.0},
        {"part": "draft", "batch": 1, "seconds": 0.1, "gamma": 1},
        {"part": "window", "batch": 1, "seconds": 0.1},
    ],
)
def test_impossible_timings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"pass|batch|context|timing"):
        Timing.from_json(bad)


def test_what_an_engine_exports_is_a_step_of_length_tokens() -> None:
    # 8 ms a token at an acceptance length of 2.5: windows of 20 ms.
    assert Timing.exported(batch=4, gamma=3, token_seconds=0.008, length=2.5) == Timing("window", 4, 0.02, 3)
    assert Timing.exported(batch=4, gamma=0, token_seconds=0.01) == Timing("target", 4, 0.01)
    with pytest.raises(ValueError, match=r"acceptance length 4\.5 is impossible with gamma 3"):
        Timing.exported(batch=4, gamma=3, token_seconds=0.008, length=4.5)


def test_round_trip() -> None:
    timing = Timing("target", 3.7, 0.1 / 3, 2, 512.0, 5)
    assert Timing.from_json(json.loads(json.dumps(timing.to_json()))) == timing
    step = StepTime(0.1 / 3, 1e-7 / 3, 1e-6, 123.4, 1e-4, 1e-9)
    assert StepTime.from_json(json.loads(json.dumps(step.to_json()))) == step
