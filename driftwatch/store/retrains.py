"""Retrains: what was decided, and each step since."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.store.schema import Event, Retrain, RetrainStep


def add(session: Session, retrain: Retrain) -> None:
    """Store a decision as the first step of its history."""
    session.add(retrain)
    session.flush()
    _step(session, retrain, None, retrain.created_at)


def move(session: Session, retrain: Retrain, state: str, at: float, reason: str | None = None) -> None:
    """Put a retrain, which the caller has locked, into another state."""
    before, retrain.state, retrain.reason, retrain.updated_at = retrain.state, state, reason, at
    _step(session, retrain, before, at)


def _step(session: Session, retrain: Retrain, before: str | None, at: float) -> None:
    step = RetrainStep(retrain_id=retrain.id, before=before, after=retrain.state, at=at, reason=retrain.reason)
    session.add(step)
    session.flush()


def locked(session: Session, id: str) -> Retrain | None:
    """One retrain, which no other transaction moves until this one ends."""
    return session.scalars(select(Retrain).where(Retrain.id == id).with_for_update()).first()


def history(session: Session, id: str) -> list[RetrainStep]:
    return list(session.scalars(select(RetrainStep).where(RetrainStep.retrain_id == id).order_by(RetrainStep.id)))


def in_states(session: Session, states: Collection[str]) -> list[Retrain]:
    """Oldest first."""
    return list(session.scalars(select(Retrain).where(Retrain.state.in_(states)).order_by(Retrain.created_at)))


def asked_since(session: Session, since: float, model: str, event: Event, suppressed: str) -> Retrain | None:
    """The last retrain after ``since`` for the draft, segment and split of an event, other than its own."""
    same = (Event.draft == event.draft, Event.segment == event.segment, Event.split == event.split)
    query = select(Retrain).join(Event, Event.id == Retrain.event_id).where(*same, Event.id != event.id)
    asked = query.where(Retrain.model == model, Retrain.state != suppressed, Retrain.created_at > since)
    return session.scalars(asked.order_by(Retrain.created_at.desc())).first()


def open_of(session: Session, model: str, event: Event, states: Collection[str]) -> Retrain | None:
    """The open retrain of an event's draft, other than the event's own."""
    mine = (Retrain.model == model, Retrain.draft == event.draft, Retrain.event_id != event.id)
    query = select(Retrain).where(*mine, Retrain.state.in_(states))
    return session.scalars(query.order_by(Retrain.created_at.desc())).first()
