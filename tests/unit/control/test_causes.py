"""Which events say the same, so that one fault is one event; and when a cause is worth acting on."""

from __future__ import annotations

import math

import pytest

from driftwatch.control.beside import Beside
from driftwatch.control.causes import PATIENCE, SETTLE, is_settled, is_told_by
from driftwatch.control.load import Burden
from driftwatch.drift.evidence import BETS
from driftwatch.drift.monitors import Monitor
from driftwatch.drift.watch import Terms, Watch
from driftwatch.store import schema
from driftwatch.store.schema import Event


def event(kind: str, channel: str = "shadow", cause: str = "unknown", segment: str = "tenant=a") -> Event:
    return Event(deployment_id=1, draft="d", segment=segment, kind=kind, cause=cause, details={"channel": channel})


def test_a_fault_of_the_engine_is_one_event_whichever_test_is_first() -> None:
    live, gap = event("drift", "live", "engine"), event("live_gap", cause="engine")
    assert is_told_by(live, "engine", gap)
    assert is_told_by(gap, "engine", live)
    assert not is_told_by(live, "unknown", gap)
    assert not is_told_by(live, "engine", live)
    assert not is_told_by(live, "engine", event("live_gap")), "not while that one's cause is unknown"
    assert not is_told_by(live, "engine", event("live_gap", cause="engine", segment="tenant=b"))


@pytest.mark.parametrize("kind", ["drift", "below_break_even", "off_share"])
def test_a_fall_of_the_replay_is_never_the_engines(kind: str) -> None:
    assert not is_told_by(event(kind), "engine", event("live_gap", cause="engine"))


def test_cells_that_a_rising_off_share_moves_are_no_second_event() -> None:
    share = event("off_share")
    assert is_told_by(event("drift"), "traffic", share)
    assert not is_told_by(event("below_break_even"), "traffic", share)
    assert not is_told_by(event("drift"), "concept", share)
    assert not is_told_by(event("drift"), "traffic", event("off_share", segment="tenant=b"))


@pytest.mark.parametrize(
    ("named", "now", "settled_at"),
    [("concept", "concept", SETTLE), ("concept", "unknown", PATIENCE), ("unknown", "unknown", SETTLE)],
)
def test_training_waits_while_a_named_cause_is_in_doubt(named: str, now: str, settled_at: int) -> None:
    """A target that changed in silence shows within its cells first, and would be told as a change of the traffic."""
    assert not is_settled(settled_at - 1, named, now)
    assert is_settled(settled_at, named, now)


def test_a_test_that_is_near_its_alarm_in_another_segment_leaves_it_open() -> None:
    """Faults of the target are the whole deployment's."""

    def surprise(segment: str, evidence: float) -> tuple[schema.Monitor, Watch]:
        watch = Watch.start(Terms("surprise", 0.03, 1000.0, 100, 0.0))
        watch.monitor = Monitor("above", 0.2, 0.15, 1000.0, 0.0)
        watch.monitor.falling.logs = [evidence * math.log(1000.0)] * len(BETS)
        return schema.Monitor(segment=segment, kind="surprise", fingerprint=""), watch

    def surprise_up(other: float) -> bool | None:
        tests = [surprise("tenant=a", 0.2), surprise("tenant=b", other)]
        return Beside(event("drift"), [], tests, frozenset(), None, frozenset(), Burden()).findings().surprise_up

    assert surprise_up(0.2) is False
    assert surprise_up(0.7) is None
