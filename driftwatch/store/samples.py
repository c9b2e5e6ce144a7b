"""Samples: taking records in, each exactly once, with the work they bring."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import Select, func, select, text
from sqlalchemy.orm import Session

from driftwatch.records import Record, segment_id
from driftwatch.store import latencies, turns
from driftwatch.store.connection import increment, insert_new
from driftwatch.store.deployments import Change, facts_of, find_or_create
from driftwatch.store.latencies import Figure
from driftwatch.store.schema import OPEN_WORK, BudgetDay, Outcome, Payload, Sample, Segment, Work

OTHER = "other"
DAY = 86_400.0
BYTES_PER_TOKEN = 4
"""A rough guess, for text that is not tokenised yet."""
SEGMENT_LENGTH = 512
"""A longer id would not fit into an index."""
CHUNK = 500
"""Rows of one statement, well under the limits of both databases on parameters."""


@dataclass(frozen=True)
class Stored:
    stored: int
    duplicates: int
    changes: tuple[Change, ...] = field(default=(), compare=False)
    """Deployments that came up and contradict what was known."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as int32 little-endian bytes."""
    return np.asarray(ids, "<i4").tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of :func:`pack_ids`."""
    ids: list[int] = np.frombuffer(data, "<i4").tolist()
    return ids


def add(
    session: Session,
    batch: Sequence[tuple[Record, Sequence[str]]],
    *,
    now: float,
    max_segments: int,
    tokens_per_day: int | None = None,
    limits: Mapping[Figure, float] | None = None,
) -> Stored:
    """Store records with the names of the drafts to judge on each; one already stored, by id, is a duplicate.

    All happens in the caller's transaction: once it commits, nothing of it is lost or judged twice. Samples over the
    day's budget of tokens are stored and counted, but bring no work. ``limits``: what users may wait, in seconds, over
    which requests are counted.
    """
    known = set(session.scalars(select(Segment.id)))
    left = math.inf if tokens_per_day is None else tokens_per_day - spent(session, now)
    new: list[_New] = []
    changes: list[Change] = []
    for i in range(0, len(batch), CHUNK):
        new += _new(session, batch[i : i + CHUNK], known, now, max_segments, changes, limits or {})
    # Rows that all intakes share come last, in one order: then none waits long for another, or each for the other.
    over = _add_work(session, new, now, left)
    for segment, count in sorted(Counter(sample.segment for sample in new).items()):
        count_outcome(session, segment, "stored", by=count)
    for segment, count in sorted(over.items()):
        count_outcome(session, segment, "skipped", "over_budget", by=count)
    return Stored(len(new), len(batch) - len(new), tuple(changes))


@dataclass(frozen=True)
class _New:
    """A sample that was not there before."""

    id: int
    segment: str
    tokens: int
    drafts: Sequence[str]


def _new(
    session: Session,
    batch: Sequence[tuple[Record, Sequence[str]]],
    known: set[str],
    now: float,
    max_segments: int,
    changes: list[Change],
    limits: Mapping[Figure, float],
) -> list[_New]:
    """Insert samples and payloads; those that are new. Changed deployments are added to ``changes``."""
    first: dict[str, tuple[Record, Sequence[str]]] = {}
    for record, drafts in batch:
        first.setdefault(record.id, (record, drafts))
    deployments: dict[str, int] = {}
    rows = {}
    for record, _ in first.values():
        key = json.dumps([record.model, facts_of(record)], sort_keys=True)
        if key not in deployments:
            deployments[key], change = find_or_create(session, record, now)
            changes += [change] if change else []
        segment = _segment(session, record, known, now, max_segments)
        rows[record.id] = _row(record, deployments[key], segment, now)
    inserted = insert_new(session, Sample, list(rows.values()), "request_id")
    ids = {row.request_id: row.id for row in session.execute(_ids(inserted))}
    insert_new(session, Payload, [_payload(ids[key], first[key][0]) for key in ids], "sample_id")
    latencies.count(session, [rows[key] for key in ids if rows[key]["purpose"] == "estimate"], limits, now)
    return [
        _New(ids[key], rows[key]["segment"], rows[key]["tokens"], first[key][1] if _estimates(first[key][0]) else ())
        for key in ids
    ]


def _estimates(record: Record) -> bool:
    """Mining samples are training data: no estimate may come from them."""
    return record.purpose == "estimate"


def _add_work(session: Session, new: Sequence[_New], now: float, left: float) -> Counter[str]:
    """One piece of work a draft, while the budget lasts; the number of samples over it, by segment."""
    work: list[dict[str, Any]] = []
    costs: list[tuple[str, int]] = []
    over: Counter[str] = Counter()
    for sample in new:
        cost = sample.tokens * len(sample.drafts)
        if cost > left:
            over[sample.segment] += 1
            continue
        left -= cost
        pending = {"sample_id": sample.id, "state": "pending", "attempts": 0, "queued_at": now}
        work += [pending | {"draft": draft} for draft in sample.drafts]
        costs += [(sample.segment, sample.tokens)] * len(sample.drafts)
    if work:
        starts = turns.take(session, costs)
        insert_new(session, Work, [row | {"turn": turn} for row, turn in zip(work, starts, strict=True)], "id")
        spend(session, sum(cost for _, cost in costs), now)
    return over


def spend(session: Session, tokens: int, now: float) -> None:
    """Count tokens given out for replay against the day's budget."""
    increment(session, BudgetDay, {"day": int(now // DAY)}, "tokens", tokens)


def spent(session: Session, now: float) -> int:
    """Tokens that were given out for replay since midnight UTC, once for each draft."""
    return session.scalar(select(BudgetDay.tokens).where(BudgetDay.day == int(now // DAY))) or 0


def _ids(request_ids: Sequence[str]) -> Select[str, int]:
    return select(Sample.request_id, Sample.id).where(Sample.request_id.in_(request_ids)).order_by(Sample.id)


def _segment(session: Session, record: Record, known: set[str], now: float, cap: int) -> str:
    segment = segment_id(record.labels)
    if segment in known:
        return segment
    if len(known) >= cap or len(segment) > SEGMENT_LENGTH:
        return OTHER
    insert_new(session, Segment, [{"id": segment, "labels": record.labels, "first_seen": now}], "id")
    known.add(segment)
    return segment


def _row(record: Record, deployment_id: int, segment: str, now: float) -> dict[str, Any]:
    return {
        "request_id": record.id,
        "deployment_id": deployment_id,
        "segment": segment,
        "purpose": record.purpose,
        "weight": record.weight,
        "arrived_at": now,
        "served_at": min(record.ts.timestamp(), now) if record.ts else now,  # a clock that is ahead stops no other
        "session": record.session,
        "labels": record.labels,
        "tokens": _tokens(record),
        "retokenised": not record.has_ids,
        "temperature": record.temperature,
        "top_p": record.top_p,
        "top_k": record.top_k,
        "finish_reason": record.finish_reason,
        "timing": record.timing.model_dump(exclude_none=True) if record.timing else None,
        "engine": _engine(record),
        "extra": _extra(record) or None,
    }


def _engine(record: Record) -> dict[str, Any] | None:
    """The engine's figures with the number of output tokens beside them, where ids or the engine's usage give it."""
    if record.engine is None:
        return None
    known = {}
    usage = (record.model_extra or {}).get("usage")
    if record.output_token_ids:
        known["output_tokens"] = len(record.output_token_ids)
    elif isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
        known["output_tokens"] = usage["completion_tokens"]
    said = record.engine.model_dump(exclude_none=True)
    # PostgreSQL's jsonb refuses the NUL character; in figures it stands for nothing.
    return known | {key: value for key, value in said.items() if "\\u0000" not in json.dumps([key, value])}


def _tokens(record: Record) -> int:
    if record.prompt_token_ids and record.output_token_ids:
        return len(record.prompt_token_ids) + len(record.output_token_ids)
    text = record.model_dump_json(include={"messages", "prompt", "output"})
    return len(text) // BYTES_PER_TOKEN + 1


def _extra(record: Record) -> dict[str, Any]:
    known = {"adapter": record.adapter, "cached_tokens": record.cached_tokens, "no_train": record.no_train}
    return {key: value for key, value in known.items() if value is not None} | (record.model_extra or {})


def _payload(sample_id: int, record: Record) -> dict[str, Any]:
    """Token ids alone where they are known; text only until it is tokenised."""
    if record.prompt_token_ids and record.output_token_ids:
        prompt, output = pack_ids(record.prompt_token_ids), pack_ids(record.output_token_ids)
        return {"sample_id": sample_id, "prompt_ids": prompt, "output_ids": output, "text": None}
    text = record.model_dump(include={"messages", "prompt", "output"}, exclude_none=True)
    return {"sample_id": sample_id, "prompt_ids": None, "output_ids": None, "text": text}


def count_outcome(session: Session, segment: str, outcome: str, reason: str = "", *, by: int = 1) -> None:
    """Count samples that ended so; the counts outlive the samples."""
    keys = {"segment": segment, "outcome": outcome, "reason": reason}
    increment(session, Outcome, keys, "samples", by)


def waiting(session: Session) -> tuple[int, float | None]:
    """Number of open work items, and when the oldest of them was queued."""
    count, oldest = session.execute(select(func.count(), func.min(Work.queued_at)).where(text(OPEN_WORK))).one()
    return count, oldest
