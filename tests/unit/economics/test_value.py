"""Speedup and break-even: the documented example, the laws they keep, and how often their limits hold the truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.acceptance import DEFAULT_GAMMA, Weights, tally
from driftwatch.drift.interval import EMPTY, Estimate, ratio
from driftwatch.drift.sums import Sums
from driftwatch.economics.profile import Cost, CostProfile
from driftwatch.economics.range import Range
from driftwatch.economics.sizing import length_at
from driftwatch.economics.value import Value, best, end_to_end, gain, of_length, of_sums, speedup

from .conftest import entered, profiles, repeatable, tallies

lengths = st.floats(1.0, 9.0)
windows = st.floats(0.5, 20.0)
coverages = st.floats(0.01, 1.0)
gammas = st.integers(1, 8)
batches = st.floats(1.0, 500.0)


@pytest.mark.parametrize(
    ("rate", "as_hit_rate", "as_acceptance_rate"),
    [(0.80, 2.40, 3.00), (0.55, 1.51, 2.29), (0.25, 0.95, 1.43), (0.15, 0.84, 1.14)],
)
def test_the_worked_example(rate: float, as_hit_rate: float, as_acceptance_rate: float) -> None:
    """A draft ten times cheaper (c = 0.1), gamma = 4, free verification (v = 1): one number, two readings.

    Read as hit rate (accepted / tested, independent hits) a rate a gives the acceptance length (1 - a^5) / (1 - a).
    Read as acceptance rate (accepted / drafted) it gives 1 + 4 a. Both are divided by 4 * 0.1 + 1 = 1.4. Two tools
    that quote "acceptance .55" can mean a gain of a half or more than twice: say which rate is meant.
    """
    profile = entered(c=0.1)
    for length, expected in ((length_at(rate, 4), as_hit_rate), (1.0 + 4.0 * rate, as_acceptance_rate)):
        value = of_length(Estimate(length, None, None, 1, 0.0, 0.0), profile, gamma=4, batch=1)
        assert value.break_even == pytest.approx(1.4)
        assert value.speedup.value is not None
        assert round(value.speedup.value, 2) == expected
        assert not value.speedup.limited


@repeatable
@given(profiles(), gammas, batches, coverages)
def test_break_even_is_where_the_speedup_is_one(
    profile: CostProfile, gamma: int, batch: float, coverage: float
) -> None:
    window = profile.cost(batch, gamma).window
    assert speedup(window, window, coverage) == 1.0
    assert speedup(window * 1.01, window, coverage) > 1.0
    assert speedup(window * 0.99, window, coverage) < 1.0


@repeatable
@given(lengths, lengths, windows, coverages)
def test_speedup_rises_with_acceptance(one: float, other: float, window: float, coverage: float) -> None:
    low, high = sorted((one, other))
    assert speedup(low, window, coverage) <= speedup(high, window, coverage)


@repeatable
@given(profiles(), lengths, gammas, batches, st.floats(1.0, 10.0), st.floats(0.0, 0.1))
def test_more_cost_never_raises_the_value(
    profile: CostProfile, length: float, gamma: int, batch: float, factor: float, extra: float
) -> None:
    dearer_draft = replace(profile, draft=profile.drafting.scaled(factor))
    dearer_verification = replace(profile, target=replace(profile.target, extra=profile.target.extra + extra))
    before = speedup(length, profile.cost(batch, gamma).window)
    for dearer in (dearer_draft, dearer_verification):
        assert speedup(length, dearer.cost(batch, gamma).window) <= before * (1 + 1e-12)
        assert dearer.cost(batch, gamma).window >= profile.cost(batch, gamma).window * (1 - 1e-12)


@repeatable
@given(profiles(), st.lists(st.floats(0.0, 1.0), min_size=DEFAULT_GAMMA, max_size=DEFAULT_GAMMA), batches)
def test_the_best_gamma_is_the_arg_max(profile: CostProfile, rates: list[float], batch: float) -> None:
    values = [
        of_length(Estimate(1.0 + g * r, None, None, 1, 0.0, 0.0), profile, gamma=g, batch=batch)
        for g, r in enumerate(rates, start=1)
    ]
    chosen = best(values)
    assert chosen is not None
    assert chosen.speedup.value == max(value.speedup.value or 0.0 for value in values)
    assert all((gain(chosen, value) or 0.0) >= 0.0 for value in values)
    assert gain(chosen, chosen) == 0.0


def test_among_equals_the_fewest_proposals() -> None:
    values = [Value(g, Range(2.0), Cost(1, g, 0.0, 1.0, 0.0, 1.0, "entered")) for g in (5, 3, 4)]
    chosen = best(values)
    assert chosen is not None
    assert chosen.gamma == 3


def test_no_data_is_said() -> None:
    profile = entered()
    assert of_sums(Sums.zero(4), profile, batch=1) == []
    assert best([]) is None
    nothing = of_length(ratio(EMPTY), profile, gamma=4, batch=1)
    assert nothing.speedup == Range()
    assert best([nothing]) is None
    one = of_sums(Sums.request(tally(Weights(np.ones((20, 1))), 4)), profile, batch=1)
    assert [(v.gamma, v.speedup.limited) for v in one] == [(1, False), (2, False), (3, False), (4, False)]


def test_from_replayed_sums_every_gamma() -> None:
    # Everything is accepted: gamma + 1 tokens a window; 60 tokens divide by 2..6 alike.
    sums = Sums.request(tally(Weights(np.ones((60, 1))), 5))
    values = of_sums(sums, entered(0.1), batch=1)
    assert [v.speedup.value for v in values] == pytest.approx([(1 + g) / (1 + 0.1 * g) for g in range(1, 6)])
    assert [v.gamma for v in of_sums(sums, entered(), batch=1, gammas=(2, 4))] == [2, 4]


def test_the_cut_last_window_is_paid_in_full() -> None:
    """Two requests of 11 tokens, all accepted, gamma 4: windows of 5, 5 and 1 of 5 tokens. Three windows, not 2.2."""
    sums = Sums.zero(4)
    for _ in range(2):
        sums += Sums.request(tally(Weights(np.ones((11, 1))), 4))
    (value,) = of_sums(sums, entered(0.1), batch=1, gammas=[4])
    assert value.served.value == pytest.approx(11 / 3 / 1.4)
    assert value.length.value == pytest.approx(1 + (4 + 4 + 1) / 3)
    assert value.speedup.value == pytest.approx(4 / 1.4)
    assert value.served.value is not None
    assert value.speedup.value is not None
    assert value.speedup.value - value.served.value <= 1 / 3 / 1.4 + 1e-12  # one token a request
    assert value.served.lower is not None
    assert value.served.upper is not None
    assert value.served.lower < value.served.value < value.served.upper


@repeatable
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=2, max_size=6), gammas, st.floats(0.0, 0.5))
def test_served_is_what_the_walk_took(hits: list[list[bool]], gamma: int, c: float) -> None:
    parts = [tally(Weights(np.array(row, dtype=float)[:, None]), gamma) for row in hits]
    sums = Sums.zero(gamma)
    for part in parts:
        sums += Sums.request(part)
    (value,) = of_sums(sums, entered(c), batch=1, gammas=[gamma])
    taken = sum(float(part.windows[gamma - 1]) for part in parts) * (gamma * c + 1.0)
    assert value.served.value == pytest.approx(sum(part.tokens for part in parts) / taken)
    assert value.speedup.value is not None
    assert value.served.value is not None
    assert value.served.value <= value.speedup.value * (1 + 1e-12)


def test_plain_steps_between_windows_cost_and_give_one() -> None:
    """An n-gram draft that proposes at every second start, two tokens, all accepted: 3 tokens, then 1 plain."""
    proposals = np.tile([2, 0, 0, 0], 10)
    weights = Weights(np.ones((40, 2)), proposals)
    (value,) = of_sums(Sums.request(tally(weights, 2)), entered(0.0), batch=1, gammas=[2])
    assert value.coverage == 0.5
    assert value.proposals == 2.0
    assert value.length.value == 3.0
    assert value.speedup.value == pytest.approx(4 / 2)  # four tokens in a window and a plain step


@repeatable
@given(st.floats(0.0, 1.0), st.floats(0.05, 20.0), st.floats(0.05, 20.0))
def test_amdahl(share: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert end_to_end(low, share) <= end_to_end(high, share) * (1 + 1e-12)
    assert end_to_end(1.0, share) == pytest.approx(1.0)
    assert end_to_end(low, 0.0) == pytest.approx(low)
    assert end_to_end(high, 1.0) == 1.0
    if share > 1e-3:
        assert end_to_end(1e12, share) == pytest.approx(1.0 / share, rel=1e-6)
    with pytest.raises(ValueError, match="a share lies between"):
        end_to_end(2.0, 1.5)


def test_a_value_outside_the_measured_range_says_so() -> None:
    value = Value(4, Range(2.0), replace(entered().cost(1, 4), outside=("batch 64 lies outside",)))
    assert value.outside == ("batch 64 lies outside",)
    assert value.to_json()["outside"] == ["batch 64 lies outside"]


def test_limits_hold_the_truth_at_the_nominal_rate(rng: np.random.Generator) -> None:
    """2,000 cells of 40 requests whose hit rates differ: the limits of the speedup hold the true one 95 % of times.

    Truth: every request has as many windows, so the acceptance length is the mean of 1 + a + ... + a^4 over the rates,
    Beta(4, 2) distributed: E[a^k] = product of (4 + i) / (6 + i).
    """
    moments = np.cumprod([(4 + i) / (6 + i) for i in range(4)])
    profile = entered(c=0.1, slope=1e-4)
    cost = profile.cost(8, 4)
    truth = speedup(float(1.0 + moments.sum()), cost.window)
    runs, requests, starts = 2000, 40, 20
    rates = rng.beta(4, 2, (runs, requests))
    hits = rng.random((runs, requests, starts, 4)) < rates[:, :, None, None]
    accepted = np.cumprod(hits, axis=3).sum(axis=(2, 3)).astype(float)
    held = 0
    for row in accepted:
        sums = EMPTY
        for y in row:
            sums = sums.with_unit(float(y), float(starts))
        value = of_length(ratio(sums, low=1.0, high=5.0, shift=1.0), profile, gamma=4, batch=8)
        lower, upper = value.speedup.lower, value.speedup.upper
        assert lower is not None
        assert upper is not None
        held += lower <= truth <= upper
    assert held / runs == pytest.approx(0.95, abs=0.015)


def test_gammas_of_one_cell_share_their_requests(rng: np.random.Generator) -> None:
    sums = Sums.zero(4)
    for one in tallies(rng, rng.beta(8, 2, 60), 30, 4):
        sums += Sums.request(one)
    values = of_sums(sums, entered(0.05), batch=4)
    assert [value.requests for value in values] == [60] * 4
    assert all(value.speedup.limited for value in values)
    found = [value.length.value or 0.0 for value in values]
    assert found == sorted(found)
