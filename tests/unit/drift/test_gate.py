"""The gate: false promotions and power by simulation, and what each part of it answers for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.gate import Rules, Verdict, fixed, p99, sequential
from driftwatch.drift.paired import Floats, Pairs

RULES = Rules()
CELLS = ("a", "b")


def stream(
    rng: np.random.Generator,
    requests: int,
    gain: float | Sequence[float],
    *,
    per_session: int = 1,
    noise: float = 0.05,
) -> Pairs:
    """Requests of two cells: shared difficulty, hits of both drafts, the candidate's rate higher by its cell's gain."""
    cell = rng.integers(0, 2, requests)
    session = np.arange(requests) // per_session
    length = np.clip(rng.lognormal(4.5, 0.8, requests), 8, 1024).round()
    shared = rng.normal(0, 0.12, session[-1] + 1)[session]
    own = rng.normal(0, noise, session[-1] + 1)[session]
    more = np.broadcast_to(np.asarray(gain, dtype=float), 2)[cell]
    rate = np.clip(0.6 + shared, 0.05, 0.85)
    tested = np.maximum((length * 0.7).round(), 1.0)

    def counts(p: Floats) -> tuple[Floats, Floats, Floats]:
        accepted = rng.binomial(tested.astype(int), p).astype(float)
        return accepted, tested, np.maximum(length - accepted, 1.0)

    candidate, incumbent = counts(np.clip(rate + own + more, 0.0, 1.0)), counts(rate)
    return Pairs(cell, session, np.ones(requests), length, *candidate, *incumbent)


def upper_limit(found: int, runs: int) -> float:
    """Upper 95% limit of a share (Clopper and Pearson): the p at which so few are found in one of twenty."""
    low, high = found / runs, 1.0
    for _ in range(60):
        p = (low + high) / 2
        logs = [
            math.lgamma(runs + 1)
            - math.lgamma(k + 1)
            - math.lgamma(runs - k + 1)
            + k * math.log(p)
            + (runs - k) * math.log1p(-p)
            for k in range(found + 1)
        ]
        low, high = (p, high) if sum(map(math.exp, logs)) > 0.05 else (low, p)
    return high


def promoted(rng: np.random.Generator, gain: float | Sequence[float], requests: int) -> bool:
    """By the history, or if that cannot say by as many live samples."""
    history = fixed(stream(rng, requests, gain), CELLS, [0], RULES)
    if history.outcome != "more_data":
        return history.outcome == "promote"
    live = sequential(stream(rng, requests, gain), CELLS, [0], history.tail.limit, RULES)
    return live.outcome == "promote"


@pytest.mark.parametrize("gain", [0.0, RULES.margin], ids=["no gain", "no more than the margin"])
def test_false_promotions_are_within_one_in_a_hundred(gain: float) -> None:
    """3,000 candidates that are no better, and as many at the very edge of what is asked."""
    rng = np.random.default_rng(7)
    runs = 3000
    found = sum(promoted(rng, gain, 400) for _ in range(runs))
    assert upper_limit(found, runs) <= 0.01, f"{found} of {runs}"


def test_a_cell_at_the_edge_of_the_tolerance_is_let_pass_once_in_a_hundred() -> None:
    rng = np.random.default_rng(8)
    runs = 1000
    found = sum(promoted(rng, (0.08, -RULES.tolerance), 400) for _ in range(runs))
    assert upper_limit(found, runs) <= 0.02, f"{found} of {runs}"


def test_a_gain_of_five_hundredths_is_found_in_two_thousand_samples() -> None:
    rng = np.random.default_rng(9)
    runs = 300
    found = Counter(fixed(stream(rng, 2000, 0.05), CELLS, [0], RULES).outcome for _ in range(runs))
    assert found["promote"] >= 0.97 * runs, found
    assert upper_limit(runs - found["promote"], runs) <= 0.05


def test_sessions_are_the_units() -> None:
    """Turns of one session share their luck: taken one by one they would promise too much."""
    pairs = stream(np.random.default_rng(1), 2000, 0.0, per_session=20, noise=0.1)
    rows = fixed(pairs, CELLS, None, RULES)
    each = Pairs(**{name: getattr(pairs, name) for name in pairs.__dataclass_fields__} | {"unit": np.arange(2000)})
    alone = fixed(each, CELLS, None, RULES)
    assert rows.overall.units == 100
    assert width(rows) > 2 * width(alone)


def width(verdict: Verdict) -> float:
    assert verdict.overall.lower is not None
    assert verdict.overall.upper is not None
    return verdict.overall.upper - verdict.overall.lower


@pytest.mark.parametrize("test", ["fixed", "sequential"])
def test_worse_in_one_cell_is_rejected_however_good_the_rest(test: str) -> None:
    pairs = stream(np.random.default_rng(2), 2000, (0.2, -0.1))
    verdict = fixed(pairs, CELLS, [0], RULES) if test == "fixed" else sequential(pairs, CELLS, [0], 0.9, RULES)
    assert verdict.overall.difference is not None
    assert verdict.overall.difference > 0
    assert verdict.outcome == "reject"
    assert verdict.reasons[0] == "worse by more than 0.03 in b"


def test_a_cell_without_traffic_decides_nothing() -> None:
    pairs = stream(np.random.default_rng(3), 4000, (0.06, -0.3))
    few = (pairs.cell == 0) | (np.cumsum(pairs.cell == 1) <= 15)
    verdict = fixed(pairs.where(few), CELLS, [0], RULES)
    assert [row.finding for row in verdict.table] == ["kept", "small"]
    assert verdict.outcome == "promote"


def test_a_longer_tail_is_rejected() -> None:
    """The same hit rate on the whole, but one request in ten takes twice the steps."""
    rng = np.random.default_rng(4)
    pairs = stream(rng, 3000, 0.1)
    slow = rng.random(3000) < 0.1
    steps = np.where(slow, pairs.tokens, pairs.steps)
    verdict = fixed(
        Pairs(**{name: getattr(pairs, name) for name in pairs.__dataclass_fields__} | {"steps": steps}),
        CELLS,
        [0],
        RULES,
    )
    assert verdict.outcome == "reject"
    assert verdict.tail.finding == "worse"
    assert "slower than the incumbent's p99" in verdict.reasons[0]


def test_few_requests_are_not_enough_data() -> None:
    for requests in (0, 1, 20):
        verdict = fixed(stream(np.random.default_rng(5), max(requests, 1), 0.5), CELLS, [0], RULES)
        if requests == 0:
            empty = stream(np.random.default_rng(5), 1, 0.5)
            nothing = empty.where(np.zeros(1, bool))
            verdict = fixed(nothing, [], [], RULES)
            assert sequential(nothing, [], [], None, RULES).outcome == "more_data"
        assert verdict.outcome == "more_data"
        assert verdict.overall.lower is None


def test_the_same_draft_twice_is_not_better_and_not_certain() -> None:
    pairs = stream(np.random.default_rng(6), 500, 0.0)
    same = Pairs(
        pairs.cell,
        pairs.unit,
        pairs.weight,
        pairs.tokens,
        pairs.accepted,
        pairs.tested,
        pairs.steps,
        pairs.accepted,
        pairs.tested,
        pairs.steps,
    )
    verdict = fixed(same, CELLS, [0], RULES)
    assert verdict.overall.difference == 0.0
    assert verdict.overall.upper is not None
    assert verdict.overall.upper > 0.0
    assert verdict.outcome == "more_data"


@given(st.integers(0, 2**32 - 1), st.integers(1, 300))
def test_looking_more_often_never_undoes_what_was_shown(seed: int, cut: int) -> None:
    """The sequential test is a running maximum: what is promoted or rejected by a part stays so with the whole."""
    pairs = stream(np.random.default_rng(seed), 300, 0.15)
    first = np.arange(300) < cut
    early = sequential(pairs.where(first), CELLS, None, 0.9, Rules(min_share=1.0))
    late = sequential(pairs, CELLS, None, 0.9, Rules(min_share=1.0))
    if early.outcome != "more_data":
        assert late.outcome == early.outcome


def test_the_p99_is_exceeded_by_one_in_a_hundred() -> None:
    tokens = np.full(1000, 100.0)
    steps = np.arange(1.0, 1001.0) / 10
    limit = p99(steps, tokens)
    assert limit is not None
    assert (steps / tokens > limit).mean() == pytest.approx(0.01, abs=0.002)
    assert p99(steps[:5], np.full(5, 3.0)) is None
