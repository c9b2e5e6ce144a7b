"""An event's own page: what fell, why, what was done about it, and what came of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from driftwatch.store import candidates, retrains
from driftwatch.store.schema import Candidate, Delivery, Event, Retrain, RetrainStep


@dataclass(frozen=True)
class Story:
    event: Event
    retrain: Retrain | None
    steps: Sequence[RetrainStep]
    candidates: Sequence[Candidate]
    deliveries: Sequence[Delivery]
    """Webhooks about any of these: their ids begin with its id."""

    @property
    def findings(self) -> dict[str, Any]:
        """What was measured beside it; what was not is None."""
        found: dict[str, Any] = self.event.details.get("findings") or {}
        return found


def story(session: Session, id: str) -> Story | None:
    """An event with all that followed; None if there is none of that id."""
    event = session.get(Event, id)
    if event is None:
        return None
    retrain = session.scalars(select(Retrain).where(Retrain.event_id == id)).first()
    steps = [] if retrain is None else retrains.history(session, retrain.id)
    judged = [] if retrain is None else candidates.of_retrain(session, retrain.id)
    subjects = [id, *([] if retrain is None else [retrain.id]), *(one.id for one in judged)]
    about = or_(*(Delivery.event_id.startswith(subject, autoescape=True) for subject in subjects))
    told = session.scalars(select(Delivery).where(about).order_by(Delivery.id)).all()
    return Story(event, retrain, steps, judged, told)
