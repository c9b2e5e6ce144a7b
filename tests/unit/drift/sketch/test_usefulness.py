from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.sketch.usefulness import usefulness


def requests(rng: np.random.Generator, number: int, slope: float) -> list[tuple[float, float, float]]:
    found = []
    for p in rng.random(number):
        tested = rng.integers(10, 60)
        rate = np.clip(0.6 + slope * (p - 0.5) + rng.normal(0, 0.1), 0, 1)
        found.append((float(p), float(rng.binomial(tested, rate)), float(tested)))
    return found


def test_acceptance_that_rises_with_p_is_informative() -> None:
    found = usefulness(requests(np.random.default_rng(0), 800, 0.3))
    assert found.answer == "informative"
    assert found.trend is not None
    assert found.trend > 0.8
    assert found.difference is not None
    assert found.difference[1] < 0.27 < found.difference[2]
    assert sum(tenth.hit_rate.requests for tenth in found.tenths) == 800
    assert all(tenth.hit_rate.denominator > 0 for tenth in found.tenths)


def test_acceptance_that_falls_with_p_is_not() -> None:
    assert usefulness(requests(np.random.default_rng(0), 800, -0.3)).answer == "uninformative"


def test_a_flat_curve_is_called_informative_no_more_often_than_the_interval_allows() -> None:
    rng = np.random.default_rng(1)
    answers = [usefulness(requests(rng, 300, 0.0)).answer for _ in range(400)]
    assert answers.count("uninformative") >= 400 * 0.95


def test_too_few_requests_are_no_answer() -> None:
    assert usefulness([]).answer == "not enough data"
    one = usefulness([(0.95, 5.0, 10.0)] * 9 + [(0.01, 1.0, 10.0)] * 10 + [(0.01, 0.0, 0.0)] * 9)
    assert (one.answer, one.difference, one.trend) == ("not enough data", None, None)
    assert one.tenths[0].hit_rate.requests == 10


def test_tenths_with_few_requests_are_compared_together() -> None:
    rng = np.random.default_rng(2)
    few = [(p, 9.0 + rng.integers(-1, 2), 10.0) for p in (0.25, 0.35, 0.45, 0.55, 0.75, 0.95) for _ in range(2)]
    found = usefulness([(0.05, 5.0 + rng.integers(-1, 2), 10.0) for _ in range(30)] + few)
    assert found.answer == "informative"
    assert found.difference is not None
    assert found.difference[0] == pytest.approx(0.4, abs=0.07)


def test_requests_that_are_all_alike_do_not_make_it_certain() -> None:
    found = usefulness([(0.05, 0.0, 10.0)] * 12 + [(0.95, 1.0, 10.0)] * 12)
    assert found.answer == "uninformative"
    assert found.difference is not None
    assert found.difference[1] < 0 < found.difference[2]


@given(st.lists(st.tuples(st.floats(0.001, 1), st.floats(0, 1), st.floats(0.1, 50)), max_size=60))
def test_every_request_falls_into_one_tenth(found: list[tuple[float, float, float]]) -> None:
    report = usefulness((p, share * tested, tested) for p, share, tested in found)
    assert sum(tenth.hit_rate.requests for tenth in report.tenths) == len(found)
    for tenth in report.tenths:
        inside = sum(tested for p, _, tested in found if tenth.lower + 1e-9 < p <= tenth.upper)
        assert inside <= tenth.hit_rate.denominator + 1e-6
    assert sum(t.hit_rate.denominator for t in report.tenths) == pytest.approx(sum(tested for *_, tested in found))
