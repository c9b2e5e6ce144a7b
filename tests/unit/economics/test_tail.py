"""Single requests: who gets slower, how sure that is, and the median that hides the tail."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.acceptance import Weights, tally
from driftwatch.economics.range import Range
from driftwatch.economics.tail import Tail, of_tallies, tail
from driftwatch.economics.value import Value

from .conftest import entered, repeatable

TOKENS = 200


def traffic(
    rng: np.random.Generator, requests: int, bad_share: float, good: float = 0.4
) -> tuple[np.ndarray, np.ndarray]:
    """Steps and tokens: most take ``good`` steps a token, a share of ``bad_share`` takes .95."""
    bad = rng.random(requests) < bad_share
    rate = np.where(bad, 0.95, good) + rng.normal(0, 0.02, requests)
    return rate * TOKENS, np.full(requests, float(TOKENS))


def test_worked_by_hand() -> None:
    # Windows of 1.4 plain steps: .5 steps a token cost .7 of plain decoding, .8 cost 1.12.
    found = tail([50, 50, 80], [100, 100, 100], window=1.4)
    assert found.relative[0.5].value == pytest.approx(0.7)
    assert found.relative[0.99].value == pytest.approx(1.12)
    assert found.steps_per_token[0.99].value == pytest.approx(0.8)
    assert found.slower.value == pytest.approx(1 / 3)
    assert found.slower.lower == pytest.approx(0.0615, abs=1e-4)  # Wilson for 1 of 3
    assert found.slower.upper == pytest.approx(0.7923, abs=1e-4)
    assert found.left_out == 0.0
    assert found.shape == "undecided"


def test_plain_steps_cost_a_plain_step() -> None:
    found = tail([50], [100], window=1.4, windows=[30], plain=0.9)
    assert found.relative[0.5].value == pytest.approx((30 * 1.4 + 20 * 0.9) / 100)


def test_break_even_is_not_slower() -> None:
    assert tail([100 / 1.4] * 3, [100] * 3, window=1.4).slower.value == 0.0


def test_short_requests_are_left_out_and_counted() -> None:
    found = tail([10, 10, 40], [10, 31, 64], window=1.4)
    assert found.requests == 1
    assert found.left_out == pytest.approx(2 / 3)
    assert found.relative[0.5] == Range(40 * 1.4 / 64)
    weighted = tail([10, 40], [10, 64], window=1.4, weights=[3, 1])
    assert weighted.left_out == 0.75


def test_nothing_left_is_said() -> None:
    for found in (tail([], [], window=1.4), tail([5], [6], window=1.4)):
        assert found.requests == 0
        assert found.shape == "undecided"
        assert found.slower == Range()
        assert found.evidence == "no request of 32 judged tokens or more"
    assert tail([], [], window=1.4).left_out is None


def test_the_bimodal_case_is_found_with_its_evidence(rng: np.random.Generator) -> None:
    found = tail(*traffic(rng, 600, 0.05), window=1.4)
    assert found.shape == "split"
    assert found.relative[0.5].upper is not None
    assert found.relative[0.5].upper < 1.0
    assert found.relative[0.99].lower is not None
    assert found.relative[0.99].lower > 1.0
    assert "p99 1.3" in found.evidence
    assert "600 requests, 0% left out as shorter than 32 tokens" in found.evidence
    assert json.loads(json.dumps(found.to_json()))["shape"] == "split"


def test_the_other_shapes(rng: np.random.Generator) -> None:
    assert tail(*traffic(rng, 600, 0.0), window=1.4).shape == "better"
    assert tail(*traffic(rng, 600, 0.9), window=1.4).shape == "worse"
    # Too few for a limit of p99: the median alone decides nothing.
    assert tail(*traffic(rng, 100, 0.0), window=1.4).shape == "undecided"


def test_split_is_rarely_claimed_where_it_is_not(rng: np.random.Generator) -> None:
    """Least favourable: exactly one request in a hundred is slower. At most alpha / 2 = 2.5 % claims in 2,000 runs."""
    claims = 0
    for _ in range(2000):
        slow = rng.random(500) < 0.01
        x = np.where(slow, 0.9, 0.4) * TOKENS
        claims += tail(x, np.full(500, TOKENS), window=1.4).shape == "split"
    assert claims / 2000 <= 0.025 + 0.01


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_share_made_slower_holds_the_truth(rng: np.random.Generator, share: float) -> None:
    held = 0
    for _ in range(2000):
        x = np.where(rng.random(120) < share, 0.9, 0.4) * TOKENS
        found = tail(x, np.full(120, TOKENS), window=1.4).slower
        assert found.lower is not None
        assert found.upper is not None
        held += found.lower <= share <= found.upper
    assert 0.93 <= held / 2000 <= 0.98


@repeatable
@given(st.lists(st.floats(0.2, 1.0), min_size=1, max_size=50), st.floats(0.5, 5.0), st.floats(1.0, 2.0))
def test_dearer_windows_never_help_anyone(rates: list[float], window: float, factor: float) -> None:
    steps, tokens = np.array(rates) * TOKENS, np.full(len(rates), TOKENS)
    before, after = tail(steps, tokens, window=window), tail(steps, tokens, window=window * factor)
    assert (after.slower.value or 0.0) >= (before.slower.value or 0.0)
    for q, found in before.relative.items():
        assert (after.relative[q].value or 0.0) >= (found.value or 0.0)


def test_from_tallies_at_equal_batch_and_at_equal_rate() -> None:
    requests = [tally(Weights(np.full((60, 1), w)), 4) for w in (1.0, 1.0, 0.0)]
    profile = entered(0.1, slope=5e-4)
    value = Value(4, Range(2.0), profile.cost(8, 4))
    found = of_tallies(requests, value)
    assert found.relative[0.99].value == pytest.approx(value.cost.window)  # nothing accepted: a window a token
    assert found.relative[0.5].value == pytest.approx(value.cost.window / 5)
    loaded = value.under(profile, rate=2.0, tokens=300)
    assert loaded.at_rate is not None
    assert of_tallies(requests, loaded).relative[0.99].value == pytest.approx(loaded.at_rate.window)


def test_contradictory_input_is_refused() -> None:
    with pytest.raises(ValueError, match="one entry a request"):
        tail([1, 2], [3], window=1.0)
    with pytest.raises(ValueError, match="must be positive"):
        tail([1], [3], window=0.0)


def test_a_tail_is_a_value() -> None:
    assert isinstance(tail([50], [100], window=1.4), Tail)
    assert tail([50], [100], window=1.4) == tail([50], [100], window=1.4)
