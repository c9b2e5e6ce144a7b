"""Requests that a draft may be trained on: what is known of each, without its tokens, and then the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from driftwatch.acceptance import Weights
from driftwatch.store.samples import CHUNK, unpack_ids
from driftwatch.store.schema import Payload, Replay, Sample

NEWEST = 100_000
"""Requests looked at: the newest that still have their payload."""


@dataclass(frozen=True)
class Served:
    """A request whose tokens are kept."""

    sample_id: int
    request_id: str
    session: str | None
    segment: str
    labels: dict[str, Any]
    served_at: float
    tokens: int
    split: str
    """Of its replay by the draft; ``none`` where there is none."""
    first_hits: float | None
    """Share of its tokens that the draft's first proposal would have been; None where it was not replayed."""
    forbidden: bool
    """The client forbade training on it."""


@dataclass(frozen=True)
class Tokens:
    """What was said in one request."""

    sample_id: int
    prompt: list[int]
    output: list[int]
    text: dict[str, Any] | None


def served(session: Session, deployment_id: int, draft: str, *, limit: int = NEWEST) -> list[Served]:
    """Requests of a deployment, newest first."""
    mine = and_(Replay.sample_id == Sample.id, Replay.draft == draft)
    columns = (Replay.split, Replay.weights, Replay.encoding, Replay.tokens.label("judged"), Replay.depths)
    query = (
        select(Sample, *columns)
        .join(Payload, Payload.sample_id == Sample.id)
        .outerjoin(Replay, mine)
        .where(Sample.deployment_id == deployment_id, Payload.prompt_ids.is_not(None))
        .order_by(Sample.id.desc())
        .limit(limit)
    )
    return [_served(row) for row in session.execute(query)]


def count(session: Session, deployment_id: int, segment: str, since: float) -> int:
    """Requests of a segment since a time that have their tokens, whether they may be trained on or not."""
    query = select(func.count()).select_from(Sample).join(Payload, Payload.sample_id == Sample.id)
    mine = (Sample.deployment_id == deployment_id, Sample.segment == segment, Sample.served_at >= since)
    return session.scalar(query.where(*mine, Payload.prompt_ids.is_not(None))) or 0


def _served(row: Any) -> Served:
    sample = row.Sample
    return Served(
        sample_id=sample.id,
        request_id=sample.request_id,
        session=sample.session,
        segment=sample.segment,
        labels=sample.labels,
        served_at=sample.served_at,
        tokens=sample.tokens,
        split=row.split or "none",
        first_hits=None if row.weights is None or not row.judged else _first_hits(row),
        forbidden=(sample.extra or {}).get("no_train") not in (None, False),
    )


def _first_hits(row: Any) -> float:
    """Mean weight of the first proposals; a tree is known at the starts of its walk alone."""
    weights = Weights.decode(row.encoding, row.weights, tokens=row.judged, depths=row.depths)
    return float(np.nanmean(weights.by_start(row.depths)[:, 0]))


def tokens(session: Session, sample_ids: Sequence[int]) -> Iterator[Tokens]:
    """The tokens of these requests, in order of id; those that retention deleted meanwhile are left out."""
    ordered = sorted(sample_ids)
    for i in range(0, len(ordered), CHUNK):
        some = select(Payload).where(Payload.sample_id.in_(ordered[i : i + CHUNK]), Payload.prompt_ids.is_not(None))
        for payload in session.scalars(some.order_by(Payload.sample_id)):
            prompt, output = unpack_ids(payload.prompt_ids or b""), unpack_ids(payload.output_ids or b"")
            yield Tokens(payload.sample_id, prompt, output, payload.text)
            session.expunge(payload)
