"""Units: requests pass through, sessions are collected, memory stays bounded, nothing is lost or counted twice."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.units import Unit, Units


def take(units: Units, index: int, session: str | None, time_s: float | None = None, tested: float = 4.0) -> list[Unit]:
    return units.add(
        index=index, time_s=float(index) if time_s is None else time_s, session=session, accepted=1.0, tested=tested
    )


def test_a_request_without_session_is_a_unit_at_once() -> None:
    units = Units()
    assert take(units, 7, None, 12.5) == [Unit(7, 12.5, 12.5, 1, 1.0, 4.0)]
    assert units.open == {}


def test_weight_and_rate() -> None:
    unit = Unit(0, 0.0, 0.0, 1, 3.0, 15.0)
    assert (unit.rate, unit.weight) == (0.2, 0.75)


def test_interleaved_sessions_close_once_each_after_silence() -> None:
    units = Units(idle_s=10.0)
    for index, session in enumerate("abababa"):
        assert take(units, index, session) == []
    assert units.expire(14.9) == []
    assert units.expire(15.0) == [Unit(1, 1.0, 5.0, 3, 3.0, 12.0)]
    assert take(units, 9, None, 16.0) == [Unit(0, 0.0, 6.0, 4, 4.0, 16.0), Unit(9, 16.0, 16.0, 1, 1.0, 4.0)]


def test_a_session_that_goes_on_for_ever_is_cut() -> None:
    units = Units(idle_s=10.0, max_age_s=20.0)
    closed = [unit for index in range(50) for unit in take(units, index, "s")]
    assert [unit.requests for unit in closed] == [20, 20]
    assert units.aged == 2
    assert [unit.requests for unit in units.drain()] == [10]


def test_the_least_recently_seen_leaves_a_full_table() -> None:
    units = Units(max_open=2)
    for index, session in enumerate("aba"):
        take(units, index, session)
    assert [unit.index for unit in take(units, 3, "c")] == [1]
    assert list(units.open) == ["a", "c"]
    assert units.evicted == 1


def test_a_request_without_tested_proposals_touches_nothing() -> None:
    units = Units(idle_s=10.0)
    take(units, 0, "s")
    before = units.to_json()
    assert units.add(index=1, time_s=5.0, session="s", accepted=0.0, tested=0.0) == []
    assert units.add(index=2, time_s=5.0, session=None, accepted=0.0, tested=0.0) == []
    assert units.to_json() == {**before, "now_s": 5.0}


def test_time_never_runs_backwards() -> None:
    units = Units(idle_s=10.0)
    take(units, 0, "a", 100.0)
    take(units, 1, "b", 50.0)
    assert units.open["b"].first_s == 100.0


@pytest.mark.parametrize(
    ("accepted", "tested"),
    [(5.0, 4.0), (-1.0, 4.0), (float("nan"), 4.0), (1.0, float("nan")), (1.0, float("inf"))],
)
def test_impossible_counts_are_refused(accepted: float, tested: float) -> None:
    with pytest.raises(ValueError, match="request 3"):
        Units().add(index=3, time_s=0.0, session=None, accepted=accepted, tested=tested)


def test_rounding_of_fractional_weights_is_forgiven() -> None:
    (unit,) = Units().add(index=0, time_s=0.0, session=None, accepted=3.0000000001, tested=3.0)
    assert unit.rate == 1.0


stream = st.lists(
    st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.floats(0, 30), st.integers(0, 5)), max_size=60
)


@given(stream, st.integers(0, 60))
def test_every_request_enters_one_unit_and_a_restart_changes_nothing(
    requests: list[tuple[str | None, float, int]], cut: int
) -> None:
    straight = Units(idle_s=20.0, max_age_s=50.0, max_open=3)
    restarted = Units(idle_s=20.0, max_age_s=50.0, max_open=3)
    one: list[Unit] = []
    other: list[Unit] = []
    time_s = 0.0
    for index, (session, gap, tested) in enumerate(requests):
        if index == cut:
            restarted = Units.from_json(json.loads(json.dumps(restarted.to_json())))
        time_s += gap
        for units, closed in ((straight, one), (restarted, other)):
            closed += units.add(index=index, time_s=time_s, session=session, accepted=tested / 3, tested=float(tested))
            assert len(units.open) <= 3
    assert one == other
    one += straight.drain()
    assert sum(unit.requests for unit in one) == sum(tested > 0 for *_, tested in requests)
    assert sum(unit.tested for unit in one) == sum(tested for *_, tested in requests)
    assert len({unit.index for unit in one}) == len(one)


def test_a_look_from_outside_moves_no_clock() -> None:
    """A history of last month comes in while control looks for silent sessions by its own clock."""
    units = Units(idle_s=1800.0)
    units.add(index=0, time_s=1000.0, session="a", accepted=1.0, tested=2.0)
    (closed,) = units.expire(1e9)
    assert closed.last_s == 1000.0
    (later,) = units.add(index=1, time_s=1060.0, session=None, accepted=1.0, tested=2.0)
    assert later.first_s == 1060.0
