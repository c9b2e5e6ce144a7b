"""Work: which worker judges which sample. A lease runs out; what a dead worker held goes to another.

A batch shares its fate: when its worker dies, nobody knows which sample did it. So a sample that was leased before is
leased alone, behind the fresh ones, and after three attempts alone it is failed with its reason. Among fresh work
segments take turns.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, delete, or_, select, text, update
from sqlalchemy.orm import Session

from driftwatch.store.connection import insert_new, upsert
from driftwatch.store.samples import pack_ids, unpack_ids
from driftwatch.store.schema import OPEN_WORK, Candidate, Deployment, Outcome, Payload, Replay, Sample, Work

ATTEMPTS = 1 + 3
"""One attempt in a batch, three alone."""


@dataclass(frozen=True)
class Task:
    """A leased piece of work: one draft to judge on one sample."""

    work_id: int
    sample_id: int
    draft: str
    model: str
    segment: str
    prompt_ids: list[int] | None
    output_ids: list[int] | None
    text: dict[str, Any] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    candidate: str | None = None
    """Where the draft lies, if it is a candidate, which the settings do not name."""
    incumbent: str | None = None
    """The draft that the candidate is compared with."""


@dataclass(frozen=True)
class Verdict:
    """How a task ended: a replay's columns, or the reason it was skipped or failed."""

    task: Task
    replay: dict[str, Any] | None = None
    skipped: str | None = None
    failed: str | None = None
    retokenised: tuple[Sequence[int], Sequence[int]] | None = None
    """Prompt and output ids that the sample's text was tokenised to, to be kept in its place."""


def lease(session: Session, owner: str, *, now: float, lease_s: float, limit: int) -> list[Task]:
    """Take up to ``limit`` open tasks for ``owner`` until now + lease_s."""
    _fail_exhausted(session, now)
    available = or_(Work.state == "pending", Work.lease_until < now)
    fresh_first = (
        select(Work.id, Work.attempts).where(text(OPEN_WORK), available).order_by(Work.attempts, Work.turn, Work.id)
    )
    rows = session.execute(fresh_first.limit(limit).with_for_update(skip_locked=True)).all()
    if not rows:
        return []
    chosen = [row.id for row in rows if row.attempts == 0] or [rows[0].id]
    session.execute(
        update(Work)
        .where(Work.id.in_(chosen))
        .values(state="leased", owner=owner, lease_until=now + lease_s, attempts=Work.attempts + 1)
    )
    return [_task(row) for row in session.execute(_tasks(chosen))]


def _tasks(chosen: list[int]) -> Select[int, str, Sample, Payload, str, str, str]:
    return (
        select(Work.id, Work.draft, Sample, Payload, Deployment.model, Candidate.path, Candidate.incumbent)
        .join(Sample, Sample.id == Work.sample_id)
        .join(Deployment, Deployment.id == Sample.deployment_id)
        .outerjoin(Payload, Payload.sample_id == Work.sample_id)
        .outerjoin(Candidate, Candidate.id == Work.draft)
        .where(Work.id.in_(chosen))
        .order_by(Work.id)
    )


def _task(row: Any) -> Task:
    sample, payload = row.Sample, row.Payload
    return Task(
        work_id=row.id,
        sample_id=sample.id,
        draft=row.draft,
        model=row.model,
        segment=sample.segment,
        prompt_ids=unpack_ids(payload.prompt_ids) if payload and payload.prompt_ids is not None else None,
        output_ids=unpack_ids(payload.output_ids) if payload and payload.output_ids is not None else None,
        text=payload.text if payload else None,
        temperature=sample.temperature,
        top_p=sample.top_p,
        top_k=sample.top_k,
        candidate=row.path,
        incumbent=row.incumbent,
    )


def _fail_exhausted(session: Session, now: float) -> None:
    exhausted = and_(text(OPEN_WORK), Work.state == "leased", Work.lease_until < now, Work.attempts >= ATTEMPTS)
    found = select(Work.id, Sample.segment).join(Sample, Sample.id == Work.sample_id).where(exhausted)
    rows = session.execute(found.with_for_update(skip_locked=True, of=Work)).all()
    _close(session, [row.id for row in rows], "failed", "worker_died")
    _count(session, Counter((row.segment, "failed", "worker_died") for row in rows))


def _close(session: Session, work_ids: Sequence[int], state: str, reason: str | None) -> None:
    if work_ids:
        closed = {"state": state, "reason": reason, "owner": None, "lease_until": None}
        session.execute(update(Work).where(Work.id.in_(work_ids)).values(**closed))


def _count(session: Session, ended: Counter[tuple[str, str, str]]) -> None:
    # In order, so that two workers never wait for each other; last of all and at once, so that they wait for one
    # statement: all of them count in the same rows.
    if ended:
        names = ("segment", "outcome", "reason")
        rows = [dict(zip(names, key, strict=True)) | {"samples": count} for key, count in sorted(ended.items())]
        upsert(session, Outcome, rows, names, add=True)


def _held(owner: str) -> ColumnElement[bool]:
    """What is leased was tried at least once: so the index finds it without a walk over all that waits."""
    return and_(text(OPEN_WORK), Work.attempts >= 1, Work.owner == owner)


def renew(session: Session, owner: str, *, now: float, lease_s: float) -> None:
    """Keep all that ``owner`` holds for longer, but for what it hands in at this moment, in another order: to wait
    for that would be a deadlock."""
    held = select(Work.id).where(_held(owner)).with_for_update(skip_locked=True)
    session.execute(update(Work).where(Work.id.in_(held)).values(lease_until=now + lease_s))


def release(session: Session, owner: str, *, tried: bool = False) -> None:
    """Give back what ``owner`` holds: untried, when it stops in good order; or tried in vain for a reason that is not
    the sample's, so that it waits behind fresh work and no attempt is counted against it."""
    attempts = 1 if tried else Work.attempts - 1
    given_back = {"state": "pending", "owner": None, "lease_until": None, "attempts": attempts}
    session.execute(update(Work).where(_held(owner)).values(**given_back))


def complete(session: Session, owner: str, verdicts: Sequence[Verdict], *, now: float) -> int:
    """Store verdicts and close their work, in one transaction; the number that was still the owner's to close.

    Work that another worker took over meanwhile is left to it: nothing is judged twice.
    """
    wanted = [verdict.task.work_id for verdict in verdicts]
    held = select(Work.id).where(Work.id.in_(wanted), Work.owner == owner, Work.state == "leased")
    mine = set(session.scalars(held.order_by(Work.id).with_for_update()))
    taken = [verdict for verdict in verdicts if verdict.task.work_id in mine]
    insert_new(session, Replay, [_replay(one.task, one.replay, now) for one in taken if one.replay is not None], "id")
    states: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    ended: Counter[tuple[str, str, str]] = Counter()
    for verdict in taken:
        state, reason, outcome = _ending(verdict)
        states[state, reason].append(verdict.task.work_id)
        ended[verdict.task.segment, *outcome] += 1
        if verdict.retokenised is not None:
            _keep_ids(session, verdict.task, *verdict.retokenised)
    for (state, reason), work_ids in states.items():
        _close(session, work_ids, state, reason)
    _count(session, ended)
    return len(mine)


def _replay(task: Task, replay: dict[str, Any], now: float) -> dict[str, Any]:
    # A candidate's replays are part of no cell: they go into pairs with the incumbent's.
    folded = None if task.candidate is None else now
    return {"sample_id": task.sample_id, "draft": task.draft, "replayed_at": now, "folded_at": folded} | replay


def _ending(verdict: Verdict) -> tuple[str, str | None, tuple[str, str]]:
    """State and reason of the work; the outcome and reason that are counted."""
    if verdict.replay is not None:
        return "done", None, ("replayed", "")
    if verdict.skipped is not None:
        return "skipped", verdict.skipped, ("skipped", verdict.skipped)
    return "failed", verdict.failed or "unknown", ("failed", "error")


def _keep_ids(session: Session, task: Task, prompt: Sequence[int], output: Sequence[int]) -> None:
    ids = {"prompt_ids": pack_ids(prompt), "output_ids": pack_ids(output)}
    session.execute(update(Payload).where(Payload.sample_id == task.sample_id).values(**ids))


def forget_text(session: Session, limit: int = 1000) -> int:
    """Delete the text of samples that are tokenised, or that nobody will tokenise any more; the number deleted."""
    open_work = select(Work.id).where(Work.sample_id == Payload.sample_id, Work.state.in_(("pending", "leased")))
    done = and_(Payload.text.is_not(None), ~open_work.exists())
    found = list(session.scalars(select(Payload.sample_id).where(done).limit(limit)))
    tokenised = [Payload.sample_id.in_(found), Payload.prompt_ids.is_not(None)]
    session.execute(update(Payload).where(*tokenised).values(text=None))
    session.execute(delete(Payload).where(Payload.sample_id.in_(found), Payload.prompt_ids.is_(None)))
    return len(found)
