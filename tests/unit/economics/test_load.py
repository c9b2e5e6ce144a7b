"""The batch at equal arrival rate: it solves its equation, it is the only one, and saturation is no number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from driftwatch.economics.load import UNBOUNDED, at_rate, settle
from driftwatch.economics.profile import CostProfile
from driftwatch.economics.range import Range
from driftwatch.economics.step import StepTime
from driftwatch.economics.value import Value

from .conftest import BOUND, entered, profiles, repeatable

gammas = st.integers(1, 8)
shares = st.floats(0.01, 0.98)
tokens = st.floats(1.0, 5000.0)
coverages = st.floats(0.05, 1.0)


def token_time(profile: CostProfile, length: float, gamma: int, coverage: float, batch: float) -> float:
    step = coverage * profile.window_s(batch, gamma) + (1 - coverage) * profile.plain_s(batch)
    return step / (coverage * length + 1 - coverage)


@repeatable
@given(profiles(), gammas, st.floats(0.0, 1.0), coverages, shares, tokens)
def test_the_solution_satisfies_its_equation_and_is_the_only_one(
    profile: CostProfile, gamma: int, hit: float, coverage: float, share: float, count: float
) -> None:
    def f(batch: float) -> float:
        return token_time(profile, 1 + hit * gamma, gamma, coverage, batch)

    capacity = min(settle(f, 1e-9, count).capacity, 1e6)
    rate = share * capacity
    found = settle(f, rate, count)
    assert found.batch is not None
    assert found.token_s is not None
    assert found.batch == pytest.approx(rate * count * f(1.0 + found.batch), rel=1e-6)
    # B - rate N f(B) is negative before the solution and positive behind it, on the whole axis.
    for factor in np.geomspace(1e-4, 1e4, 41):
        batch = found.batch * factor
        excess = batch - rate * count * f(1.0 + batch)
        if abs(factor - 1) > 1e-3 and batch < UNBOUNDED / 10:
            assert (excess > 0) == (factor > 1) or abs(excess) < 1e-6 * batch


@repeatable
@given(profiles(), gammas, st.floats(0.0, 1.0), st.floats(0.0, 1.0), shares, tokens)
def test_a_longer_acceptance_length_empties_the_batch(
    profile: CostProfile, gamma: int, one: float, other: float, share: float, count: float
) -> None:
    low, high = (1 + gamma * hit for hit in sorted((one, other)))
    assume(high > low + 1e-6)
    middle = 0.5 * (low + high)
    carried = settle(profile.plain_s, 1e-9, count).capacity
    found = at_rate(profile, Range(middle, low, high), gamma=gamma, rate=share * min(carried, 1e6), tokens=count)
    numbers = [x for x in (found.speedup.lower, found.speedup.value, found.speedup.upper) if x is not None]
    assert numbers == sorted(numbers)
    if not found.speculative.saturated:
        assert found.plain.batch is not None
        assert found.speculative.batch is not None
        # Little's law: at one rate, time per token is proportional to the batch.
        assert found.speedup.value == pytest.approx(found.plain.batch / found.speculative.batch, rel=1e-6)


@repeatable
@given(profiles(), gammas, st.floats(0.0, 1.0), shares, tokens)
def test_break_even_at_equal_batch_is_break_even_at_equal_rate(
    profile: CostProfile, gamma: int, hit: float, share: float, count: float
) -> None:
    """If both take the same time per token at the batch that plain requests see, speculation settles there as well."""
    rate = share * min(settle(profile.plain_s, 1e-9, count).capacity, 1e6)
    plain = settle(profile.plain_s, rate, count).seen
    assert plain is not None
    length = profile.cost(plain, gamma).window
    found = at_rate(profile, Range(length), gamma=gamma, rate=rate, tokens=count)
    assert found.speedup.value == pytest.approx(1.0, rel=1e-6)


@repeatable
@given(profiles(), gammas, st.floats(0.0, 1.0), shares, tokens, st.floats(1.0, 5.0), st.floats(0.0, 0.05))
def test_more_cost_never_raises_the_value(
    profile: CostProfile, gamma: int, hit: float, share: float, count: float, factor: float, extra: float
) -> None:
    rate = share * min(settle(profile.plain_s, 1e-9, count).capacity, 1e6)
    dearer = (
        replace(profile, draft=profile.drafting.scaled(factor)),
        replace(profile, target=replace(profile.target, extra=profile.target.extra + extra)),
    )
    before = at_rate(profile, Range(1 + hit * gamma), gamma=gamma, rate=rate, tokens=count)
    for other in dearer:
        after = at_rate(other, Range(1 + hit * gamma), gamma=gamma, rate=rate, tokens=count)
        assert after.speculative.capacity <= before.speculative.capacity * (1 + 1e-9)
        if after.speedup.value is not None:
            assert before.speedup.value is not None
            assert after.speedup.value <= before.speedup.value * (1 + 1e-9)


def stationary_mean(token_s: Callable[[float], float], rate: float, count: float) -> float:
    """Mean of the symmetric queue: p(n) / p(n - 1) = rate / (n / (N f(n)))."""
    n = np.arange(1, 4000)
    logs = np.concatenate([[0.0], np.cumsum([math.log(rate * count * token_s(float(k)) / k) for k in n])])
    share = np.exp(logs - logs.max())
    return float(np.arange(4000) @ share / share.sum())


def test_the_solution_is_the_stationary_mean_where_times_are_linear() -> None:
    for rate in (0.1, 3.0, 9.0, 15.0):
        expected = stationary_mean(lambda batch: 0.02 + 5e-4 * batch, rate, 100)
        assert settle(lambda batch: 0.02 + 5e-4 * batch, rate, 100).batch == pytest.approx(expected, rel=1e-9)


def test_with_a_knee_it_is_close() -> None:
    """A roofline, the sharpest of knees: low by 2 % up to a utilisation of .8, and by less than a tenth at .9."""
    gaps = []
    for share in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9):
        rate = share / (100 * 5e-4)
        found = settle(lambda batch: 5e-4 * max(40.0, batch), rate, 100).batch
        assert found is not None
        gaps.append(found / stationary_mean(lambda batch: 5e-4 * max(40.0, batch), rate, 100) - 1.0)
    assert max(map(abs, gaps[:-1])) < 0.02
    assert -0.1 < gaps[-1] < 0.0


def test_a_simulated_engine_settles_there(rng: np.random.Generator) -> None:
    """Poisson arrivals, continuous batching, step by step: mean running, and the gain in time per token."""
    profile = CostProfile.entered(BOUND, StepTime(0.02, 5e-4)).with_draft(0.05)
    gamma, hit, rate, count = 3, 0.7, 4.0, 200
    length = sum(hit**k for k in range(gamma + 1))
    expected = at_rate(profile, Range(length), gamma=gamma, rate=rate, tokens=count)
    simulated = []
    for speculative, load in ((False, expected.plain), (True, expected.speculative)):
        left, now, due, area = np.zeros(0), 0.0, rng.exponential(1 / rate), 0.0
        for _ in range(60_000):
            while due <= now:
                left, due = np.append(left, float(count)), due + rng.exponential(1 / rate)
            if not len(left):
                now = due
                continue
            batch = len(left)
            step = profile.window_s(batch, gamma) if speculative else profile.plain_s(batch)
            now, area = now + step, area + step * batch
            left = left - (np.minimum(rng.geometric(1 - hit, batch), gamma + 1) if speculative else 1)
            left = left[left > 0]
        simulated.append(area / now)
        # A little remains: the last window of a request gives more than it needs.
        assert load.batch == pytest.approx(area / now, rel=0.05)
    assert expected.speedup.value == pytest.approx(simulated[0] / simulated[1], rel=0.06)


def test_worked_by_hand() -> None:
    # t(b) = 20 ms + 1 ms b, 10 requests/s of 10 tokens: B = 100 (.021 + .001 B) = 2.1 / .9; capacity 1 / (10 * .001).
    found = settle(lambda batch: 0.02 + 0.001 * batch, 10.0, 10.0)
    assert found.batch == pytest.approx(2.1 / 0.9)
    assert found.seen == pytest.approx(3.0 / 0.9)
    assert found.token_s == pytest.approx(0.02 + 0.003 / 0.9)
    assert found.capacity == pytest.approx(100.0, rel=1e-6)
    assert not found.saturated


def test_speculation_gains_more_at_equal_rate_than_at_equal_batch() -> None:
    """It empties the batch, which makes steps faster still: comparing at equal batch undersells it."""
    profile = CostProfile.entered(BOUND, StepTime(0.02, 5e-4)).with_draft(0.05)
    found = at_rate(profile, Range(3.0), gamma=3, rate=4.0, tokens=300)
    assert found.plain.seen is not None
    assert found.speedup.value is not None
    same_batch = 3.0 / profile.cost(found.plain.seen, 3).window
    assert found.speedup.value > same_batch > 1.0
    # What a plain step costs beside windows is below 1 for the same reason.
    assert found.plain_step is not None
    assert found.plain_step < 1.0
    assert found.window is not None
    assert found.window / 3.0 == pytest.approx(1 / found.speedup.value)


def test_saturation_is_a_word_and_not_a_number() -> None:
    profile = CostProfile.entered(BOUND, StepTime(0.02, 1e-3)).with_draft(0.05)
    # Verification of 5 tokens costs five slopes: plain carries 1 / .001 = 1,000 tokens/s, speculation less.
    found = at_rate(profile, Range(2.0, 1.5, 2.5), gamma=4, rate=9.0, tokens=100)
    assert found.plain.batch == pytest.approx(900 * 0.021 / 0.1)
    assert found.speculative.saturated
    assert found.speculative.to_json()["batch"] is None
    assert found.speedup == Range()
    assert found.saturation is not None
    assert found.saturation.startswith("speculation saturates at")
    assert found.to_json()["saturation"] == found.saturation

    free = CostProfile.entered(BOUND, StepTime(0.02, roof=1e-3, knee=64)).with_draft(0.05)
    both = at_rate(free, Range(2.0, 1.5, 2.5), gamma=4, rate=20.0, tokens=100)
    assert both.saturation is not None
    assert "saturate both ways" in both.saturation


def test_plain_may_saturate_where_speculation_does_not() -> None:
    # With at most 8 running sequences, free verification doubles what they carry.
    found = at_rate(entered(0.0), Range(2.0, 1.9, 2.1), gamma=4, rate=5.0, tokens=100, max_batch=8)
    assert found.plain.saturated
    assert found.plain.capacity == pytest.approx(8 / (100 * 0.02))
    assert not found.speculative.saturated
    assert found.saturation is not None
    assert found.saturation.startswith("plain decoding saturates at 4 requests/s")
    assert Value(4, Range(2.0, 1.9, 2.1), entered().cost(8, 4), at_rate=found).judged == Range(
        math.inf, math.inf, math.inf
    )


def test_a_limit_may_saturate_alone() -> None:
    found = at_rate(entered(0.0), Range(1.0, 0.5, 2.0), gamma=4, rate=3.0, tokens=100, max_batch=8)
    assert found.speedup.value == pytest.approx(1.0)
    assert found.speedup.lower is None
    assert found.saturation == "at its lower limit speculation saturates at 2 requests/s"
    judged = Value(4, Range(1.0, 0.5, 2.0), entered().cost(8, 4), at_rate=found).judged
    assert judged.lower == 0.0
    assert judged.to_json() == pytest.approx([1.0, 0.0, 2.0])


@pytest.mark.parametrize(("rate", "count", "most"), [(0.0, 10, None), (1.0, 0.0, None), (1.0, 10, 0.5)])
def test_impossible_arrivals_are_refused(rate: float, count: float, most: float | None) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        settle(lambda batch: 0.02, rate, count, most)


def test_without_an_acceptance_length_there_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="nothing was replayed"):
        at_rate(entered(), Range(), gamma=4, rate=1.0, tokens=10)
