"""Retention: what is deleted when. Roll-ups and events outlive the samples they came from.

Deleted in batches, each in a transaction of its own, during half of the time at most: who writes meanwhile waits for
one batch. Each goes on where the last one ended, so that none walks over what an earlier one left behind, dead or kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    and_,
    any_,
    delete,
    literal,
    literal_column,
    select,
    tuple_,
    update,
)
from sqlalchemy.orm import InstrumentedAttribute, Session

from driftwatch.store import latencies
from driftwatch.store.connection import Store
from driftwatch.store.schema import LIVE_WAITING, BudgetDay, Payload, Replay, Sample, Segment, Turn

DAY = 86_400.0
BATCH = 2000
"""Rows of one transaction: short locks, at any size of the table."""

Position = tuple[float, int]
"""Arrival and id of a sample."""
FIRST: Position = (0.0, 0)


@dataclass(frozen=True)
class Pruned:
    payloads: int
    samples: int


def prune(store: Store, *, now: float, payload_days: float, replay_days: float) -> Pruned:
    """Delete payloads and samples that are past their days, in batches. What is not yet folded is kept."""
    with store.read() as session:
        newest = _newest(session, now - payload_days * DAY)
    payloads = _in_batches(store, lambda session, after: _payloads(session, after, newest))
    samples = _in_batches(store, lambda session, after: _samples(session, after, now - replay_days * DAY))
    _free_segments(store, now - replay_days * DAY)
    with store.write() as session:
        latencies.prune(session, now)
        session.execute(delete(BudgetDay).where(BudgetDay.day < int(now // DAY) - 1))
    return Pruned(payloads, samples)


def _free_segments(store: Store, before: float) -> None:
    """Let go of segments without a sample left, so that others find room under the cap; what they told is kept.

    Looked for in a transaction of its own, since that walks over all samples once; a sample that comes meanwhile takes
    its segment's place anew with the next one.
    """
    # Distinct: else PostgreSQL walks over a copy of all samples once for each segment, once they are too many to hash.
    idle = select(Segment.id).where(Segment.first_seen < before, Segment.id.not_in(select(Sample.segment).distinct()))
    with store.read() as session:
        found = session.scalars(idle).all()
    with store.write() as session:
        session.execute(delete(Segment).where(Segment.id.in_(found)))
        session.execute(delete(Turn).where(Turn.segment.in_(found)))


def _newest(session: Session, before: float) -> Position:
    """The last sample to arrive before then."""
    old = select(Sample.arrived_at, Sample.id).where(Sample.arrived_at < before)
    row = session.execute(old.order_by(Sample.arrived_at.desc(), Sample.id.desc()).limit(1)).first()
    return FIRST if row is None else (row.arrived_at, row.id)


def _in_batches(store: Store, delete_one: Callable[[Session, Position], tuple[int, Position | None]]) -> int:
    """Delete until no position is given from which to go on; the number deleted."""
    total = 0
    after: Position | None = FIRST
    while after is not None:
        begin = time.monotonic()
        with store.write() as session:
            deleted, after = delete_one(session, after)
        total += deleted
        if after is not None:
            time.sleep(time.monotonic() - begin)
    return total


def _payloads(session: Session, after: Position, newest: Position) -> tuple[int, Position | None]:
    """In order of ids, which is nearly that of arrival: by time, they would be looked for among all the samples whose
    payload has gone already."""
    says_more = Sample.extra.is_not(None).label("says_more")
    walk = select(Payload.sample_id, Sample.arrived_at, says_more).join(Sample, Sample.id == Payload.sample_id)
    bounds = and_(Payload.sample_id > after[1], Payload.sample_id <= newest[1])
    rows = session.execute(walk.where(bounds).order_by(Payload.sample_id).limit(BATCH)).all()
    old = [row for row in rows if row.arrived_at <= newest[0]]
    ids = [row.sample_id for row in old]
    session.execute(delete(Payload).where(_among(session, Payload.sample_id, ids)))
    # Unknown fields may hold anything, text too.
    more = [row.sample_id for row in old if row.says_more]
    if more:
        session.execute(update(Sample).where(_among(session, Sample.id, more)).values(extra=None))
    return len(ids), (rows[-1].arrived_at, rows[-1].sample_id) if len(rows) == BATCH else None


def _samples(session: Session, after: Position, before: float) -> tuple[int, Position | None]:
    unfolded = select(Replay.id).where(Replay.sample_id == Sample.id, Replay.folded_at.is_(None)).exists()
    over = and_(~unfolded, literal_column(f"NOT ({LIVE_WAITING})")).label("over")
    old = and_(Sample.arrived_at < before, tuple_(Sample.arrived_at, Sample.id) > after)
    walk = select(Sample.id, Sample.arrived_at, over).where(old).order_by(Sample.arrived_at, Sample.id)
    rows = session.execute(walk.limit(BATCH)).all()
    ids = [row.id for row in rows if row.over]
    # Payload, work and replays go by ON DELETE CASCADE, whose look-up for each row is made anyway: to name them as well
    # costs a sixth to a quarter more of PostgreSQL's time.
    session.execute(delete(Sample).where(_among(session, Sample.id, ids)))
    return len(ids), (rows[-1].arrived_at, rows[-1].id) if len(rows) == BATCH else None


def _among(session: Session, column: InstrumentedAttribute[int], ids: Sequence[int]) -> ColumnElement[bool]:
    """Whether a column's value is one of these. To write and read a thousand parameters costs more than to delete their
    rows, so PostgreSQL gets them as a single one."""
    if session.get_bind().dialect.name == "postgresql":
        return column == any_(literal(list(ids), ARRAY(BigInteger)))
    return column.in_(ids)
