"""Two drafts on the same requests: units, differences and their interval."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.paired import MIN_UNITS, Pairs, paired, units_in_order


def pairs_of(accepted: list[float], incumbent: list[float], tested: float = 10.0) -> Pairs:
    n = len(accepted)
    zeros, tests = np.zeros(n, np.int64), np.full(n, tested)
    ones = np.ones(n)
    return Pairs(
        zeros, np.arange(n), ones, ones * 20, np.array(accepted), tests, ones, np.array(incumbent), tests, ones
    )


def test_the_interval_is_that_of_the_paired_differences() -> None:
    """With as many tested in every request that of the ratios is the mean difference, its error the plain one."""
    rng = np.random.default_rng(0)
    incumbent = rng.integers(2, 8, 200).astype(float)
    candidate = incumbent + rng.integers(0, 3, 200)
    row = paired(pairs_of(candidate.tolist(), incumbent.tolist()), 0.95)
    d = (candidate - incumbent) / 10
    assert row.difference == pytest.approx(d.mean())
    assert row.upper is not None
    assert row.upper - d.mean() == pytest.approx(1.972 * d.std(ddof=1) / np.sqrt(200), rel=1e-3)


def test_the_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(2000):
        shared = rng.normal(0, 0.1, 100)
        incumbent = rng.binomial(10, np.clip(0.5 + shared, 0, 1)).astype(float)
        candidate = rng.binomial(10, np.clip(0.5 + shared, 0, 1)).astype(float)
        row = paired(pairs_of(candidate.tolist(), incumbent.tolist()), 0.95)
        assert row.lower is not None
        assert row.upper is not None
        covered += row.lower <= 0.0 <= row.upper
    assert 0.935 <= covered / 2000 <= 0.965


def test_too_few_units_have_no_interval() -> None:
    row = paired(pairs_of([5.0] * (MIN_UNITS - 1), [4.0] * (MIN_UNITS - 1)), 0.95)
    assert row.difference == pytest.approx(0.1)
    assert (row.lower, row.upper) == (None, None)


def test_nothing_tested_is_no_rate() -> None:
    assert paired(pairs_of([0.0] * 50, [0.0] * 50, tested=0.0), 0.95).difference is None


def test_a_session_is_one_unit_once_it_is_silent() -> None:
    sessions = ["s", None, "s", None, "t", None]
    served = [0.0, 10.0, 20.0, 1900.0, 1900.0, 1901.0]
    assert units_in_order(sessions, served).tolist() == [1, 0, 1, 2, -1, 3]


@given(
    st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(0, 4000)), max_size=40), st.integers(0, 40)
)
def test_numbers_of_units_stay_when_more_requests_come(requests: list[tuple[str | None, int]], cut: int) -> None:
    sessions = [session for session, _ in requests]
    clock = np.cumsum([at / 10 for _, at in requests]).tolist()
    early = units_in_order(sessions[:cut], clock[:cut])
    late = units_in_order(sessions, clock)[:cut]
    closed = early >= 0
    assert (late[closed] == early[closed]).all()
