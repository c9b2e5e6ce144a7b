"""Events: stored when they open, told once their cause was looked for, ended by what opened them.

An event is announced in the transaction that opened it, but only after all that came with it is folded, since the
other tests say what is behind it (see ``causes``). Whoever ends one that was not announced yet announces it first.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control.terms import figure
from driftwatch.drift.interval import Estimate
from driftwatch.records import segment_labels
from driftwatch.retrain.announce import DRIFT_CLOSED, DRIFT_OPENED, DRIFT_UPDATED, announce
from driftwatch.settings import Model, Settings
from driftwatch.store.deployments import OF_REQUESTS
from driftwatch.store.schema import Cell, Deployment, Event, Replay, Sample

REGRESSED = "deployment_regressed"
"""A roll-out, or new weights, made it worse: its cause is what changed, and no test opens or closes it."""
CANARY = "canary"
"""The target answers the canary prompts otherwise: it has a cause from the start, and a test of its own."""
TAKEN_OVER = "another deployment or draft has taken over"
"""Why what is open in a cell or test that gets no more traffic is over."""


@dataclass(frozen=True)
class Alarm:
    """What a test says when it alarms. ``level`` is what was tested, on the scale of ``current``."""

    kind: str
    metric: str
    definition: str
    baseline: Estimate | None
    current: Estimate
    level: float
    evidence: float
    index: int
    start_index: int


def requests_of(session: Session, cell: Cell) -> int:
    """Requests so far of the segment that a cell is part of, over all splits."""
    key = {name: getattr(cell, name) for name in ("deployment_id", "draft", "segment", "channel", "fingerprint")}
    return sum(sums["requests"] for sums in session.scalars(select(Cell.sums).filter_by(**key)))


def request_at(session: Session, channel: str, index: int) -> Sample | None:
    """The request of an index in a channel; None once retention has deleted it."""
    if channel == "live":
        return session.get(Sample, index)
    found = select(Sample).join(Replay, Replay.sample_id == Sample.id)
    return session.scalars(found.where(Replay.id == index)).first()


def opened(
    session: Session, settings: Settings, deployment: Deployment, model: Model, cell: Cell, alarm: Alarm, now: float
) -> Event:
    """Store an event of a cell; its cause is looked for, and it is announced, when the transaction ends."""
    start, request = (request_at(session, cell.channel, index) for index in (alarm.start_index, alarm.index))
    event = Event(
        id=uuid.uuid4().hex,
        kind=alarm.kind,
        cell_id=cell.id,
        deployment_id=cell.deployment_id,
        segment=cell.segment,
        split=cell.split if alarm.kind == "drift" else "none",
        draft=cell.draft,
        cause="unknown",
        opened_at=now,
        request_id=request.request_id if request else "",
        start_request_id=start.request_id if start else None,
        details={
            "kind": alarm.kind,
            "channel": cell.channel,
            "metric": alarm.metric,
            "definition": alarm.definition,
            "segment": cell.segment,
            "labels": segment_labels(cell.segment),
            "split": cell.split if alarm.kind == "drift" else "none",
            "draft": cell.draft,
            "fingerprint": cell.fingerprint,
            "model": deployment.model,
            "deployment": deployment.facts,
            "gamma": cell.gamma,
            "rule": model.rule,
            "current": figure(alarm.current),
            "floor" if alarm.kind == "drift" else "limit": alarm.level,
            "tolerance": settings.detect.tolerance,
            "log_evidence": alarm.evidence,
            "requests_between_false_alarms": settings.detect.requests_between_false_alarms,
            "request_id": request.request_id if request else None,
            "start_request_id": start.request_id if start else None,
            "start_served_at": start.served_at if start else None,
            "requests_before": requests_of(session, cell),
        }
        | ({} if alarm.baseline is None else {"baseline": figure(alarm.baseline)}),
    )
    session.add(event)
    session.flush()
    return event


def taken_over_from(session: Session, deployment: Deployment) -> list[int]:
    """Deployments of the model that a deployment may have taken over from, itself among them.

    Those of other adapters, or of text in place of ids, stand beside it and go on.
    """
    earlier = select(Deployment).where(Deployment.model == deployment.model, Deployment.id <= deployment.id)
    mine = {key: value for key, value in deployment.facts.items() if key in OF_REQUESTS}
    return [
        one.id
        for one in session.scalars(earlier.order_by(Deployment.id))
        if all(one.facts.get(key, value) == value for key, value in mine.items())
    ]


def open_events(session: Session, *where: Any) -> Sequence[Event]:
    """Events that are not over, in the order in which they opened."""
    query = select(Event).where(Event.closed_at.is_(None), *where)
    return session.scalars(query.order_by(Event.opened_at, Event.id)).all()


def introduce(session: Session, settings: Settings, event: Event) -> None:
    """Announce an event that opened, once."""
    if "revision" in event.details:
        return
    event.details = event.details | {"revision": 0}
    _tell(session, settings, event, DRIFT_OPENED, "opened", event.opened_at)


def update(session: Session, settings: Settings, event: Event, now: float) -> None:
    """Announce that the cause of an open event is seen otherwise; each revision has an id of its own."""
    event.details = event.details | {"revision": event.details["revision"] + 1}
    _tell(session, settings, event, DRIFT_UPDATED, f"updated-{event.details['revision']}", now)


def end(session: Session, settings: Settings, event: Event, how: Mapping[str, Any], now: float) -> None:
    """End an event; that of a test is announced, and one that was not announced yet is so first."""
    event.closed_at = now
    if event.kind == REGRESSED:
        event.details = event.details | {"closed": dict(how)}
        return
    introduce(session, settings, event)
    event.details = event.details | {"closed": dict(how)}
    _tell(session, settings, event, DRIFT_CLOSED, "closed", now)


def _tell(session: Session, settings: Settings, event: Event, type: str, suffix: str, at: float) -> None:
    announce(
        session,
        settings.webhooks,
        id=f"{event.id}-{suffix}",
        type=type,
        subject=event.segment,
        at=at,
        data=event.details | {"event_id": event.id, "cause": event.cause},
    )
