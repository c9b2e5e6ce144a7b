"""States of a retrain: what may follow what."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.retrain.states import FOLLOWS, OPEN, REPORTED, STATES, IllegalTransition, State, check

PATHS: tuple[tuple[State, ...], ...] = (
    ("proposed", "requested", "accepted", "training", "candidate_ready", "evaluating", "promoted"),
    ("proposed", "requested", "candidate_ready", "evaluating", "rejected"),
    ("suppressed", "proposed", "suppressed"),
    ("requested", "training", "failed"),
    ("evaluating", "expired"),
)


@pytest.mark.parametrize("path", PATHS)
def test_the_usual_ways_are_legal(path: tuple[State, ...]) -> None:
    for before, after in pairwise(path):
        check(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("proposed", "promoted"),
        ("requested", "suppressed"),
        ("training", "accepted"),
        ("candidate_ready", "promoted"),
        ("promoted", "rejected"),
        ("failed", "requested"),
        ("suppressed", "requested"),
        ("requested", "requested"),
    ],
)
def test_what_is_not_is_an_error_that_says_what_is(before: State, after: State) -> None:
    with pytest.raises(IllegalTransition, match=f"a retrain that is {before} cannot become {after}; possible: "):
        check(before, after)


@given(st.lists(st.sampled_from(STATES), min_size=1, max_size=30))
def test_every_walk_of_an_open_one_ends_and_stays_there(wanted: list[State]) -> None:
    """Whatever is asked for, in any order: an end is never left, and nobody is promoted without an evaluation."""
    state: State = "proposed"
    seen = [state]
    for after in wanted:
        if after in FOLLOWS[state]:
            state = after
            seen.append(state)
    if "promoted" in seen:
        assert seen[-1] == "promoted"
        assert seen[-2] == "evaluating"
    assert (state in OPEN) == bool({"failed", "expired"} & FOLLOWS[state])


def test_every_state_is_reached_and_open_ones_lead_on() -> None:
    assert set(FOLLOWS) == set(STATES)
    assert {after for follows in FOLLOWS.values() for after in follows} == set(STATES)
    assert {"proposed", "requested", "accepted", "training", "candidate_ready", "evaluating"} == OPEN
    assert {after for follows in FOLLOWS.values() for after in follows} >= REPORTED
