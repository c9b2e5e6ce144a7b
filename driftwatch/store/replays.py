"""Replays that are not yet part of any cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, select, update
from sqlalchemy.orm import Session

from driftwatch.acceptance import Weights
from driftwatch.store.schema import Deployment, Replay, Sample


@dataclass(frozen=True)
class Judged:
    """One draft's weights on one sample, with what its cell needs to know of the sample."""

    replay_id: int
    request_id: str
    deployment_id: int
    model: str
    segment: str
    split: str
    draft: str
    fingerprint: str
    served_at: float
    session: str | None
    weight: float
    weights: Weights
    rule: str = "argmax"
    figures: dict[str, Any] | None = None
    """What the shadow knows of the request beyond the weights."""
    engine: dict[str, Any] | None = None
    """What the engine said of the same request."""
    timing: dict[str, Any] | None = None
    total_tokens: int = 0
    """Prompt and output together."""


def unfolded(session: Session, limit: int) -> list[Judged]:
    """The oldest replays without a fold mark, in order. A mark, not a watermark: ids commit out of order.

    They are locked until the transaction ends; another control passes over them.
    """
    waiting = _joined().where(Replay.folded_at.is_(None)).order_by(Replay.sample_id, Replay.id).limit(limit)
    waiting = waiting.with_for_update(of=Replay, skip_locked=True)
    return [_judged(row.Replay, row.Sample, row.model) for row in session.execute(waiting)]


def all_judged(session: Session) -> list[Judged]:
    """Every replay that is kept, in order: for small stores."""
    rows = session.execute(_joined().order_by(Replay.sample_id, Replay.id))
    return [_judged(row.Replay, row.Sample, row.model) for row in rows]


def newest(session: Session, *where: ColumnElement[bool], limit: int) -> list[Judged]:
    """The newest replays for which all of this holds, of Replay, Sample and Deployment; newest first."""
    rows = session.execute(_joined().where(*where).order_by(Replay.id.desc()).limit(limit))
    return [_judged(row.Replay, row.Sample, row.model) for row in rows]


def _joined() -> Select[Replay, Sample, str]:
    return (
        select(Replay, Sample, Deployment.model)
        .join(Sample, Sample.id == Replay.sample_id)
        .join(Deployment, Deployment.id == Sample.deployment_id)
    )


def _judged(replay: Replay, sample: Sample, model: str) -> Judged:
    return Judged(
        replay_id=replay.id,
        request_id=sample.request_id,
        deployment_id=sample.deployment_id,
        model=model,
        segment=sample.segment,
        split=replay.split,
        draft=replay.draft,
        fingerprint=replay.fingerprint,
        rule=replay.rule,
        figures=replay.figures,
        engine=sample.engine if sample.purpose == "estimate" else None,
        timing=sample.timing,
        total_tokens=sample.tokens,
        served_at=sample.served_at,
        session=sample.session,
        weight=sample.weight,
        weights=Weights.decode(
            replay.encoding,
            replay.weights,
            tokens=replay.tokens,
            depths=replay.depths,
            proposals=replay.proposals,
        ),
    )


def mark_folded(session: Session, replay_ids: Sequence[int], now: float) -> None:
    session.execute(update(Replay).where(Replay.id.in_(replay_ids)).values(folded_at=now))
