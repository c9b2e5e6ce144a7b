"""A new deployment, or a new draft under the old name, beside the one before it: one look, once its normal is known.

This is no test for drift: two samples of a fixed size are compared (see :mod:`driftwatch.drift.comparison`), when the
newer cell's baseline freezes. Worse than the tolerance is an event of kind ``deployment_regressed`` whose cause is what
changed. It stays open until the next deployment takes over.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control import changes, events
from driftwatch.control.events import REGRESSED, TAKEN_OVER
from driftwatch.drift.attribution import Action
from driftwatch.drift.baseline import Baseline
from driftwatch.drift.comparison import compare
from driftwatch.records import segment_labels
from driftwatch.retrain.announce import DEPLOYMENT_REGRESSED, announce
from driftwatch.settings import Settings
from driftwatch.store.schema import Cell, Deployment, Event

log = logging.getLogger(__name__)

ACTIONS: Mapping[str, Action] = {"target": "rollback_target", "draft": "rollback_draft", "engine": "fix_engine"}


def look(
    session: Session,
    settings: Settings,
    deployment: Deployment,
    cell: Cell,
    baseline: Baseline,
    now: float,
    *,
    again: bool,
) -> None:
    """Compare a cell whose baseline has just frozen, ``again`` if not for the first time, with the one that it took
    over from, if there is one."""
    found = _before(session, deployment, cell, again=again)
    if found is None:
        return
    older, before, change = found
    compared = compare(Baseline.from_json(older.state["baseline"]), baseline, tolerance=settings.detect.tolerance)
    if not compared.regressed:
        log.info("%s (%s) after the change: %s", cell.segment, cell.channel, compared)
        return
    drifted = _drifted(session, older)
    cause = _cause(older, cell, change) if drifted is None else "unknown"
    part = {"split": cell.split, "channel": cell.channel, "metric": cell.metric} | asdict(compared)
    mine = (Event.kind == REGRESSED, Event.deployment_id == deployment.id, Event.segment == cell.segment)
    told = session.scalars(select(Event).where(*mine, Event.draft == cell.draft, Event.closed_at.is_(None))).first()
    if told is not None:
        told.details = told.details | {"cells": [*told.details["cells"], part]}
        return
    details: dict[str, Any] = {
        "kind": REGRESSED,
        "channel": cell.channel,
        "segment": cell.segment,
        "labels": segment_labels(cell.segment),
        "split": cell.split,
        "draft": cell.draft,
        "model": deployment.model,
        "before": {"deployment": before.id, "facts": before.facts, "fingerprint": older.fingerprint},
        "after": {"deployment": deployment.id, "facts": deployment.facts, "fingerprint": cell.fingerprint},
        "changed": change.details["changed"] if change else {},
        "tolerance": settings.detect.tolerance,
        "cause": cause,
        "action": ACTIONS.get(cause, "none"),
        "against": [] if drifted is None else [f"it had drifted before the change: event {drifted.id}"],
        "cells": [part],
    }
    event = Event(
        id=uuid.uuid4().hex,
        kind=REGRESSED,
        cell_id=cell.id,
        deployment_id=deployment.id,
        segment=cell.segment,
        split=cell.split,
        draft=cell.draft,
        cause=cause,
        opened_at=now,
        closed_at=None,
        request_id="",
        start_request_id=None,
        details=details,
    )
    session.add(event)
    session.flush()
    log.warning("%s regressed in %s (%s): %s", deployment.model, cell.segment, cause, compared)
    announce(
        session,
        settings.webhooks,
        id=f"{event.id}-regressed",
        type=DEPLOYMENT_REGRESSED,
        subject=cell.segment,
        at=now,
        data=details | {"event_id": event.id},
    )


def _before(
    session: Session, deployment: Deployment, cell: Cell, *, again: bool
) -> tuple[Cell, Deployment, Event | None] | None:
    """The newest earlier cell of this name whose normal is known, with its deployment and the event of the change.

    Deployments that merely stand side by side (another adapter, text in place of ids) took over from nobody. A roll-out
    may change the proposal length too. Hit rates compare all the same: on recorded traces they move by less than 0.03
    between the lengths 1 and 8. The other metrics do not, and what is learnt anew under another length says nothing of
    the roll-out that was looked at before.
    """
    changed = select(Event).where(Event.kind == changes.KIND, Event.deployment_id == deployment.id)
    change = session.scalars(changed).first()
    names = ("draft", "segment", "split", "channel", "metric")
    any_length = cell.metric == "hit_rate" and not again
    same = {name: getattr(cell, name) for name in (names if any_length else (*names, "gamma"))}
    earlier = (
        select(Cell, Deployment)
        .join(Deployment, Deployment.id == Cell.deployment_id)
        .filter_by(**same)
        .where(Cell.deployment_id.in_(events.taken_over_from(session, deployment)), Cell.id < cell.id)
        .order_by(Cell.id.desc())
    )
    for row in session.execute(earlier):
        older, before = row.Cell, row.Deployment
        taken_over = before.id == deployment.id or change is not None
        if taken_over and older.state["baseline"]["frozen"] is not None:
            return older, before, change if before.id != deployment.id else None
    return None


def _drifted(session: Session, older: Cell) -> Event | None:
    """The drift that was open when the newer cell took over: what fell before the change was not made by it."""
    drift = select(Event).where(Event.cell_id == older.id, Event.kind == "drift").order_by(Event.opened_at.desc())
    latest = session.scalars(drift).first()
    taken_over = latest is not None and latest.details.get("closed", {}).get("reason") == TAKEN_OVER
    return latest if taken_over else None


def _cause(older: Cell, cell: Cell, change: Event | None) -> str:
    """What changed: the draft where only its weights did, else the part that the facts name, if it is one alone."""
    if change is None:
        return "draft"
    return change.cause if older.fingerprint == cell.fingerprint or change.cause == "draft" else "unknown"
