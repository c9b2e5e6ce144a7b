"""When drift becomes a request to retrain: once for an event, and not again for the cell while its cooldown runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.retrain.announce import RETRAIN_REQUESTED, announce
from driftwatch.retrain.export import export
from driftwatch.settings import Settings
from driftwatch.store.connection import Store
from driftwatch.store.schema import Event, Retrain


def propose(session: Session, event: Event, *, cooldown_s: float, instead: str | None = None) -> Retrain:
    """Decide, in the event's own transaction; the decision is stored with its reason either way.

    ``instead`` is a reason not to ask, whatever else holds.
    """
    assert event.cell_id is not None
    recent = select(Retrain).where(
        Retrain.cell_id == event.cell_id,
        Retrain.state != "suppressed",
        Retrain.created_at > event.opened_at - cooldown_s,
    )
    earlier = session.scalars(recent.order_by(Retrain.created_at.desc())).first()
    reason = instead if instead or earlier is None else f"cooldown since {earlier.id}"
    retrain = Retrain(
        id=f"retrain-{event.id}",
        event_id=event.id,
        cell_id=event.cell_id,
        state="proposed" if reason is None else "suppressed",
        reason=reason,
        created_at=event.opened_at,
        updated_at=event.opened_at,
    )
    session.add(retrain)
    return retrain


def request(store: Store, settings: Settings, now: float) -> int:
    """Export the data of every proposed retrain and announce it; the number announced."""
    with store.read() as session:
        proposed: Sequence[tuple[Retrain, Event]] = [
            (row.Retrain, row.Event)
            for row in session.execute(
                select(Retrain, Event).join(Event, Event.id == Retrain.event_id).where(Retrain.state == "proposed")
            )
        ]
    for retrain, event in proposed:
        since = event.details.get("start_served_at") or event.opened_at
        done = export(store, retrain.cell_id, since=since, folder=settings.retrain.export_dir / retrain.id)
        with store.write() as session:
            stored = session.get_one(Retrain, retrain.id)
            stored.state, stored.updated_at, stored.data = "requested", now, asdict(done)
            data = body(event, retrain, asdict(done))
            announce(
                session,
                settings.webhooks,
                id=retrain.id,
                type=RETRAIN_REQUESTED,
                subject=event.segment,
                at=now,
                data=data,
            )
    return len(proposed)


def body(event: Event, retrain: Retrain, data: dict[str, Any]) -> dict[str, Any]:
    """What a pipeline is told: the evidence and where the training data lies."""
    return {"retrain_id": retrain.id, "event_id": event.id, "reason": event.details, "data": data}
