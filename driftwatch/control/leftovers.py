"""What a test cannot end itself: an event whose requests are over, and a latch whose event is.

A test closes its event on requests alone. Where none come any more (another deployment or draft has taken over, the
segment has gone), the event is ended here, with its reason. And a finding that another event told (``details.also``)
has no event of its own: once that one is over the test gathers evidence anew, or a fall that goes on would stay untold.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control import events
from driftwatch.control.beside import ROLL_OUT_S
from driftwatch.control.cells import begin_anew, model_of
from driftwatch.control.monitors import MonitorUpdate
from driftwatch.drift.cell import CellState
from driftwatch.settings import Settings
from driftwatch.store import deployments
from driftwatch.store.samples import DAY
from driftwatch.store.schema import Cell, Deployment, Event, Monitor

RENAMED = "the settings no longer name this draft"
SILENT = "no request since the store let go of the last one"


def end(session: Session, settings: Settings, now: float) -> None:
    """End the events that get no more requests: those of a cell, and the canaries' of a deployment."""
    for event in events.open_events(session, Event.deployment_id.is_not(None)):
        reason = _reason(session, settings, event, now)
        if reason is not None:
            events.end(session, settings, event, {"reason": reason}, now)
            _begin_anew(session, settings, event, now)


def told_by(session: Session, settings: Settings, now: float) -> None:
    """Let tests begin anew whose findings were told by an event that has just ended."""
    session.flush()
    for event in session.scalars(select(Event).where(Event.closed_at == now)).all():
        if "also" in event.details:
            _begin_anew(session, settings, event, now)


def _reason(session: Session, settings: Settings, event: Event, now: float) -> str | None:
    deployment = session.get_one(Deployment, event.deployment_id)
    cell = None if event.cell_id is None else session.get(Cell, event.cell_id)
    heard = deployment.last_seen if cell is None else cell.updated_at
    if heard > now - ROLL_OUT_S:
        return None
    if deployments.is_gone(session, deployment):
        return events.TAKEN_OVER
    if cell is None:
        return None
    drafts = model_of(session, settings, deployment.id).drafts
    if drafts and cell.draft not in {draft.name for draft in drafts}:
        return RENAMED
    same = {name: getattr(cell, name) for name in ("deployment_id", "draft", "segment", "split", "channel")}
    later = select(Cell.id).filter_by(**same).where(Cell.updated_at > cell.updated_at + ROLL_OUT_S)
    if session.scalars(later).first() is not None:  # other weights under the same name
        return events.TAKEN_OVER
    return SILENT if heard < now - settings.retention.replay_days * DAY else None


def _begin_anew(session: Session, settings: Settings, event: Event, now: float) -> None:
    """The latched tests of the event's draft and segment that hold no event open, and whose finding none tells."""
    mine = {name: getattr(event, name) for name in ("deployment_id", "draft", "segment")}
    open_now = events.open_events(session, *(getattr(Event, name) == value for name, value in mine.items()))
    held = {one.cell_id for one in open_now if one.kind == "drift"}
    told = {kind for one in open_now for kind in one.details.get("also", {})}
    for cell in session.scalars(select(Cell).filter_by(**mine).with_for_update()):
        if "drift" not in told and cell.id not in held and CellState.from_json(cell.state).state == "drifting":
            begin_anew(cell)
    for row in session.scalars(select(Monitor).filter_by(**mine).with_for_update()).all():
        MonitorUpdate.of(session, settings, row, now).forget_untold(told)
