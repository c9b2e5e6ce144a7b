"""Room for a gain, the hit rate it takes, and the batch at which the sign changes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.economics.profile import CostProfile
from driftwatch.economics.sizing import flip_batch, hit_rate_for, length_at, room
from driftwatch.economics.step import StepTime
from driftwatch.economics.value import end_to_end, speedup

from .conftest import BOUND, entered, profiles, repeatable

gammas = st.integers(1, 8)


@repeatable
@given(st.floats(0.0, 1.0), gammas)
def test_length_is_the_sum_of_powers(rate: float, gamma: int) -> None:
    assert length_at(rate, gamma) == pytest.approx(sum(rate**k for k in range(gamma + 1)), rel=1e-12)


@repeatable
@given(st.floats(0.0, 1.0), gammas)
def test_the_hit_rate_for_a_length_gives_that_length(rate: float, gamma: int) -> None:
    length = length_at(rate, gamma)
    back = hit_rate_for(length, gamma)
    assert back is not None
    assert length_at(back, gamma) == pytest.approx(length, rel=1e-12)


def test_lengths_out_of_reach() -> None:
    assert hit_rate_for(5.01, 4) is None
    assert hit_rate_for(0.8, 4) == 0.0
    assert hit_rate_for(5.0, 4) == 1.0
    with pytest.raises(ValueError, match="a hit rate lies between"):
        length_at(1.2, 4)


def test_clustered_hits_need_more() -> None:
    """Half of the windows all right, half all wrong: 4 accepted of 4 + 1 tested, but a length of 3.00."""
    assert 4 / (4 + 1) == 0.8
    assert 1 + (4 + 0) / 2 == 3.0
    assert length_at(0.8, 4) == pytest.approx(3.36, abs=0.005)


@repeatable
@given(profiles(), st.floats(1.0, 500.0), st.floats(0.0, 0.99), st.floats(1.0, 2.0))
def test_needs_and_ceilings(profile: CostProfile, batch: float, prefill: float, wanted: float) -> None:
    found = room(profile, batch=batch, prefill_share=prefill, wanted=wanted)
    assert found.ceiling <= found.free_ceiling * (1 + 1e-12)
    assert found.ceiling >= 1.0 - 1e-12
    for need in found.needs:
        window = profile.cost(batch, need.gamma).window
        if need.hit_rate is None:
            assert need.ceiling < 1.0 + 1e-12
            assert need.hit_rate_for_gain is None
        elif need.hit_rate > 0.0:
            assert speedup(length_at(need.hit_rate, need.gamma), window) == pytest.approx(1.0)
        if need.hit_rate_for_gain:
            gained = speedup(length_at(need.hit_rate_for_gain, need.gamma), window)
            assert end_to_end(gained, prefill) == pytest.approx(wanted)
            assert need.hit_rate is not None
            assert need.hit_rate_for_gain >= need.hit_rate


def test_is_there_room() -> None:
    # c = .1, v = 1, a fifth of the time in prefill: 5 tokens for 1.4 steps at gamma 4.
    found = room(entered(0.1), batch=1, prefill_share=0.2, gammas=[4])
    assert found.decode_share == 0.8
    assert found.free_ceiling == 5.0
    assert found.ceiling == pytest.approx(1 / (0.2 + 0.8 * 1.4 / 5))
    assert found.easiest is not None
    assert found.easiest.break_even == pytest.approx(1.4)
    assert found.easiest.hit_rate == pytest.approx(0.287, abs=0.001)
    assert found.to_json()["needs"][0]["gamma"] == 4

    # Compute-bound: every verified token costs as much as a plain one, so nothing pays.
    bound = CostProfile.entered(BOUND, StepTime(roof=1e-3, knee=1.0)).with_draft(0.05)
    none = room(bound, batch=64, prefill_share=0.0)
    assert none.easiest is None
    assert none.ceiling == 1.0
    assert none.free_ceiling == math.inf
    assert none.to_json()["free_ceiling"] is None

    # Nearly everything is prefill: no draft gives a tenth.
    assert room(entered(0.0), batch=1, prefill_share=0.95, gammas=[4]).needs[0].hit_rate_for_gain is None


def test_the_batch_at_which_it_stops_paying() -> None:
    # t = max(20 ms, .1 ms n): free up to 200 tokens. gamma 3: window of 4 B tokens, and 3 drafts of a tenth.
    profile = CostProfile.entered(BOUND, StepTime(roof=1e-4, knee=200.0)).with_draft(0.1)
    # Length 2: 2 * 20 ms = 6 ms + .4 ms B at B = 85.
    assert flip_batch(profile, 2.0, gamma=3, batch=1) == pytest.approx(85.0, rel=1e-6)
    assert flip_batch(profile, 1.2, gamma=3, batch=1) is None  # never pays: 1.3 from the start
    assert flip_batch(entered(0.1), 2.0, gamma=3, batch=1) is None  # always pays: verification is free


def test_the_nearest_of_three_flips() -> None:
    """A slow draft on long contexts: reading them dilutes c, then verification shows, then the contexts rule again.

    t = .01 + .001 max(200, n) + .001 B, a draft of .165, length 1.75, gamma 1. Below 100 sequences the gain is
    .75 (.21 + .001 B) - .165, zero at B = 10; up to 200 it falls by .00125 a sequence from .0675, to zero at B = 154;
    from -.0575 at 200 on it rises by .0005, to zero at B = 315.
    """
    target = StepTime(0.01, roof=1e-3, knee=200.0, context=1e-6)
    profile = CostProfile.entered(BOUND, target, StepTime(0.165))
    for batch, expected in ((1, 10.0), (120, 154.0), (1000, 315.0)):
        assert flip_batch(profile, 1.75, gamma=1, batch=batch, context=1000.0) == pytest.approx(expected)
    assert profile.cost(10.0, 1, 1000.0).window == pytest.approx(1.75)
