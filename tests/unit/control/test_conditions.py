"""What requests were served under: absent is unknown, parts add, and a store of an earlier version has none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.control import conditions
from driftwatch.control.conditions import KEY, Conditions, Served

requests = st.lists(
    st.tuples(
        st.builds(
            Served,
            running=st.none() | st.integers(1, 300).map(float),
            context=st.none() | st.integers(0, 4000).map(float),
            ttft_s=st.none() | st.sampled_from([0.25, 0.5]),
            e2e_s=st.none() | st.sampled_from([0.25, 1.0, 4.0]),
        ),
        st.integers(1, 8).map(float),
    ),
    max_size=30,
)


def of(given: list[tuple[Served, float]]) -> Conditions:
    found = Conditions()
    for request, weight in given:
        found.add(request, weight)
    return found


@settings(derandomize=True, deadline=None)
@given(requests, requests)
def test_parts_add_to_the_whole_through_the_store(
    first: list[tuple[Served, float]], second: list[tuple[Served, float]]
) -> None:
    stored = json.loads(json.dumps({KEY: of(first).to_json()}))
    assert (conditions.read(stored) + of(second)).to_json() == of(first + second).to_json()


def test_what_a_sample_says() -> None:
    served = Served.of({"running": 0}, {"ttft_s": 0.2, "e2e_s": 1.0}, 100, 40)
    assert served == Served(1.0, 80.0, 0.2, 1.0), "an engine that was looked at too late had at least this one"
    assert Served.of(None, None, 100, 40) == Served(None, 80.0, None, None)
    assert Served.of({"running": "many"}, {}, 1, 40).running is None


def test_means_are_of_all_traffic_and_the_load_is_exact() -> None:
    found = of([(Served(8.0, 100.0, 0.5, 1.0), 3.0), (Served(9.0, 200.0, 0.25, 4.0), 1.0), (Served(9.0), 1.0)])
    assert found.running.quantile(0.5).value == 9.0
    assert found.context == 125.0
    assert found.prefill_share == pytest.approx(1.75 / 7.0)
    assert (found.timed, Conditions().prefill_share, Conditions().context) == (2, None, None)


def test_an_hour_of_an_earlier_version_says_nothing() -> None:
    assert conditions.read({"requests": 3}).to_json() == Conditions().to_json()
