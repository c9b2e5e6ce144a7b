"""Samples whose engine figures are not yet part of any cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, select, text, update
from sqlalchemy.orm import Session

from driftwatch.store.schema import LIVE_WAITING, Deployment, Sample


@dataclass(frozen=True)
class Reported:
    """What the engine said of one request, with what its cell needs to know of the sample."""

    sample_id: int
    request_id: str
    deployment_id: int
    model: str
    segment: str
    served_at: float
    session: str | None
    weight: float
    engine: dict[str, Any]
    timing: dict[str, Any] | None = None
    total_tokens: int = 0
    """Prompt and output together; guessed where only their text is known."""


def unfolded(session: Session, limit: int) -> list[Reported]:
    """The oldest samples with figures and without a fold mark, in order, locked as in :mod:`store.replays`."""
    waiting = (
        select(Sample, Deployment.model)
        .join(Deployment, Deployment.id == Sample.deployment_id)
        .where(text(LIVE_WAITING))
        .order_by(Sample.id)
        .limit(limit)
        .with_for_update(of=Sample, skip_locked=True)
    )
    return [_reported(row.Sample, row.model) for row in session.execute(waiting)]


def newest(session: Session, *where: ColumnElement[bool], limit: int) -> list[Reported]:
    """The newest samples with figures for which all of this holds, of Sample and Deployment; newest first."""
    mine = select(Sample, Deployment.model).join(Deployment, Deployment.id == Sample.deployment_id)
    told = mine.where(Sample.engine.is_not(None), Sample.purpose == "estimate", *where)
    rows = session.execute(told.order_by(Sample.id.desc()).limit(limit))
    return [_reported(row.Sample, row.model) for row in rows]


def _reported(sample: Sample, model: str) -> Reported:
    return Reported(
        sample_id=sample.id,
        request_id=sample.request_id,
        deployment_id=sample.deployment_id,
        model=model,
        segment=sample.segment,
        served_at=sample.served_at,
        session=sample.session,
        weight=sample.weight,
        engine=sample.engine or {},
        timing=sample.timing,
        total_tokens=sample.tokens,
    )


def mark_folded(session: Session, sample_ids: Sequence[int], now: float) -> None:
    session.execute(update(Sample).where(Sample.id.in_(sample_ids)).values(live_folded_at=now))
