"""Candidates: the work of replaying them where the incumbent was replayed, and the pairs that come of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, and_, delete, func, or_, select, text, update
from sqlalchemy.orm import Session, aliased

from driftwatch.store import turns
from driftwatch.store.connection import insert_new
from driftwatch.store.samples import DAY, spend
from driftwatch.store.schema import OPEN_WORK, Candidate, Deployment, Pair, Payload, Replay, Sample, Turn, Work

UNDECIDED = ("history", "live")


def pack_samples(ids: Sequence[int]) -> bytes:
    """Ids of samples as int64 little-endian bytes."""
    return np.asarray(sorted(ids), "<i8").tobytes()


def unpack_samples(data: bytes | None) -> frozenset[int]:
    """Inverse of :func:`pack_samples`."""
    return frozenset(np.frombuffer(data or b"", "<i8").tolist())


def undecided(session: Session) -> list[Candidate]:
    return list(session.scalars(select(Candidate).where(Candidate.state.in_(UNDECIDED)).order_by(Candidate.created_at)))


def locked(session: Session, id: str) -> Candidate:
    return session.scalars(select(Candidate).where(Candidate.id == id).with_for_update()).one()


def refuse(session: Session, id: str, reason: str) -> None:
    """Say why a candidate cannot be replayed; what follows is decided elsewhere. The first reason stands."""
    undecided_yet = (Candidate.id == id, Candidate.reason.is_(None), Candidate.state.in_(UNDECIDED))
    session.execute(update(Candidate).where(*undecided_yet).values(reason=reason))


def by_incumbent(replay: type[Replay], candidate: Candidate, gamma: int) -> list[ColumnElement[bool]]:
    """What holds for the replays that a candidate is compared with: of the weights that served when it came in, and
    judged as deep as this proposal length; a walk has its own, one column without proposals holds for all (see
    ``acceptance.Weights``)."""
    deep = or_(replay.encoding == "walk", and_(replay.depths == 1, replay.proposals.is_(None)), replay.depths >= gamma)
    known = candidate.incumbent_fingerprint
    weights = [] if known is None else [replay.fingerprint == known]
    return [replay.draft == candidate.incumbent, deep, *weights]


def judged_by_incumbent(
    session: Session, candidate: Candidate, gamma: int, *, deployment_id: int | None, after: int, limit: int
) -> list[int]:
    """The newest samples after an id on which the incumbent was replayed (see ``by_incumbent``), whose tokens are
    kept."""
    query = (
        select(Sample.id)
        .join(Deployment, Deployment.id == Sample.deployment_id)
        .join(Payload, Payload.sample_id == Sample.id)
        .join(Replay, Replay.sample_id == Sample.id)
        .where(Deployment.model == candidate.model, Sample.id > after, *by_incumbent(Replay, candidate, gamma))
        .where(or_(Payload.prompt_ids.is_not(None), Payload.text.is_not(None)))
    )
    if deployment_id is not None:
        query = query.where(Sample.deployment_id == deployment_id)
    return list(session.scalars(query.order_by(Sample.id.desc()).limit(limit)))


def fingerprint_of(session: Session, model: str, draft: str) -> str | None:
    """The weights that a draft was last replayed with."""
    query = (
        select(Replay.fingerprint)
        .join(Sample, Sample.id == Replay.sample_id)
        .join(Deployment, Deployment.id == Sample.deployment_id)
        .where(Deployment.model == model, Replay.draft == draft)
    )
    return session.scalars(query.order_by(Replay.id.desc()).limit(1)).first()


def queue(session: Session, candidate: Candidate, samples: Collection[int], now: float) -> None:
    """Work for the shadow: the candidate on these samples. What is queued already stays.

    A candidate has turns of its own, as a segment has: however long its history, fresh samples wait for one piece of
    its work at most, and it is not kept waiting by theirs.
    """
    pending = {"draft": candidate.id, "state": "pending", "attempts": 0, "queued_at": now}
    costs = select(Sample.id, Sample.tokens, Sample.arrived_at).where(Sample.id.in_(samples))
    wanted = session.execute(costs.order_by(Sample.id)).all()
    if today := sum(row.tokens for row in wanted if row.arrived_at >= now - now % DAY):
        spend(session, today, now)
    starts = turns.take(session, [(candidate.id, row.tokens) for row in wanted])
    rows = [pending | {"sample_id": row.id, "turn": turn} for row, turn in zip(wanted, starts, strict=True)]
    insert_new(session, Work, rows, "id")


def waiting(session: Session, candidate: Candidate, *, until: int | None = None) -> int:
    """Open work of the candidate, on samples up to an id or on all."""
    query = select(func.count()).select_from(Work).where(text(OPEN_WORK), Work.draft == candidate.id)
    return session.scalar(query if until is None else query.where(Work.sample_id <= until)) or 0


def drop_work(session: Session, candidate: Candidate) -> None:
    session.execute(delete(Work).where(text(OPEN_WORK), Work.draft == candidate.id))
    session.execute(delete(Turn).where(Turn.segment == candidate.id))


def unpaired(session: Session, candidate: Candidate, gamma: int, limit: int) -> list[Any]:
    """Rows of Sample and the Replays of candidate and incumbent (see ``by_incumbent``) that are no pair yet, in order
    of the candidate's."""
    own, other = aliased(Replay), aliased(Replay)
    done = select(Pair.sample_id).where(Pair.candidate_id == candidate.id, Pair.sample_id == own.sample_id)
    query = (
        select(Sample, own, other)
        .join(own, own.sample_id == Sample.id)
        .join(other, other.sample_id == Sample.id)
        .where(own.draft == candidate.id, ~done.exists(), *by_incumbent(other, candidate, gamma))
    )
    return list(session.execute(query.order_by(own.id).limit(limit)))


def pairs(session: Session, candidate: Candidate) -> list[Pair]:
    """In the order in which they were taken."""
    return list(session.scalars(select(Pair).where(Pair.candidate_id == candidate.id).order_by(Pair.taken)))


def count_pairs(session: Session, candidate: Candidate) -> int:
    return session.scalar(select(func.count()).select_from(Pair).where(Pair.candidate_id == candidate.id)) or 0


def of_retrain(session: Session, retrain_id: str) -> list[Candidate]:
    query = select(Candidate).where(Candidate.retrain_id == retrain_id)
    return list(session.scalars(query.order_by(Candidate.created_at)))


def newest(session: Session, limit: int) -> list[Candidate]:
    return list(session.scalars(select(Candidate).order_by(Candidate.created_at.desc()).limit(limit)))
