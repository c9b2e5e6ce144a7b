"""Section 1: the target alone, measured or predicted, and what part of a request it decodes."""

from __future__ import annotations

import json

import pytest

from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.step import StepTime
from driftwatch.evaluate.baseline import Conditions, baseline, mean, prefill_share
from driftwatch.evaluate.request import Clock

from .conftest import costs, request


def test_predicted_at_each_requests_own_context() -> None:
    profile = CostProfile.entered(Bound("GPU", "bf16", ""), StepTime(0.02, context=1e-6))
    requests = [request(str(i), context=1000.0 * i, tokens=10) for i in range(1, 102)]
    found = baseline(requests, profile, Conditions(5, batch=4, per_gpu_hour=3.6))
    assert (found.source, found.batch, found.requests, found.tokens) == ("predicted", 4, 101, 1010)
    assert found.per_token[0.5].value == pytest.approx(0.02 + 4e-6 * 51_000)
    assert found.per_request[0.5].value == pytest.approx(10 * (0.02 + 4e-6 * 51_000))
    # 0.001 a second over four sequences at the mean context.
    assert found.per_million == pytest.approx(1e6 * 0.001 * (0.02 + 4e-6 * 51_000) / 4)
    assert found.prefill_share is None
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["per_token_s"]["0.5"][0] == pytest.approx(0.224)


def test_measured_comes_before_predicted() -> None:
    clocks = [Clock(0.5, 1.0 + i / 100, 100) for i in range(50)]
    requests = [request(str(i), plain=clock) for i, clock in enumerate(clocks)]
    found = baseline(requests, costs(), Conditions(5))
    assert found.source == "measured"
    assert found.per_token[0.5].value == pytest.approx(0.0124)
    assert found.ttft[0.99].value == 0.5
    assert found.prefill_share == pytest.approx(25 / (25 + sum(clock.decode_s for clock in clocks)))
    assert found.prefill_source == "measured"


def test_recorded_times_give_the_prefill_share_alone() -> None:
    requests = [request("a", recorded=Clock(1.0, 3.0, 100)), request("b", weight=3.0, recorded=Clock(1.0, 1.0, 100))]
    found = baseline(requests, None, Conditions(5))
    assert (found.source, found.per_million, found.per_token) == (None, None, {})
    assert found.prefill_share == pytest.approx(4 / (4 + 3 + 3))
    assert found.recorded[0.5].value == 0.01


def test_the_rate_decides_the_batch_or_saturates() -> None:
    profile = costs(slope=0.001)
    requests = [request(str(i)) for i in range(3)]
    found = baseline(requests, profile, Conditions(5, rate=2.0, per_gpu_hour=3.6))
    # B = 2 * 100 * (0.02 + 0.001 (1 + B)) = 4.2 + 0.2 B.
    assert found.batch == pytest.approx(1 + 4.2 / 0.8)
    # Whatever the batch: 200 tokens a second cost 0.001 a second.
    assert found.per_million == pytest.approx(5.0)
    over = baseline(requests, profile, Conditions(5, rate=11.0, per_gpu_hour=3.6))
    assert (over.source, over.batch, over.per_token, over.per_million) == ("predicted", None, {}, None)


def test_of_nothing() -> None:
    assert prefill_share([]) is None
    assert mean([], lambda one: one.context) == 0.0
