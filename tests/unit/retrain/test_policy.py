"""The policy alone: what is asked for, and every reason not to."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from driftwatch.retrain.policy import Gain, Question, decide, waits
from driftwatch.settings import Policy

ASKED = Question(
    segment="tenant=a",
    split="off",
    cause="traffic",
    action="retrain",
    fall=0.1,
    value_per_day=None,
    instead=None,
    cooling=None,
    open=None,
)


@pytest.mark.parametrize(
    ("cause", "action", "answer"),
    [
        ("traffic", "retrain", "retrain"),
        ("concept", "retrain", "retrain"),
        ("target", "rollback_target", "redistil"),
        ("draft", "rollback_draft", "none"),
        ("engine", "fix_engine", "none"),
        ("load", "lower_gamma", "none"),
        ("unknown", "retrain", "retrain"),
        ("unknown", None, "retrain"),
        ("unknown", "none", "none"),
    ],
)
def test_each_cause_has_its_answer(cause: str, action: str | None, answer: str) -> None:
    decision = decide(replace(ASKED, cause=cause, action=action), Policy())
    assert decision.answer == answer
    assert decision.ask == (answer != "none")
    if answer == "none":
        assert decision.reasons[0].startswith(f"no training against the cause {cause}: ")


@pytest.mark.parametrize(
    ("policy", "question", "reason"),
    [
        ({"splits": ["on"]}, {}, "the split off is not in retrain.policy.splits"),
        ({"segments": ["tenant=b*"]}, {}, "the segment tenant=a is not in retrain.policy.segments"),
        ({"causes": {"concept": "retrain"}}, {}, "no training against the cause traffic"),
        ({"min_fall": 0.2}, {}, "the fall is 0.100, retrain.policy.min_fall 0.2"),
        ({"min_fall": 0.2}, {"fall": None}, "the fall is unknown"),
        (
            {"min_value_per_day": 10},
            {"value_per_day": Gain(3.0, 1.0, 5.0)},
            "the expected gain a day is 3.00 (1.00 to 5.00), retrain.policy.min_value_per_day 10",
        ),
        (
            {"min_value_per_day": 10},
            {"value_per_day": Gain(3.0, None, None)},
            "the expected gain a day is 3.00 (no limits), retrain.policy.min_value_per_day 10",
        ),
        ({"min_value_per_day": 10}, {}, "the expected gain a day is unknown"),
        ({}, {"cooling": "retrain-1"}, "cooldown since retrain-1"),
        ({}, {"open": "retrain-2"}, "retrain-2 of the same draft is open"),
        ({}, {"instead": "the replay decides"}, "the replay decides"),
        ({"dry_run": True}, {}, "dry run: would have asked to retrain"),
    ],
)
def test_each_reason_not_to_ask(policy: dict[str, Any], question: dict[str, Any], reason: str) -> None:
    decision = decide(replace(ASKED, **question), Policy(**policy))
    assert not decision.ask
    (said,) = decision.reasons
    assert said.startswith(reason)


def test_nothing_in_the_way_is_a_yes() -> None:
    policy = Policy(splits=["off"], segments=["tenant=?"], min_fall=0.05, min_value_per_day=2)
    assert decide(replace(ASKED, value_per_day=Gain(2.0, -1.0, 5.0)), policy).ask


def at(hour: int, minute: int = 0) -> float:
    return datetime(2026, 1, 2, hour, minute, tzinfo=UTC).timestamp()


def test_a_request_waits_for_samples_and_for_the_morning() -> None:
    policy = Policy(min_samples=100, quiet_hours="22:00-06:30")
    assert waits(policy, 99, at(12)) == "waits for samples: 99 of 100"
    for hour, minute, quiet in [(21, 59, False), (22, 0, True), (3, 0, True), (6, 29, True), (6, 30, False)]:
        assert (waits(policy, 100, at(hour, minute)) is not None) == quiet
    day = Policy(quiet_hours="09:00-17:00")
    assert [waits(day, 1, at(hour)) is None for hour in (8, 9, 16, 17)] == [True, False, False, True]


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/St_Johns"])
def test_quiet_hours_are_utc_wherever_control_runs(monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        night = Policy(quiet_hours="23:30-00:30")
        moments = [(23, 29), (23, 30), (0, 0), (0, 29), (0, 30)]
        assert [waits(night, 1, at(*moment)) is None for moment in moments] == [True, False, False, False, True]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("hours", ["22-6", "24:00-01:00", "a", "22:00 - 06:00"])
def test_hours_that_are_none_are_refused(hours: str) -> None:
    with pytest.raises(ValidationError):
        Policy(quiet_hours=hours)
