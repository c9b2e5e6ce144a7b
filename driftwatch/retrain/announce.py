"""Announcing events: a CloudEvent in the outbox of every endpoint that wants it.

Bodies follow CloudEvents 1.0 in structured JSON mode. They are built once, in the transaction that made the event, so
that every attempt sends the same bytes under the same id.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from cloudevents.core.bindings.http import to_structured_event
from cloudevents.core.v1.event import CloudEvent
from sqlalchemy.orm import Session

from driftwatch.retrain.schema import dataschema, misfit
from driftwatch.settings import Webhook
from driftwatch.store import outbox

log = logging.getLogger(__name__)

DRIFT_OPENED = "driftwatch.drift.opened"
DRIFT_CLOSED = "driftwatch.drift.closed"
DRIFT_UPDATED = "driftwatch.drift.updated"
DEPLOYMENT_CHANGED = "driftwatch.deployment.changed"
DEPLOYMENT_REGRESSED = "driftwatch.deployment.regressed"
RETRAIN_REQUESTED = "driftwatch.retrain.requested"
CANDIDATE_VERDICT = "driftwatch.candidate.verdict"

SOURCE = "/driftwatch/control"


def announce(
    session: Session, webhooks: Sequence[Webhook], *, id: str, type: str, subject: str, at: float, data: dict[str, Any]
) -> None:
    """Queue one event for the endpoints subscribed to its type. ``id`` is unique for the event and its type.

    What does not fit its published schema is a bug, and logged as one; it is sent all the same, since an alarm that
    is not heard is worse than one with a wrong field.
    """
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
        "dataschema": dataschema(type),
    }
    body = to_structured_event(CloudEvent(attributes, data)).body
    if wrong := misfit(json.loads(body)):
        log.error("bug: the event %s (%s) does not fit its schema: %s", id, type, wrong)
    outbox.enqueue(session, id, type, body, wanted, at)
