"""Canary prompts: what each deployment first answered, and whether it still does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from driftwatch.store.schema import Canary, Deployment


def serving(session: Session, since: float) -> Sequence[Deployment]:
    """The deployment of each model that was last seen serving, not before ``since``."""
    latest = select(func.max(Deployment.last_seen)).where(Deployment.last_seen >= since).group_by(Deployment.model)
    query = select(Deployment).where(Deployment.last_seen.in_(latest)).order_by(Deployment.id)
    return list({one.model: one for one in session.scalars(query)}.values())


def of(session: Session, deployment_id: int, prompts: str) -> Canary | None:
    """The row of these prompts, locked."""
    where = {"deployment_id": deployment_id, "prompts": prompts}
    return session.scalars(select(Canary).filter_by(**where).with_for_update()).first()


def add(session: Session, deployment_id: int, prompts: str, reference: dict[str, Any], now: float) -> Canary:
    row = Canary(
        deployment_id=deployment_id,
        prompts=prompts,
        reference=reference,
        reference_at=now,
        state={},
        updated_at=now,
    )
    session.add(row)
    return row


def changed(session: Session, deployment_id: int) -> bool | None:
    """Whether the prompts that were asked last are answered otherwise than at first; None while that is not known."""
    mine = select(Canary).where(Canary.deployment_id == deployment_id)
    row = session.scalars(mine.order_by(Canary.updated_at.desc())).first()
    found: bool | None = None if row is None else row.state.get("changed")
    return found
