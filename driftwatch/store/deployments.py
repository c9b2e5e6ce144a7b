"""Deployments: what served a request, as far as it is known."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.records import Record
from driftwatch.store.schema import Deployment


def facts_of(record: Record) -> dict[str, str]:
    """Known facts of what served a record.

    Whether token ids were served or made again from text is one of them: results on retokenised text are not exact
    and never pooled with exact ones.
    """
    facts = dict(record.deployment)
    if record.adapter is not None:
        facts["adapter"] = record.adapter
    return facts | {"tokens": "served" if record.has_ids else "retokenised"}


def find_or_create(session: Session, record: Record, now: float) -> int:
    """The id of the newest deployment that no known fact contradicts; facts that were unknown are learned."""
    model, facts = record.model or "", facts_of(record)
    newest_first = select(Deployment).where(Deployment.model == model).order_by(Deployment.id.desc())
    for deployment in session.scalars(newest_first):
        known = deployment.facts
        if all(known.get(key, value) == value for key, value in facts.items()):
            if now > deployment.last_seen + 1:
                deployment.last_seen = now
            if facts.keys() - known.keys():
                deployment.facts = known | facts
            return deployment.id
    deployment = Deployment(model=model, facts=facts, first_seen=now, last_seen=now)
    session.add(deployment)
    session.flush()
    return deployment.id
