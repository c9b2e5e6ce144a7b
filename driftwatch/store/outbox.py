"""The outbox: events on their way to webhook endpoints, written in the transaction that made them."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from driftwatch.store.connection import insert_new
from driftwatch.store.schema import Delivery


def enqueue(session: Session, event_id: str, kind: str, body: bytes, endpoints: Iterable[str], now: float) -> None:
    """Queue one event for each endpoint; queueing it again changes nothing."""
    rows = [
        {
            "event_id": event_id,
            "endpoint": endpoint,
            "type": kind,
            "body": body,
            "state": "pending",
            "attempts": 0,
            "due_at": now,
            "created_at": now,
        }
        for endpoint in endpoints
    ]
    insert_new(session, Delivery, rows, "id")


def due(session: Session, now: float, limit: int = 100) -> list[Delivery]:
    """Deliveries to try now: of each endpoint only the oldest pending one, so that its events stay in order."""
    oldest = select(func.min(Delivery.id)).where(Delivery.state == "pending").group_by(Delivery.endpoint)
    ready = select(Delivery).where(Delivery.id.in_(oldest), Delivery.due_at <= now).order_by(Delivery.id).limit(limit)
    return list(session.scalars(ready))


def counts(session: Session) -> dict[str, int]:
    """Number of deliveries in each state."""
    rows = session.execute(select(Delivery.state, func.count()).group_by(Delivery.state))
    return {row[0]: row[1] for row in rows}


def given_up(session: Session) -> int:
    """How often deliveries were given up so far; never falls, since to send one again takes nothing back."""
    return session.scalar(select(func.sum(Delivery.given_up))) or 0


def redrive(session: Session, event_id: str, endpoint: str | None, now: float) -> list[Delivery]:
    """Make the dead deliveries of an event pending once more, to all endpoints or one; those it was."""
    query = select(Delivery).where(Delivery.event_id == event_id, Delivery.state == "dead").with_for_update()
    dead = list(session.scalars(query if endpoint is None else query.where(Delivery.endpoint == endpoint)))
    for delivery in dead:
        delivery.state, delivery.attempts, delivery.due_at, delivery.error = "pending", 0, now, None
    return dead
