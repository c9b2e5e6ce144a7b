"""Taps that have asked for budgets lately, whichever control they asked."""

from __future__ import annotations

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from driftwatch.store.connection import upsert
from driftwatch.store.schema import Tap


def asked(session: Session, tap: str, now: float, since: float) -> None:
    """Note one that asks, and forget those that have not since then: each start of a tap gives it a new name."""
    session.execute(delete(Tap).where(Tap.asked_at <= since))
    upsert(session, Tap, [{"id": tap, "asked_at": now}], ["id"])


def count(session: Session, since: float) -> int:
    """How many have asked later than that."""
    return session.scalar(select(func.count()).select_from(Tap).where(Tap.asked_at > since)) or 0
