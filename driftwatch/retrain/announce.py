"""Announcing events: a CloudEvent in the outbox of every endpoint that wants it.

Bodies follow CloudEvents 1.0 in structured JSON mode. They are built once, in the transaction that made the event, so
that every attempt sends the same bytes under the same id.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from cloudevents.core.bindings.http import to_structured_event
from cloudevents.core.v1.event import CloudEvent
from sqlalchemy.orm import Session

from driftwatch.settings import Webhook
from driftwatch.store import outbox

DRIFT_OPENED = "driftwatch.drift.opened"
DRIFT_CLOSED = "driftwatch.drift.closed"
DEPLOYMENT_CHANGED = "driftwatch.deployment.changed"
RETRAIN_REQUESTED = "driftwatch.retrain.requested"

SOURCE = "/driftwatch/control"


def announce(
    session: Session, webhooks: Sequence[Webhook], *, id: str, type: str, subject: str, at: float, data: dict[str, Any]
) -> None:
    """Queue one event for the endpoints subscribed to its type. ``id`` is unique for the event and its type."""
    wanted = [hook.name for hook in webhooks if any(fnmatchcase(type, pattern) for pattern in hook.events)]
    if not wanted:
        return
    attributes = {
        "specversion": "1.0",
        "id": id,
        "source": SOURCE,
        "type": type,
        "subject": subject,
        "time": datetime.fromtimestamp(at, UTC),
        "datacontenttype": "application/json",
    }
    body = to_structured_event(CloudEvent(attributes, data)).body
    outbox.enqueue(session, id, type, body, wanted, at)
