from __future__ import annotations

import pytest

from driftwatch.control.events import CANARY, REGRESSED
from driftwatch.control.monitors import EVENTS
from driftwatch.control.page import words
from driftwatch.control.terms import DEFINITIONS
from driftwatch.drift.attribution import Action
from driftwatch.drift.interval import Estimate
from driftwatch.drift.watch import KINDS
from driftwatch.store.deployments import CHANGED


def test_every_event_metric_and_action_has_its_words() -> None:
    kinds = {"drift", CANARY, CHANGED, REGRESSED, *(EVENTS.get(kind, kind) for kind in KINDS)}
    assert kinds <= words.KINDS.keys()
    assert {*DEFINITIONS, *KINDS} <= words.METRICS.keys()
    assert set(Action.__args__) == set(words.ACTIONS)  # type: ignore[attr-defined]


def test_no_two_tests_of_a_segment_look_the_same() -> None:
    shown = [(words.kind(EVENTS.get(kind, kind)), words.metric(kind)) for kind in KINDS]
    assert len(set(shown)) == len(shown)


def test_what_is_not_known_is_never_a_number() -> None:
    for nothing in (None, Estimate(None, None, None, 0, 0.0, 0.0), {"value": None}):
        assert "not enough data" in words.estimate(nothing)
        assert "0" not in words.estimate(nothing)
    assert words.estimate(Estimate(0.5, None, None, 1, 1.0, 2.0)) == (
        "0.500 <small>too few requests for limits</small>"
    )
    assert words.number(None) == "not enough data"
    assert words.time(None) == "not known"


def test_an_estimate_comes_with_its_limits_stored_or_not() -> None:
    estimate = Estimate(0.871, 0.8421, 0.897, 9, 1.0, 2.0)
    assert (
        words.estimate(estimate)
        == words.estimate(vars(estimate))
        == '0.871 <small class="limits">0.842 to 0.897</small>'
    )
    assert words.estimate(estimate, 1) == '0.9 <small class="limits">0.8 to 0.9</small>'


def test_times_are_utc_for_people_and_programs() -> None:
    assert words.time(0.0) == '<time datetime="1970-01-01T00:00:00.000Z">01 Jan 00:00</time>'


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (59, "59 s"), (60, "1 minute"), (7300, "2 hours"), (200_000, "2 days")]
)
def test_durations(seconds: float, said: str) -> None:
    assert words.duration(seconds) == said
