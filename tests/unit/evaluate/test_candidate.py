"""Section 2: acceptance of one draft on one segment, and the clear stop."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.acceptance import Weights, tally
from driftwatch.evaluate.baseline import Conditions
from driftwatch.evaluate.candidate import Draft, judge
from driftwatch.evaluate.request import sums_of

from .conftest import GAMMA, costs, judged, request


def test_a_good_draft(rng: np.random.Generator) -> None:
    requests = judged(rng, 0.8, 60)
    found = judge(Draft("d", "trained", costs(0.1)), requests, Conditions(3, per_gpu_hour=2.0))
    assert found is not None
    assert found.stop is None
    assert found.verdict is not None
    assert found.verdict.decision in ("use", "use_with_gamma")
    assert found.shown is not None
    assert found.shown.gamma == found.verdict.gamma
    assert found.tail is not None
    assert found.tail.requests == 60
    assert found.price is not None
    assert list(found.figures) == list(range(1, GAMMA + 1))
    hit = found.figures[3]["hit_rate"]
    assert hit.lower is not None
    assert hit.upper is not None
    assert hit.lower < 0.8 < hit.upper
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (told["how"], told["requests"], told["stop"]) == ("replayed", 60, None)


def test_stop_where_even_the_upper_limit_is_under_break_even(rng: np.random.Generator) -> None:
    found = judge(Draft("d", "trained", costs(0.5)), judged(rng, 0.1, 60), Conditions(3))
    assert found is not None
    assert found.verdict is not None
    assert found.verdict.decision == "do_not_use"
    assert found.stop is not None
    assert "too low to pay at any proposal length: at gamma 1" in found.stop


def test_no_stop_where_the_data_leave_it_open(rng: np.random.Generator) -> None:
    few = judge(Draft("d", "trained", costs(0.1)), judged(rng, 0.1, 1), Conditions(3))
    assert few is not None
    assert few.stop is None
    assert few.verdict is not None
    assert few.verdict.decision == "not_enough_data"


def test_without_costs_acceptance_alone(rng: np.random.Generator) -> None:
    found = judge(Draft("d", "trained", None), judged(rng, 0.5, 20), Conditions(3))
    assert found is not None
    assert (found.values, found.verdict, found.shown, found.tail, found.stop) == ((), None, None, None, None)
    assert found.figures[3]["acceptance_length"].value is not None


def test_a_draft_that_judged_nothing(rng: np.random.Generator) -> None:
    assert judge(Draft("other", "ngram", costs(0.0)), judged(rng, 0.5, 5), Conditions(3)) is None


def test_a_session_is_one_unit(rng: np.random.Generator) -> None:
    alone = judged(rng, 0.5, 40)
    together = [replace(one, session=str(i // 4)) for i, one in enumerate(alone)]
    one, other = sums_of(alone, "d"), sums_of(together, "d")
    assert one is not None
    assert other is not None
    assert (one.units, other.units) == (40, 10)
    assert one.interval("hit_rate", 3).value == pytest.approx(other.interval("hit_rate", 3).value)


def test_lookahead_pays_for_its_tree_at_every_step() -> None:
    """20 tokens in 10 steps, half of them without an n-gram to try: each fed 11 tokens."""
    # Starts 0, 3, 4, 7, 8, 11 ...: a window of two accepted, then a plain step.
    values = np.zeros((20, 2))
    proposals = np.zeros(20, np.int64)
    values[::4] = 1.0
    proposals[::4] = 2
    counts = tally(Weights(values, proposals, walked=True), 2)
    assert (counts.steps[1], counts.windows[1], counts.tokens) == (10, 5, 20)
    requests = [request(str(i), tallies={"look": counts}, tokens=40) for i in range(2)]
    draft = Draft("look", "lookahead", costs(0.0, slope=0.001), fed_per_step=11.0, chosen=2)
    found = judge(draft, requests, Conditions(5))
    assert found is not None
    (value,) = found.values
    assert value.length.value == pytest.approx(2.0)
    assert value.break_even == pytest.approx((0.02 + 0.011) / 0.021)
    assert value.speedup.value == pytest.approx(2.0 * 0.021 / 0.031)
    assert found.to_json()["how"] == "run"
    assert found.tail is not None
    assert found.tail.minimum_tokens == 32


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.sampled_from([2, 40]), st.none() | st.floats(0.5, 40.0))
def test_who_is_told_to_stop_is_told_not_to_use_it(rate: float, c: float, count: int, arrivals: float | None) -> None:
    requests = judged(np.random.default_rng(3), rate, count)
    found = judge(Draft("d", "trained", costs(c, slope=0.0005)), requests, Conditions(3, rate=arrivals))
    assert found is not None
    assert found.verdict is not None
    assert (found.stop is not None) == (found.verdict.decision == "do_not_use")
    json.dumps(found.to_json(), allow_nan=False)


def test_the_gpus_of_an_engine_are_paid(rng: np.random.Generator) -> None:
    one, eight = (
        judge(
            Draft("d", "trained", costs()),
            judged(np.random.default_rng(1), 0.8, 30),
            Conditions(3, per_gpu_hour=2.0, gpus=n),
        )
        for n in (1, 8)
    )
    assert one is not None and one.price is not None  # noqa: PT018
    assert eight is not None and eight.price is not None  # noqa: PT018
    assert eight.price.plain == pytest.approx(8 * one.price.plain)
