"""What is behind an open event: what the store knows goes into the table of :mod:`driftwatch.drift.attribution`.

Looked at when an event opens, after everything that came with it is folded, and each time that something is folded
while it is open, because tests differ in speed: a fall may be found before the surprise that explains it. A cause that
was named once is left for another one only, never for ``unknown``. Each change of cause or advice is announced.

Whether to retrain is decided (:mod:`driftwatch.retrain.policy`) once the event has settled: at once if no other test
watches that could name another cause, else ``SETTLE`` requests later.
"""

from __future__ import annotations

import logging
from dataclasses import asdict

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control import events, mix, slo
from driftwatch.control.beside import Beside, Monitors
from driftwatch.control.events import CANARY, REGRESSED
from driftwatch.control.stake import at_stake
from driftwatch.drift.attribution import Findings, Verdict, attribute
from driftwatch.retrain.policy import propose
from driftwatch.settings import Settings
from driftwatch.store.schema import Cell, Event, Retrain

log = logging.getLogger(__name__)

SETTLE = 300
"""Requests of its segment after an event before training is asked for: what the scenarios' causes are measured at."""

PATIENCE = 4 * SETTLE
"""The same while nobody could name the cause any more: another test came near its alarm, and may speak yet."""


def review(session: Session, settings: Settings, now: float) -> None:
    """Look for the cause of every open event, announce what is new, and decide on retraining where it has settled."""
    session.flush()
    known: Monitors = {}
    still_open = list(events.open_events(session, Event.kind.not_in((REGRESSED, CANARY, *slo.KINDS.values()))))
    for event in tuple(still_open):
        beside = Beside.of(session, settings, event, known)
        found = beside.findings()
        verdict = attribute(found)
        if event.details.get("action") is None:
            told = next((one for one in still_open if is_told_by(event, verdict.cause, one)), None)
            if told is not None:
                log.info("%s of %s goes with event %s: no other", event.details["metric"], event.segment, told.id)
                facts = {key: event.details[key] for key in ("channel", "split", "log_evidence")}
                also = {event.kind: event.details["current"] | facts}
                told.details = told.details | {"also": told.details.get("also", {}) | also}
                still_open.remove(event)
                session.delete(event)
                continue
            _name(event, found, verdict)
            if event.kind in ("drift", "off_share") and event.deployment_id is not None:
                parts = mix.split_of(session, event.deployment_id, event.draft, now)
                event.details = event.details | {"mix": parts}
            events.introduce(session, settings, event)
        elif _is_news(event, verdict):
            log.warning("%s in %s: the cause is %s, not %s", event.kind, event.segment, verdict.cause, event.cause)
            _name(event, found, verdict)
            events.update(session, settings, event, now)
        _decide(session, settings, event, beside, verdict, now)


def is_told_by(event: Event, cause: str, other: Event) -> bool:
    """Whether an event that has just opened says nothing that another open one does not: one fault, one event.

    With a rising off-share go cells in which nothing changed, the engine's own and those ``off``. An engine at fault
    shows in its own cell and in its distance to the replay, whichever is first.
    """
    names = ("deployment_id", "draft", "segment")
    if other is event or any(getattr(event, name) != getattr(other, name) for name in names):
        return False
    if cause == "traffic":
        return event.kind == "drift" and other.kind == "off_share"
    return cause == other.cause == "engine" and _is_of_engine(event) and _is_of_engine(other)


def _is_of_engine(event: Event) -> bool:
    return event.kind == "live_gap" or (event.kind == "drift" and event.details["channel"] == "live")


def _is_news(event: Event, verdict: Verdict) -> bool:
    if (verdict.cause, verdict.action) == (event.cause, event.details["action"]):
        return False
    return verdict.cause != "unknown" or event.cause == "unknown"


def _name(event: Event, found: Findings, verdict: Verdict) -> None:
    event.cause = verdict.cause
    event.details = event.details | {
        "cause": verdict.cause,
        "action": verdict.action,
        "evidence": list(verdict.evidence),
        "against": list(verdict.against),
        "findings": asdict(found) | {"changed": None if found.changed is None else sorted(found.changed)},
    }


def _decide(session: Session, settings: Settings, event: Event, beside: Beside, verdict: Verdict, now: float) -> None:
    """Ask the policy about an event that has settled, and again whenever its cause became another."""
    if event.cell_id is None:
        return
    instead = _shadow_decides(session, event)
    if instead is None and not _settled(session, event, beside, verdict):
        return
    asked = [event.cause, event.details["action"]]
    decided = session.scalars(select(Retrain.id).where(Retrain.event_id == event.id)).first()
    if decided is not None and event.details.get("decided") in (asked, None):
        return
    event.details = event.details | {"decided": asked, "value_per_day": at_stake(session, settings, event, now)}
    cooldown_s = settings.retrain.cooldown_hours * 3600
    propose(session, event, cooldown_s=cooldown_s, instead=instead, policy=settings.retrain.policy, now=now)


def _settled(session: Session, event: Event, beside: Beside, verdict: Verdict) -> bool:
    if not beside.watching:
        return True
    cell = session.get_one(Cell, event.cell_id)
    since = events.requests_of(session, cell) - event.details.get("requests_before", 0)
    return is_settled(since, event.cause, verdict.cause)


def is_settled(since: int, named: str, now: str) -> bool:
    """Whether so many requests after an event the cause that it was named is worth acting on, given what it would be
    named now."""
    return since >= PATIENCE or (since >= SETTLE and (now != "unknown" or named == "unknown"))


def _shadow_decides(session: Session, event: Event) -> str | None:
    """Why a fall that the engine reports asks for no training itself: a replay of the same requests stands by.

    If the replay falls too, it asks; if it does not, the draft is as good as ever and the engine is at fault.
    """
    if event.kind != "drift" or event.details["channel"] == "shadow":
        return None
    key = {name: getattr(event, name) for name in ("deployment_id", "draft", "segment")}
    shadow = session.scalars(select(Cell.id).filter_by(**key, channel="shadow")).first()
    return None if shadow is None else "the replay of the same requests decides"
