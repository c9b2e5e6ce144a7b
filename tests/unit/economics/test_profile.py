"""A profile: where it comes from is kept, where it ends is said, and it travels as JSON without loss."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.step import StepTime, Timing
from driftwatch.errors import ProfileError

from .conftest import BOUND, entered, profiles, repeatable

POINTS = [
    *(Timing("target", b, 0.02 + 1e-4 * b * (1 + g), g, 512.0) for b in (1, 4, 16, 32) for g in (0, 2, 5)),
    *(Timing("draft", b, 0.002 + 1e-5 * b, context=512.0) for b in (1, 4, 16)),
]
MEASURED = CostProfile.fitted(BOUND, POINTS)


def test_costs_are_in_units_of_one_plain_step() -> None:
    cost = MEASURED.cost(8, 5)
    assert cost.draft == pytest.approx((0.002 + 8e-5) / (0.02 + 8e-4))
    assert cost.verify == pytest.approx((0.02 + 8e-4 * 6) / (0.02 + 8e-4))
    assert cost.window == pytest.approx(5 * cost.draft + cost.verify)
    assert cost.window_s == MEASURED.window_s(8, 5)
    assert cost.plain_s == MEASURED.plain_s(8)
    assert cost.outside == ()


def test_what_lies_outside_is_said() -> None:
    # Batches of the target go to 32, of the draft to 16: both are needed.
    assert MEASURED.batches == (1, 16)
    assert MEASURED.cost(16.5, 5).outside == ("batch 16.5 lies outside what was measured, 1 to 16",)
    assert MEASURED.cost(4, 6).outside == ("gamma 6 lies outside what was measured, 2 to 5",)
    assert MEASURED.cost(4, 1).outside == ("gamma 1 lies outside what was measured, 2 to 5",)
    assert MEASURED.cost(4, 1.5).outside == ()  # a mean of plain steps and windows
    assert MEASURED.cost(4, 5, 2048.0).outside == ("context 2048 lies outside what was measured, 512 to 512",)
    assert MEASURED.cost(0.3, 5).outside == ()  # an engine that idles
    assert len(MEASURED.cost(64, 9, 0.0).outside) == 3


def test_a_supposed_draft_needs_no_batch_of_its_own() -> None:
    supposed = CostProfile.fitted(BOUND, [p for p in POINTS if p.part == "target"]).with_draft(0.05)
    assert supposed.cost(32, 5).draft == pytest.approx(0.05)
    assert supposed.cost(32, 5).outside == ()
    assert supposed.origin == supposed.cost(32, 5).origin == "measured, draft entered"


def test_where_it_comes_from_is_kept() -> None:
    assert MEASURED.origin == MEASURED.cost(4, 5).origin == "measured"
    exported = [Timing.exported(batch=b, gamma=g, token_seconds=0.02 + g / 500) for b in (1, 8) for g in (0, 3)]
    engine = CostProfile.fitted(BOUND, exported, "engine")
    assert (engine.provenance, engine.draft_provenance) == ("engine", "engine")
    assert engine.cost(4, 3).window == pytest.approx(0.026 / 0.02)
    assert engine.cost(4, 4).outside == ("gamma 4 lies outside what was measured, 3 to 3",)
    assert entered().origin == "entered"
    with pytest.raises(ProfileError, match="provenance 'guessed' is none of measured, engine, entered"):
        CostProfile.from_json({**entered().to_json(), "provenance": "guessed"})


def test_what_it_is_bound_to() -> None:
    assert BOUND.differences(BOUND) == ()
    other = Bound("GPU-A", "float8", "target-1", "draft-2")
    assert BOUND.differences(other) == (
        "dtype is float8, the profile is of bfloat16",
        "draft is draft-2, the profile is of draft-1",
    )


def test_tensor_parallelism_is_a_factor() -> None:
    two = MEASURED.on_gpus(2)  # no loss in the target, no gain in the draft
    assert two.cost(8, 4).draft == pytest.approx(2 * MEASURED.cost(8, 4).draft)
    assert two.cost(8, 4).verify == pytest.approx(MEASURED.cost(8, 4).verify)
    assert two.plain_s(8) == pytest.approx(MEASURED.plain_s(8) / 2)
    four = two.on_gpus(2, target=1.6, draft=1.25)
    assert four.parallel == (4, 3.2, 1.25)
    assert four.cost(8, 4).draft == pytest.approx(3.2 / 1.25 * MEASURED.cost(8, 4).draft)
    with pytest.raises(ValueError, match="must be positive"):
        MEASURED.on_gpus(0)


def test_what_cannot_be_said_is_refused() -> None:
    plain = CostProfile.entered(BOUND, StepTime(0.02))
    with pytest.raises(ProfileError, match="has no draft"):
        plain.cost(1, 4)
    with pytest.raises(ProfileError, match="no plain decode step"):
        CostProfile.fitted(BOUND, [Timing("window", 4, 0.03, 3)], "engine")
    with pytest.raises(ProfileError, match="must take some time"):
        CostProfile.entered(BOUND, StepTime())


@repeatable
@given(profiles())
def test_round_trip_of_entered_ones(profile: CostProfile) -> None:
    assert CostProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_round_trip_of_fitted_ones() -> None:
    profile = MEASURED.on_gpus(3, target=2.7)
    back = CostProfile.from_json(json.loads(json.dumps(profile.to_json())))
    assert back == profile
    assert back.cost(7, 5) == profile.cost(7, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, this version reads 1"),
        ({"target": {"floor": "fast"}}, "not a cost profile: TypeError"),
        ({"target": {"floor": -1.0}}, "not a cost profile: ValueError"),
        ({"bound": {}}, "not a cost profile: TypeError"),
    ],
)
def test_other_files_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        CostProfile.from_json({**MEASURED.to_json(), **change})
    with pytest.raises(ProfileError, match="KeyError"):
        CostProfile.from_json({})
