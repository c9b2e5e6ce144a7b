"""The p-value is exact, and what is said with it carries its denominator."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.sketch.sketch import Scale, Share, Views, p_value, purity


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=40, unique=True))
def test_each_of_exchangeable_scores_is_as_likely_at_every_rank(scores: list[float]) -> None:
    """Whichever of n + 1 scores is the new one is equally likely; over all of them p takes 1/(n+1) .. 1 once each."""
    found = [p_value(np.sort([s for j, s in enumerate(scores) if j != i]), scores[i]) for i in range(len(scores))]
    n = len(scores)
    assert sorted(found) == pytest.approx([(i + 1) / n for i in range(n)])


@given(st.lists(st.sampled_from([-math.inf, 0.0, 1.0, 2.0]), min_size=2, max_size=40), st.integers(1, 99))
def test_ties_make_it_conservative_never_wrong(scores: list[float], percent: int) -> None:
    found = [p_value(np.sort([s for j, s in enumerate(scores) if j != i]), scores[i]) for i in range(len(scores))]
    assert Fraction(sum(p <= percent / 100 for p in found), len(found)) <= Fraction(percent, 100)


def test_the_stranger_view_decides() -> None:
    scale = Scale.of([Views(0.2, 0.1, 9), Views(0.4, 0.1, 9)])
    assert scale.groups[0].spread == pytest.approx((0.1, 0.01))  # all alike is not certain
    assert scale.score(Views(0.3, 0.1, 9)) == pytest.approx(0.0)
    assert scale.score(Views(0.9, 0.1, 9)) == pytest.approx(6.0)
    assert scale.score(Views(0.1, 0.2, 9)) == pytest.approx(10.0)
    assert scale.score(None) == -math.inf


def test_a_prompt_is_measured_by_those_of_its_length() -> None:
    rng = np.random.default_rng(0)
    lengths = [10] * 120 + [1000] * 120
    spreads = [0.1] * 120 + [0.02] * 120
    scale = Scale.of([Views(0.5, 0.3 + rng.normal(0, sd), n) for n, sd in zip(lengths, spreads, strict=True)])
    assert [group.tokens for group in scale.groups] == [10, 10, 1000, 1000]
    short, long, longer = (scale.score(Views(0.5, 0.4, n)) for n in (10, 1000, 50_000))
    assert 0.5 < short < 2.0
    assert long > 4.0
    assert longer == pytest.approx(long, rel=0.5)


def test_purity_is_what_chance_leaves() -> None:
    # 1% truly off, found with power .8, beside 5% by chance: at least a seventh of what is off is off indeed.
    share = 0.01 * 0.8 + 0.99 * 0.05
    off = Share(share, share - 0.01, share + 0.01, 1000)
    found = purity(off, 0.05)
    assert found.value == pytest.approx(1 - 0.05 / share)
    assert 0.12 < found.value < 0.14
    assert found.lower <= found.value <= found.upper
    assert purity(Share.of(0, 50), 0.05).value == 0.0
    assert purity(Share.of(50, 50), 0.05).value == pytest.approx(0.95)
