"""Turns: in which order fresh work of all segments is judged, so that a huge backlog of one keeps no other waiting.

Start-time fair queueing (Goyal, Vin and Cheng 1996, IEEE/ACM Trans. Networking 5(5)): a piece of work that costs c
tokens starts where the one before it of its segment ended, or where the queue is now, whichever is later, and ends c
later. What starts first is judged first. While two segments both wait, they get equally many tokens judged, to within
one piece of work; a segment that had nothing to wait for has saved nothing up. A candidate counts as a segment.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from driftwatch.store.connection import upsert
from driftwatch.store.schema import OPEN_WORK, Turn, Work


def take(session: Session, wanted: Sequence[tuple[str, int]]) -> list[int]:
    """The turn of each piece of work, given as its segment and its tokens, in order."""
    if not wanted:
        return []
    segments = sorted({segment for segment, _ in wanted})
    reach = {row.segment: row.until for row in session.scalars(select(Turn).where(Turn.segment.in_(segments)))}
    now = _now(session)
    turns = []
    for segment, cost in wanted:
        turn = max(reach.get(segment, now), now)
        turns.append(turn)
        reach[segment] = turn + max(cost, 1)
    # In order of segment, so that two intakes never wait for each other.
    upsert(session, Turn, [{"segment": segment, "until": reach[segment]} for segment in segments], ["segment"])
    return turns


def _now(session: Session) -> int:
    """Where the queue is: at the first fresh work, or behind everything where there is none."""
    fresh = select(Work.turn).where(text(OPEN_WORK), Work.attempts == 0).order_by(Work.turn, Work.id).limit(1)
    if (first := session.scalar(fresh)) is not None:
        return first
    return session.scalar(select(func.max(Turn.until))) or 0
