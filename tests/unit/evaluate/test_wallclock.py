"""Section 3: percentiles with speculation, predicted from a replay or measured on engines."""

from __future__ import annotations

import json

import numpy as np
import pytest

from driftwatch.evaluate.baseline import Conditions
from driftwatch.evaluate.candidate import Draft, judge
from driftwatch.evaluate.request import Clock
from driftwatch.evaluate.wallclock import measured, predicted

from .conftest import costs, judged, request


def test_predicted_is_plain_times_relative(rng: np.random.Generator) -> None:
    requests = judged(rng, 0.7, 50)
    candidate = judge(Draft("d", "trained", costs(0.1)), requests, Conditions(3))
    assert candidate is not None
    found = predicted(candidate, requests, 0.5)
    assert found is not None
    assert candidate.tail is not None
    for q in (0.5, 0.95, 0.99):
        assert found.plain[q].value == pytest.approx(0.02)
        relative = candidate.tail.relative[q].value
        assert relative is not None
        assert found.speculative[q].value == pytest.approx(0.02 * relative)
    assert candidate.shown is not None
    assert found.speedup == candidate.shown.served
    speedup, whole = candidate.shown.speedup.value, found.end_to_end.value
    assert speedup is not None
    assert whole == pytest.approx(1 / (0.5 + 0.5 / speedup))
    json.dumps(found.to_json(), allow_nan=False)


def test_the_bad_tail_is_flagged(rng: np.random.Generator) -> None:
    """A tenth of the requests accept nothing: p50 gains, p99 loses."""
    requests = [*judged(rng, 0.9, 540, "a"), *judged(rng, 0.0, 60, "b")]
    candidate = judge(Draft("d", "trained", costs(0.1)), requests, Conditions(3))
    assert candidate is not None
    found = predicted(candidate, requests, None)
    assert found is not None
    assert found.p99 == "worse"
    assert found.slower.value == pytest.approx(0.1)
    middle = found.relative[0.5].upper
    assert middle is not None
    assert middle < 1.0
    assert candidate.verdict is not None
    assert "p99 request slower" in candidate.verdict.warnings[0]


def test_at_a_rate_both_batches_settle(rng: np.random.Generator) -> None:
    requests = judged(rng, 0.8, 50)
    candidate = judge(Draft("d", "trained", costs(0.1, slope=0.0005)), requests, Conditions(3, rate=4.0))
    assert candidate is not None
    found = predicted(candidate, requests, None)
    assert found is not None
    assert candidate.shown is not None
    load = candidate.shown.at_rate
    assert load is not None
    assert load.plain.seen is not None
    assert found.plain[0.5].value == pytest.approx(0.02 + 0.0005 * load.plain.seen)
    assert found.speedup == load.speedup


def test_measured_pairs(rng: np.random.Generator) -> None:
    requests = []
    for i in range(400):
        token_s = 0.01 * (1 + 0.1 * rng.random())
        ratio = 0.5 if i % 20 else 1.5
        plain, fast = Clock(0.1, 100 * token_s, 100), Clock(0.12, 80 * token_s * ratio, 80)
        requests.append(request(str(i), plain=plain, speculative=fast))
    requests.append(request("alone", plain=Clock(0.1, 1.0, 100)))
    requests.append(request("short", plain=Clock(0.1, 0.1, 10), speculative=Clock(0.1, 0.1, 10)))
    found = measured(requests, gamma=4)
    assert found is not None
    assert (found.source, found.gamma, found.requests) == ("measured", 4, 400)
    assert found.relative[0.5].value == pytest.approx(0.5)
    assert found.p99 == "worse"
    assert found.slower.value == pytest.approx(0.05)
    assert found.speedup.lower is not None
    assert found.speedup.upper is not None
    assert found.speedup.lower < 1 / (0.95 * 0.5 + 0.05 * 1.5) < found.speedup.upper
    assert found.end_to_end.value is not None
    assert found.speedup.value is not None
    assert found.end_to_end.value < found.speedup.value
    assert found.speculative_ttft[0.5].value == 0.12


def test_nothing_measured() -> None:
    assert measured([request(plain=Clock(0.1, 1.0, 100))], 4) is None
