"""Retention: what is deleted when. Roll-ups and events outlive the samples they came from."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import and_, delete, select, text, update
from sqlalchemy.orm import Session

from driftwatch.store.connection import Store
from driftwatch.store.schema import LIVE_WAITING, Payload, Replay, Sample, Work

DAY = 86_400.0
BATCH = 2000
"""Rows of one transaction: short locks, at any size of the table."""


@dataclass(frozen=True)
class Pruned:
    payloads: int
    samples: int


def prune(store: Store, *, now: float, payload_days: float, replay_days: float) -> Pruned:
    """Delete payloads and samples that are past their days, in batches. What is not yet folded is kept."""
    payloads = samples = 0
    while deleted := _prune_payloads(store, now - payload_days * DAY):
        payloads += deleted
    while deleted := _prune_samples(store, now - replay_days * DAY):
        samples += deleted
    return Pruned(payloads, samples)


def _prune_payloads(store: Store, before: float) -> int:
    with store.write() as session:
        old = select(Payload.sample_id).join(Sample, Sample.id == Payload.sample_id).where(Sample.arrived_at < before)
        ids = list(session.scalars(old.limit(BATCH)))
        session.execute(delete(Payload).where(Payload.sample_id.in_(ids)))
        # Unknown fields may hold anything, text too.
        session.execute(update(Sample).where(Sample.id.in_(ids), Sample.extra.is_not(None)).values(extra=None))
    return len(ids)


def _prune_samples(store: Store, before: float) -> int:
    with store.write() as session:
        unfolded = select(Replay.id).where(Replay.sample_id == Sample.id, Replay.folded_at.is_(None)).exists()
        old = and_(Sample.arrived_at < before, ~unfolded, text(f"NOT ({LIVE_WAITING})"))
        ids = list(session.scalars(select(Sample.id).where(old).limit(BATCH)))
        _delete(session, ids)
    return len(ids)


def _delete(session: Session, ids: list[int]) -> None:
    # Named, not left to ON DELETE CASCADE: three statements are cheaper than a look-up for each row.
    for table in (Payload, Replay, Work):
        session.execute(delete(table).where(table.sample_id.in_(ids)))
    session.execute(delete(Sample).where(Sample.id.in_(ids)))
