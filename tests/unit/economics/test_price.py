"""Cost per million tokens, and what the same latency would cost in GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.economics.load import settle
from driftwatch.economics.price import per_million, price
from driftwatch.economics.profile import CostProfile
from driftwatch.economics.range import Range
from driftwatch.economics.step import StepTime
from driftwatch.economics.value import Value

from .conftest import BOUND, entered, profiles, repeatable


def value_of(profile: CostProfile, batch: float, length: Range, gamma: int = 4) -> Value:
    return Value(gamma, length, profile.cost(batch, gamma))


def test_worked_by_hand() -> None:
    # 10 sequences at 20 ms + 1 ms B = 30 ms a step: 333.3 tokens/s; at 3.6 per GPU-hour (0.001 a second) 3 per million.
    profile = CostProfile.entered(BOUND, StepTime(0.02, 1e-3)).with_draft(0.0)
    found = price(value_of(profile, 10, Range(3.5, 3.0, 4.0)), profile, per_gpu_hour=3.6)
    assert found.plain == pytest.approx(3.0)
    assert per_million(0.03, 10, 3.6) == pytest.approx(3.0)
    # A window of gamma 4 carries 50 tokens: 70 ms for 3.5 tokens a sequence, 20 ms a token.
    assert found.speculative.value == pytest.approx(2.0)
    assert found.saved.value == pytest.approx(1 / 3)
    assert found.speculative.lower == pytest.approx(1.75)
    assert found.speculative.upper == pytest.approx(2.0 * 3.5 / 3.0)
    # Plain decoding takes 21 ms even alone: no number of GPUs gets to 20 ms.
    assert found.replicas is None
    assert found.added is None
    assert found.to_json()["added_gpus"] is None


def test_adding_gpus_for_the_same_latency() -> None:
    # Length 2.8: 25 ms a token. Plain gets there at B = 5: two engines for one, twice the cost per token.
    profile = CostProfile.entered(BOUND, StepTime(0.02, 1e-3)).with_draft(0.0)
    found = price(value_of(profile, 10, Range(2.8)), profile, per_gpu_hour=3.6, gpus=2)
    assert found.replicas == pytest.approx(2.0)
    assert found.speculative.value == pytest.approx(5.0)
    assert found.added == pytest.approx(10.0)


@repeatable
@given(profiles(), st.floats(1.0, 9.0), st.floats(1.0, 500.0), st.integers(1, 8), st.floats(0.1, 20.0))
def test_equal_batch_saves_what_the_speedup_says(
    profile: CostProfile, length: float, batch: float, gamma: int, dollars: float
) -> None:
    value = value_of(profile, batch, Range(length), gamma)
    found = price(value, profile, per_gpu_hour=dollars)
    assert found.speculative.value is not None
    assert found.plain / found.speculative.value == pytest.approx(value.speedup.value)
    if found.replicas is not None:
        assert found.replicas >= 1.0
        assert found.added is not None
        assert found.added >= found.speculative.value * (1 - 1e-12)
    else:
        assert value.speedup.value is not None
        assert value.speedup.value > 1.0


def test_equal_rate_costs_the_same_tokens_the_same_gpus() -> None:
    profile = CostProfile.entered(BOUND, StepTime(0.02, 5e-4)).with_draft(0.05)
    value = value_of(profile, 8, Range(3.0, 2.8, 3.2), 3).under(profile, rate=4.0, tokens=300)
    found = price(value, profile, per_gpu_hour=2.0)
    assert found.plain == pytest.approx(2.0 / 3600 * 1e6 / (4.0 * 300))
    assert found.speculative.to_json() == pytest.approx([found.plain] * 3)
    assert found.batch < found.plain_batch
    # So many plain engines share the arrivals that each takes as long for a token as speculation.
    assert value.at_rate is not None
    assert found.replicas is not None
    shared = settle(profile.plain_s, 4.0 / found.replicas, 300)
    assert shared.token_s == pytest.approx(value.at_rate.speculative.token_s)
    assert found.added == pytest.approx(found.plain * found.replicas)


def test_no_number_of_engines_is_faster_than_one_alone() -> None:
    value = value_of(entered(0.0), 8, Range(3.0)).under(entered(0.0), rate=0.5, tokens=100)
    assert price(value, entered(0.0), per_gpu_hour=2.0).replicas is None


def test_slower_than_plain_needs_no_gpus() -> None:
    found = price(value_of(entered(), 4, Range(1.0)), entered(), per_gpu_hour=2.0)
    assert found.replicas == 1.0


def test_unknown_stays_unknown_and_impossible_is_refused() -> None:
    found = price(value_of(entered(), 4, Range()), entered(), per_gpu_hour=2.0)
    assert found.speculative == Range()
    assert found.replicas is None
    with pytest.raises(ValueError, match="is no price"):
        price(value_of(entered(), 4, Range(2.0)), entered(), per_gpu_hour=-1.0)


def test_what_costs_nothing_saves_nothing() -> None:
    profile = CostProfile.entered(BOUND, StepTime(0.02, 1e-3)).with_draft(0.0)
    found = price(Value(2, Range(2.0), profile.cost(1, 2)), profile, per_gpu_hour=0.0)
    assert (found.plain, found.saved) == (0.0, Range())
