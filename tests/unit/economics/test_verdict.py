"""The verdict on a segment: each decision from data that call for it, with what would turn it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from driftwatch.drift.interval import Moments, ratio
from driftwatch.drift.sums import Sums
from driftwatch.economics.profile import Cost, CostProfile
from driftwatch.economics.range import Range
from driftwatch.economics.sizing import length_at
from driftwatch.economics.step import Part, StepTime, Timing
from driftwatch.economics.tail import tail
from driftwatch.economics.value import Value, of_sums
from driftwatch.economics.verdict import margin_of, of_measured, verdict

from .conftest import BOUND, entered, tallies


def segment(
    rng: np.random.Generator,
    profile: CostProfile,
    rate: float,
    requests: int = 80,
    *,
    batch: float = 1.0,
    gamma: int = 5,
) -> list[Value]:
    spread = rng.beta(rate * 20, (1 - rate) * 20, requests)
    sums = Sums.zero(gamma)
    for one in tallies(rng, spread, 25, gamma):
        sums += Sums.request(one)
    return of_sums(sums, profile, batch=batch)


def test_use(rng: np.random.Generator) -> None:
    profile = entered(0.1)
    values = segment(rng, profile, 0.6)
    found = verdict(values, profile, gamma=3)
    assert (found.decision, found.gamma) == ("use", 3)
    assert found.reasons[0].startswith("gamma 3: speedup 1.")
    assert found.reasons[0].endswith("at batch 1, costs entered")
    assert found.flip is not None
    assert found.flip.length == pytest.approx(1.3)
    assert found.flip.hit_rate is not None
    assert found.flip.hit_rate_now is not None
    assert found.flip.hit_rate < found.flip.hit_rate_now
    assert length_at(found.flip.hit_rate, 3) == pytest.approx(1.3)
    assert found.flip.batch is None
    assert json.loads(json.dumps(found.to_json()))["decision"] == "use"


def test_use_with_another_gamma(rng: np.random.Generator) -> None:
    profile = entered(0.15)
    values = segment(rng, profile, 0.92, 150)
    found = verdict(values, profile, gamma=1)
    assert (found.decision, found.gamma) == ("use_with_gamma", 5)
    assert "over the configured gamma 1" in found.reasons[1]
    # A demand for a greater gain keeps what is configured.
    assert verdict(values, profile, gamma=1, least_gain=2.0).decision == "use"


def test_the_configured_gamma_loses_but_another_pays(rng: np.random.Generator) -> None:
    profile = entered(0.3)
    found = verdict(segment(rng, profile, 0.55, 200), profile, gamma=5)
    assert (found.decision, found.gamma) == ("use_with_gamma", 1)
    assert found.reasons[1].startswith("the configured one speedup 0.")


def test_do_not_use(rng: np.random.Generator) -> None:
    profile = entered(0.3)
    found = verdict(segment(rng, profile, 0.15), profile, gamma=4)
    assert (found.decision, found.gamma) == ("do_not_use", None)
    assert found.reasons[0].startswith("every measured proposal length loses; the best is gamma 1")
    assert found.flip is not None
    assert found.flip.hit_rate == pytest.approx(0.3)
    assert found.flip.hit_rate_now == pytest.approx(0.15, abs=0.04)


def test_too_close_to_call_says_how_many_would_do(rng: np.random.Generator) -> None:
    profile = entered(0.5)
    values = [value for value in segment(rng, profile, 0.53, 60) if value.gamma == 1]
    found = verdict(values, profile, gamma=1)
    assert (found.decision, found.gamma) == ("not_enough_data", None)
    assert found.requests_needed is not None
    assert found.requests_needed > 60


@pytest.mark.parametrize("speedup", [1.05, 0.96])
def test_the_number_that_would_decide_decides(speedup: float) -> None:
    """Limits whose arms shrink with the root of the requests just clear 1 at the number named."""
    profile = entered(0.0, plain=1.0)

    def at(requests: int) -> Value:
        arm = 0.2 * math.sqrt(50 / requests)
        cost = profile.cost(1, 2)
        return Value(2, Range(speedup, speedup - arm, speedup + arm), cost, requests=requests)

    needed = verdict([at(50)], profile, gamma=2, margin=0.01).requests_needed
    assert needed is not None
    assert verdict([at(needed + 1)], profile, gamma=2, margin=0.01).decision == ("use" if speedup > 1 else "do_not_use")
    assert verdict([at(needed - 2)], profile, gamma=2, margin=0.01).decision == "not_enough_data"


def test_no_limits_no_decision(rng: np.random.Generator) -> None:
    profile = entered(0.1)
    found = verdict(segment(rng, profile, 0.9, 1), profile, gamma=3)
    assert found.decision == "not_enough_data"
    assert "1 requests allow no limits" in found.reasons
    assert found.requests_needed is None
    assert verdict([], profile, gamma=3).reasons == ("no window was judged",)
    unknown = [Value(3, Range(), profile.cost(1, 3))]
    assert verdict(unknown, profile, gamma=3).reasons == ("no proposal length has a speedup",)


def fitted(noise: float, rng: np.random.Generator) -> CostProfile:
    def point(part: Part, batch: int, seconds: float, gamma: int = 0) -> Timing:
        tokens = batch * (1 + gamma)
        return Timing(part, batch, float(seconds * (1 + 1e-3 * tokens) * np.exp(rng.normal(0, noise))), gamma)

    points = [point("draft", b, 0.002) for b in (1, 4, 16, 32)]
    return CostProfile.fitted(BOUND, points + [point("target", b, 0.02, g) for b in (1, 4, 16, 32) for g in (0, 2, 4)])


def test_outside_the_measured_range_nothing_is_decided(rng: np.random.Generator) -> None:
    profile = fitted(0.0, rng)
    found = verdict(segment(rng, profile, 0.8, batch=64), profile, gamma=3)
    assert found.decision == "not_enough_data"
    assert "batch 64 lies outside what was measured, 1 to 32" in found.reasons[0]
    # Proposal lengths that were not profiled take no part: 2 to 4 were.
    assert verdict(segment(rng, profile, 0.95, batch=4), profile, gamma=5).gamma == 4
    lost = verdict(segment(rng, profile, 0.03, batch=4), profile, gamma=3)
    assert lost.decision == "do_not_use"
    assert lost.reasons[1] == "gamma 1: gamma 1 lies outside what was measured, 2 to 4"


def test_a_poor_fit_makes_the_verdict_cautious(rng: np.random.Generator) -> None:
    poor = fitted(0.15, rng)
    assert margin_of(entered()) == 0.0
    assert margin_of(poor) > 0.1
    profile = entered(0.1)
    values = [value for value in segment(rng, profile, 0.3, 300) if value.gamma == 1]
    assert verdict(values, profile, gamma=1).decision == "use"
    cautious = verdict(values, profile, gamma=1, margin=0.3)
    assert cautious.decision == "not_enough_data"
    assert cautious.requests_needed is None  # a better profile decides, not more requests
    assert "cost error 30%" in cautious.reasons[0]


def test_the_batch_at_which_it_turns(rng: np.random.Generator) -> None:
    profile = CostProfile.entered(BOUND, StepTime(roof=1e-4, knee=200.0)).with_draft(0.05)
    at_one, at_many = (verdict(segment(rng, profile, 0.6, batch=b), profile, gamma=4) for b in (1, 400))
    assert (at_one.decision, at_many.decision) == ("use", "do_not_use")
    assert at_one.flip is not None
    assert at_one.flip.batch is not None
    assert 40.0 < at_one.flip.batch < 200.0


def test_at_equal_rate_the_verdict_is_about_that_rate(rng: np.random.Generator) -> None:
    profile = CostProfile.entered(BOUND, StepTime(0.02, 1e-3)).with_draft(0.02)
    values = segment(rng, profile, 0.5)
    assert verdict(values, profile, gamma=2).decision in ("use", "use_with_gamma")
    busy = [value.under(profile, rate=9.0, tokens=100) for value in values]
    found = verdict(busy, profile, gamma=2)
    assert found.decision == "do_not_use"
    assert "equal arrival rate" in found.reasons[0]
    flooded = [value.under(profile, rate=20.0, tokens=100) for value in values]
    assert "saturate both ways" in verdict(flooded, profile, gamma=2).reasons[0]


def test_the_tail_is_a_warning_beside_the_mean(rng: np.random.Generator) -> None:
    profile = entered(0.1)
    values = segment(rng, profile, 0.7)
    steps = np.where(rng.random(800) < 0.06, 0.95, 0.4) * 100
    ends = tail(steps, np.full(800, 100), window=1.4)
    found = verdict(values, profile, gamma=4, tail=ends, slower_limit=0.02)
    assert found.decision in ("use", "use_with_gamma")
    assert found.warnings[0].startswith("the median request gets faster and the p99 request slower: time per output")
    assert found.warnings[1].startswith("more than 2% of requests are made slower")
    assert len(verdict(values, profile, gamma=4, tail=ends).warnings) == 1
    assert verdict([], profile, gamma=4, tail=ends).warnings == found.warnings[:1]


def test_use_is_rarely_said_of_a_draft_that_exactly_breaks_even(rng: np.random.Generator) -> None:
    """Every proposal length at its true break-even, the worst case of choosing among them: 2,000 cells of 40 requests.

    One length alone is wrong in 2.5 % of cells by its lower limit. Eight of them, judged on the same requests, are
    wrong in about 4 %: far below the 8 * 2.5 % of independent tests.
    """
    runs, requests, starts, gamma = 2000, 40, 10, 8
    moments = np.cumprod([(7 + i) / (10 + i) for i in range(gamma)])  # E[a^k] of Beta(7, 3)
    truth = 1.0 + np.cumsum(moments)
    rates = rng.beta(7, 3, (runs, requests))
    alive: NDArray[np.bool_] = np.ones((runs, requests, starts), dtype=bool)
    run = np.zeros((gamma, runs, requests))
    for depth in range(gamma):
        alive &= rng.random(alive.shape) < rates[:, :, None]
        run[depth:] += alive.sum(axis=2)
    profile, wrong, wrong_alone = entered(0.0, plain=1.0), 0, 0
    for cell in range(runs):
        values = []
        for g in range(1, gamma + 1):
            y = run[g - 1, cell]
            n = float(requests * starts)
            squares = (float(y @ y), starts * float(y.sum()), n * starts)
            sums = Moments(requests, requests, float(y.sum()), n, *squares)
            length = Range.of(ratio(sums, low=1.0, high=1.0 + g, shift=1.0))
            values.append(
                Value(g, length, Cost(1, g, 0.0, 1.0, 0.0, float(truth[g - 1]), "entered"), requests=requests)
            )
        wrong += verdict(values, profile, gamma=4).gamma is not None
        wrong_alone += verdict(values[3:4], profile, gamma=4).gamma is not None
    assert wrong_alone / runs <= 0.025 + 0.01
    assert wrong / runs <= 0.06


def test_a_missing_upper_limit_is_no_reason_to_stop() -> None:
    value = Value(2, Range(0.9, 0.7, None), entered(0.0).cost(1, 2), requests=9)
    assert verdict([value], entered(0.0), gamma=2).decision == "not_enough_data"


@pytest.mark.parametrize(
    ("speedup", "decision", "gamma"),
    [
        (Range(1.5, 1.3, 1.7), "use", 3),
        (Range(0.8, 0.7, 0.9), "do_not_use", None),
        (Range(1.1, 0.9, 1.3), "not_enough_data", None),
        (Range(1.5), "not_enough_data", None),
        (Range(), "not_enough_data", None),
    ],
)
def test_of_what_was_measured(speedup: Range, decision: str, gamma: int | None) -> None:
    found = of_measured(speedup, gamma=3, requests=40)
    assert (found.decision, found.gamma) == (decision, gamma)
    # An arm of .2 against a distance of .1: four times the requests.
    assert found.requests_needed == (160 if speedup.value == 1.1 else None)


def test_what_lies_outside_is_told_once_for_all_lengths(rng: np.random.Generator) -> None:
    profile = fitted(0.0, rng)
    reasons = verdict(segment(rng, profile, 0.8, batch=64), profile, gamma=3).reasons
    assert len([line for line in reasons if "batch 64" in line]) == 1
    assert reasons[0].startswith("gamma 1, 2, 3, 4")
