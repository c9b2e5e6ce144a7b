"""How much traffic each segment has, as the samples and their weights tell."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from driftwatch.store.schema import Sample

RECENT_S = 3600.0
LEAST_S = 60.0
"""A rate over less time than this says nothing."""


@dataclass(frozen=True)
class Arrivals:
    """One segment's requests a second, and the tokens of a request on average (prompt and output)."""

    rate: float
    tokens: float


def arrivals(session: Session, now: float) -> dict[str, Arrivals]:
    """Of the last hour, or since the first sample in it, by segment."""
    since = now - RECENT_S
    recent = (Sample.purpose == "estimate", Sample.arrived_at > since, Sample.arrived_at <= now)
    first = session.scalar(select(func.min(Sample.arrived_at)).where(*recent))
    if first is None:
        return {}
    seconds = max(now - first, LEAST_S)
    columns = (Sample.segment, func.sum(Sample.weight), func.avg(Sample.tokens))
    rows = session.execute(select(*columns).where(*recent).group_by(Sample.segment))
    return {segment: Arrivals(float(weight) / seconds, float(tokens)) for segment, weight, tokens in rows}
