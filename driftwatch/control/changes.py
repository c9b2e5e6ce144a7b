"""What serves has changed: an event and its announcement, in the transaction that stored the first such sample."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from sqlalchemy.orm import Session

from driftwatch.retrain.announce import DEPLOYMENT_CHANGED, announce
from driftwatch.settings import Settings
from driftwatch.store.deployments import CHANGED, Change
from driftwatch.store.schema import Deployment, Event

log = logging.getLogger(__name__)

KIND = CHANGED
EVERYWHERE = "all"
"""Segment of an event that is about no particular one."""


def tell(session: Session, settings: Settings, change: Change, now: float) -> None:
    """Store the event, which is over as soon as it is there, and queue its CloudEvent."""
    before, after = (session.get_one(Deployment, id) for id in (change.before_id, change.deployment_id))
    drafts = (model.drafts if (model := settings.model_for(change.model)) else None) or []
    details: dict[str, Any] = {
        "model": change.model,
        "cause": change.cause,
        "changed": {key: {"before": old, "after": new} for key, (old, new) in change.facts.items()},
        "before": {"deployment": before.id, "facts": before.facts},
        "after": {"deployment": after.id, "facts": after.facts},
        "request_id": change.request_id,
    }
    event = Event(
        id=uuid.uuid4().hex,
        kind=KIND,
        cell_id=None,
        deployment_id=after.id,
        segment=EVERYWHERE,
        split="none",
        draft=drafts[0].name if drafts else "",
        cause=change.cause,
        opened_at=now,
        closed_at=now,
        request_id=change.request_id,
        start_request_id=None,
        details=details,
    )
    session.add(event)
    log.warning("the deployment of %r changed (%s): %s", change.model, change.cause, details["changed"])
    announce(
        session,
        settings.webhooks,
        id=f"{event.id}-changed",
        type=DEPLOYMENT_CHANGED,
        subject=change.model,
        at=now,
        data=details | {"event_id": event.id},
    )
