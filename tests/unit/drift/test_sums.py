"""Sums: exact merging, every figure against the plain formula, JSON to the last bit."""

from __future__ import annotations

import json
import math
from functools import reduce
from operator import add
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.acceptance import Tally, Weights, tally
from driftwatch.drift.interval import student_quantile
from driftwatch.drift.sums import FIGURES, Count, Figure, Sums

GAMMA = 4


def judged(*bits: int) -> Tally:
    return tally(Weights(np.array(bits, dtype=np.float64)[:, None]), GAMMA)


def some(seed: int, requests: int, *, fractional: bool = False) -> list[Tally]:
    rng = np.random.default_rng(seed)
    found = []
    for length in rng.integers(1, 30, requests):
        values = rng.random((int(length), 1))
        found.append(tally(Weights(values if fractional else (values < 0.6).astype(float)), GAMMA))
    return found


def merged(parts: list[Sums]) -> Sums:
    return reduce(add, parts, Sums.zero(GAMMA))


def count(t: Tally, name: Count, gamma: int) -> float:
    return float(t.tokens) if name == "tokens" else float(getattr(t, name)[gamma - 1])


requests = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(1, 5)), min_size=1, max_size=8
)


@given(requests, st.randoms(use_true_random=False), st.integers(0, 8))
@settings(max_examples=50, deadline=None)
def test_any_order_and_any_grouping_give_the_same_sums(
    drawn: list[tuple[list[int], int]], random: Random, cut: int
) -> None:
    parts = [Sums.request(judged(*bits), float(weight)) for bits, weight in drawn]
    straight = merged(parts).to_json()
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert merged(shuffled).to_json() == straight
    assert (merged(parts[:cut]) + merged(parts[cut:])).to_json() == straight


def test_fractional_weights_add_up_to_rounding() -> None:
    parts = [Sums.request(t, 1.7) for t in some(3, 40, fractional=True)]
    one, other = merged(parts), merged(parts[::-1])
    np.testing.assert_allclose(one.products, other.products, rtol=1e-12)
    first, second = one.interval("hit_rate", 3), other.interval("hit_rate", 3)
    assert (first.lower, first.upper) == pytest.approx((second.lower, second.upper), rel=1e-12)


@pytest.mark.parametrize("figure", list(FIGURES))
@pytest.mark.parametrize("gamma", [1, 3, GAMMA])
@pytest.mark.parametrize("weighted", [False, True])
def test_interval_is_the_cluster_formula(figure: Figure, gamma: int, weighted: bool) -> None:
    found = some(11, 50)
    weights = np.random.default_rng(5).choice([1.0, 2.5, 8.0], 50) if weighted else np.ones(50)
    sums = merged([Sums.request(t, w) for t, w in zip(found, weights.tolist(), strict=True)])
    top, bottom = FIGURES[figure]
    y = weights * np.array([count(t, top, gamma) for t in found])
    n = weights * np.array([count(t, bottom, gamma) for t in found])
    r = y.sum() / n.sum()
    error = math.sqrt(50 / 49 * ((y - r * n) ** 2).sum()) / n.sum()
    reach = student_quantile(math.floor(n.sum() ** 2 / (n * n).sum() - 1)) * error
    shift = 1.0 if figure == "acceptance_length" else 0.0
    estimate = sums.interval(figure, gamma)
    assert estimate.value == pytest.approx(shift + r)
    assert estimate.half_width == pytest.approx(reach)
    assert (estimate.numerator, estimate.denominator) == pytest.approx((y.sum(), n.sum()))
    assert sums.total(top, gamma) == pytest.approx(y.sum())
    assert estimate.requests == sums.requests == 50


def test_value_is_the_ratio_that_replay_prints() -> None:
    sums = merged([Sums.request(t) for t in some(1, 30)])
    for gamma in range(1, GAMMA + 1):
        figures = sums.tally.figures(gamma)
        assert sums.interval("hit_rate", gamma).value == pytest.approx(figures["hit_rate"])
        assert sums.interval("acceptance_rate", gamma).value == pytest.approx(figures["acceptance_rate"])
        assert sums.interval("acceptance_length", gamma).value == pytest.approx(figures["acceptance_length"])
        assert sums.interval("steps_per_token", gamma).value == pytest.approx(figures["steps"] / sums.tokens)


def test_worked_example_of_the_definitions() -> None:
    sums = Sums.request(judged(1, 1, 0, 1, 1, 1, 1, 0), 3.0)
    assert (sums.requests, sums.units, sums.tokens, sums.weight) == (1, 1, 8, 3.0)
    assert [sums.total("accepted", g) for g in (1, 2, 3)] == [9.0, 15.0, 15.0]
    assert [sums.total("tested", g) - sums.total("accepted", g) for g in (1, 2, 3)] == [6.0, 3.0, 6.0]
    assert sums.accepted_at[1, :2].tolist() == [9.0, 6.0]  # windows 2 2 1
    only = sums.interval("hit_rate", 1)
    assert (only.value, only.lower, only.upper) == (0.6, None, None)


def test_ends_of_every_range() -> None:
    whole = merged([Sums.request(judged(*[1] * 20)) for _ in range(30)])
    none = merged([Sums.request(judged(*[0] * 20)) for _ in range(30)])
    for gamma in (1, GAMMA):
        best, worst = whole.interval("hit_rate", gamma), none.interval("hit_rate", gamma)
        assert best.upper == 1.0
        assert best.lower is not None
        assert best.lower < 0.95
        assert worst.lower == 0.0
        assert worst.upper is not None
        assert worst.upper > 0.05
        slow = none.interval("steps_per_token", gamma)
        assert slow.value == slow.upper == 1.0
        length = none.interval("acceptance_length", gamma)
        assert length.value == length.lower == 1.0
        longest = whole.interval("acceptance_length", gamma).upper
        assert longest is not None
        assert longest <= 1 + gamma


def test_a_session_is_one_unit() -> None:
    turns = some(2, 3)
    session = Sums.session([(t, 2.0) for t in turns])
    apart = merged([Sums.request(t, 2.0) for t in turns])
    assert (session.units, apart.units, session.requests, apart.requests) == (1, 3, 3, 3)
    np.testing.assert_allclose(session.totals, apart.totals)
    np.testing.assert_allclose(session.products[0], session.totals[0] ** 2)
    assert session.interval("hit_rate", 2).lower is None
    assert apart.interval("hit_rate", 2).lower is not None


def test_json_is_exact_and_goes_on_as_before() -> None:
    found = some(9, 20, fractional=True)
    half = merged([Sums.request(t, 1.3) for t in found[:10]])
    back = Sums.from_json(json.loads(json.dumps(half.to_json())))
    assert back.to_json() == half.to_json()
    for t in found[10:]:
        half, back = half + Sums.request(t, 0.7), back + Sums.request(t, 0.7)
    assert back.to_json() == half.to_json()
    assert back.interval("steps_per_token", 2) == half.interval("steps_per_token", 2)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="positive"):
        Sums.request(judged(1), 0.0)
    with pytest.raises(ValueError, match="at least one"):
        Sums.session([])
    with pytest.raises(ValueError, match="gamma 5"):
        Sums.zero(GAMMA).interval("hit_rate", 5)
    with pytest.raises(ValueError, match="do not add"):
        Sums.zero(GAMMA) + Sums.zero(GAMMA + 1)
    assert Sums.zero(GAMMA).interval("hit_rate", 1).value is None


def test_widened_sums_keep_every_figure_and_add_to_wider_ones() -> None:
    narrow = merged([Sums.request(t, 1.5) for t in some(5, 10)])
    wide = narrow.widened(GAMMA + 3)
    assert wide.gammas == GAMMA + 3
    for figure in FIGURES:
        assert wide.interval(figure, GAMMA) == narrow.interval(figure, GAMMA)
        assert wide.interval(figure, GAMMA + 1).value is None
    assert (wide + wide).gammas == GAMMA + 3
    assert narrow.widened(2) is narrow
