"""Tables. Times are seconds since the epoch (UTC); token ids are int32 little-endian bytes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy import (
    text as text_,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Id = BigInteger().with_variant(Integer, "sqlite")
LIVE_WAITING = "live_folded_at IS NULL AND engine IS NOT NULL AND purpose = 'estimate'"
"""Samples whose engine figures are not yet part of a cell. Literal, so that SQLite finds the partial index."""
Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")

AnyJson = JSON(none_as_null=True)
"""What users wrote: PostgreSQL's jsonb refuses the NUL character, its json keeps it."""


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {float: Double(), dict[str, Any]: Json, list[Any]: Json, str: Text()}


class Deployment(Base):
    """A map of known facts about what serves: target, draft, engine, versions, flags, quantisation."""

    __tablename__ = "deployments"
    id: Mapped[int] = mapped_column(Id, primary_key=True)
    model: Mapped[str]
    facts: Mapped[dict[str, Any]]
    first_seen: Mapped[float]
    last_seen: Mapped[float]


class Segment(Base):
    """A segment that was seen. Their number is capped; samples of further ones belong to ``other``."""

    __tablename__ = "segments"
    id: Mapped[str] = mapped_column(primary_key=True)
    labels: Mapped[dict[str, Any]]
    first_seen: Mapped[float]


class Sample(Base):
    """A request chosen for replay, without its tokens. Lists never touch the payloads."""

    __tablename__ = "samples"
    id: Mapped[int] = mapped_column(Id, primary_key=True)
    request_id: Mapped[str] = mapped_column(String(256), unique=True)
    deployment_id: Mapped[int] = mapped_column(Id, ForeignKey("deployments.id"))
    segment: Mapped[str]
    purpose: Mapped[str] = mapped_column(String(16))
    weight: Mapped[float]
    arrived_at: Mapped[float] = mapped_column(index=True)
    served_at: Mapped[float]
    """When the request was made, as its sender says; the arrival where that is unknown."""
    session: Mapped[str | None]
    labels: Mapped[dict[str, Any]]
    tokens: Mapped[int]
    """Prompt and output together; guessed from the length of the text where ids are not known."""
    retokenised: Mapped[bool]
    temperature: Mapped[float | None]
    top_p: Mapped[float | None]
    top_k: Mapped[int | None]
    finish_reason: Mapped[str | None]
    timing: Mapped[dict[str, Any] | None]
    engine: Mapped[dict[str, Any] | None]
    extra: Mapped[dict[str, Any] | None] = mapped_column(AnyJson)
    live_folded_at: Mapped[float | None] = mapped_column(default=None)
    """When the engine's own figures became part of their cell."""

    __table_args__ = (
        Index("ix_samples_live", "id", postgresql_where=text_(LIVE_WAITING), sqlite_where=text_(LIVE_WAITING)),
    )


class Payload(Base):
    """What a sample says: token ids, or text until it is tokenised. Kept for its own, shorter time."""

    __tablename__ = "payloads"
    sample_id: Mapped[int] = mapped_column(Id, ForeignKey("samples.id", ondelete="CASCADE"), primary_key=True)
    prompt_ids: Mapped[bytes | None] = mapped_column(LargeBinary)
    output_ids: Mapped[bytes | None] = mapped_column(LargeBinary)
    text: Mapped[dict[str, Any] | None] = mapped_column(AnyJson)

    __table_args__ = (
        Index(
            "ix_payloads_text",
            "sample_id",
            postgresql_where=text_("text IS NOT NULL"),
            sqlite_where=text_("text IS NOT NULL"),
        ),
    )


OPEN_WORK = "work.state IN ('pending', 'leased')"
"""Written out, not bound: SQLite uses a partial index only for the very condition it was made with."""


class Work(Base):
    """One draft to judge on one sample. States: pending, leased, done, skipped, failed."""

    __tablename__ = "work"
    id: Mapped[int] = mapped_column(Id, primary_key=True)
    sample_id: Mapped[int] = mapped_column(Id, ForeignKey("samples.id", ondelete="CASCADE"))
    draft: Mapped[str]
    state: Mapped[str] = mapped_column(String(16))
    owner: Mapped[str | None]
    lease_until: Mapped[float | None]
    attempts: Mapped[int] = mapped_column(default=0)
    reason: Mapped[str | None]
    queued_at: Mapped[float]
    turn: Mapped[int] = mapped_column(BigInteger)
    """Its place among fresh work, see ``store.turns``."""

    __table_args__ = (
        UniqueConstraint("sample_id", "draft"),
        Index(
            "ix_work_open",
            "attempts",
            "turn",
            "id",
            postgresql_where=text_("state IN ('pending', 'leased')"),
            sqlite_where=text_("state IN ('pending', 'leased')"),
        ),
    )


class Turn(Base):
    """How far a segment's work reaches in the queue: the turn of its next one, unless the queue is past that."""

    __tablename__ = "turns"
    segment: Mapped[str] = mapped_column(primary_key=True)
    until: Mapped[int] = mapped_column(BigInteger)


class BudgetDay(Base):
    """Tokens given out for replay on one day (UTC) since the epoch, once for each draft."""

    __tablename__ = "budget_days"
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tokens: Mapped[int] = mapped_column(BigInteger)


class Tap(Base):
    """A tap that asked for its budgets, under the name that it gave itself, and when it did so last."""

    __tablename__ = "taps"
    id: Mapped[str] = mapped_column(primary_key=True)
    asked_at: Mapped[float]


class Replay(Base):
    """The weights of one draft on one sample: every gamma, tail and test is derived from them without a GPU."""

    __tablename__ = "replays"
    id: Mapped[int] = mapped_column(Id, primary_key=True)
    sample_id: Mapped[int] = mapped_column(Id, ForeignKey("samples.id", ondelete="CASCADE"))
    draft: Mapped[str]
    fingerprint: Mapped[str]
    rule: Mapped[str] = mapped_column(String(16))
    split: Mapped[str] = mapped_column(String(8))
    tokens: Mapped[int]
    depths: Mapped[int]
    encoding: Mapped[str] = mapped_column(String(8))
    weights: Mapped[bytes] = mapped_column(LargeBinary)
    proposals: Mapped[bytes | None] = mapped_column(LargeBinary)
    figures: Mapped[dict[str, Any] | None]
    """What the shadow knows of the request beyond the draft's weights."""
    replayed_at: Mapped[float]
    folded_at: Mapped[float | None]

    __table_args__ = (
        UniqueConstraint("sample_id", "draft"),
        Index("ix_replays_draft", "draft", "id"),
        Index(
            "ix_replays_unfolded",
            "id",
            postgresql_where=text_("folded_at IS NULL"),
            sqlite_where=text_("folded_at IS NULL"),
        ),
    )


class Cell(Base):
    """Segment x split of one deployment and one draft: lifetime sums, baseline and detector.

    ``channel`` says whose figures they are: ``shadow`` from replays, ``live`` from the engine. ``metric`` is what the
    detector watches: ``hit_rate``, or where an engine does not give that much ``acceptance_rate``,
    ``acceptance_length``.
    """

    __tablename__ = "cells"
    id: Mapped[int] = mapped_column(Id, primary_key=True)
    deployment_id: Mapped[int] = mapped_column(Id, ForeignKey("deployments.id"))
    draft: Mapped[str]
    segment: Mapped[str]
    split: Mapped[str] = mapped_column(String(8))
    channel: Mapped[str] = mapped_column(String(8), default="shadow")
    fingerprint: Mapped[str] = mapped_column(String(64), default="")
    """Hash of the draft's weights: other weights under the same name are another draft. Empty for live cells."""
    metric: Mapped[str] = mapped_column(String(32), default="hit_rate")
    gamma: Mapped[int]
    state: Mapped[dict[str, Any]]
    sums: Mapped[dict[str, Any]]
    updated_at: Mapped[float]

    __table_args__ = (UniqueConstraint("deployment_id", "draft", "segment", "split", "channel", "fingerprint"),)


class Monitor(Base):
    """State of one test beside the hit rate's, for one draft on one segment of one deployment, over all splits."""

    __tablename__ = "monitors"
    id: Mapped[int] = mapped_column(Id, primary_key=True)
    deployment_id: Mapped[int] = mapped_column(Id, ForeignKey("deployments.id"))
    draft: Mapped[str]
    fingerprint: Mapped[str] = mapped_column(String(64), default="")
    segment: Mapped[str]
    kind: Mapped[str] = mapped_column(String(32))
    channel: Mapped[str] = mapped_column(String(8))
    """Whose requests it is fed with, as in cells."""
    state: Mapped[dict[str, Any]]
    updated_at: Mapped[float]

    __table_args__ = (UniqueConstraint("deployment_id", "draft", "fingerprint", "segment", "kind"),)


class Canary(Base):
    """What one deployment first answered to the canary prompts, and how its later answers differed."""

    __tablename__ = "canaries"
    id: Mapped[int] = mapped_column(Id, primary_key=True)
    deployment_id: Mapped[int] = mapped_column(Id, ForeignKey("deployments.id"))
    prompts: Mapped[str] = mapped_column(String(64))
    """Hash of the prompts and of how they are asked: other prompts have a reference of their own."""
    reference: Mapped[dict[str, Any]]
    reference_at: Mapped[float]
    state: Mapped[dict[str, Any]]
    updated_at: Mapped[float]

    __table_args__ = (UniqueConstraint("deployment_id", "prompts"),)


class CellHour(Base):
    """One hour of a cell. Outlives pruned samples, so that counters stay monotonic."""

    __tablename__ = "cell_hours"
    cell_id: Mapped[int] = mapped_column(Id, ForeignKey("cells.id", ondelete="CASCADE"), primary_key=True)
    hour: Mapped[int] = mapped_column(primary_key=True)
    """Whole hours since the epoch."""
    requests: Mapped[int]
    tokens: Mapped[int]
    sums: Mapped[dict[str, Any]]

    __table_args__ = (Index("ix_cell_hours_hour", "hour"),)


class Latency(Base):
    """How many requests of a segment were over a limit of the service level, in one span of time."""

    __tablename__ = "latencies"
    figure: Mapped[str] = mapped_column(String(8), primary_key=True)
    """ttft or tpot"""
    segment: Mapped[str] = mapped_column(primary_key=True)
    limit_s: Mapped[float] = mapped_column(primary_key=True)
    span_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """A minute or an hour."""
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Whole spans since the epoch."""
    weight: Mapped[float]
    """Requests that the samples stand for."""
    squares: Mapped[float]
    """Sum of the samples' squared weights."""
    over: Mapped[float]
    """Of ``weight``, over the limit."""


class Outcome(Base):
    """How many samples of a segment ended how: stored, replayed, skipped or failed, with the reason."""

    __tablename__ = "outcomes"
    segment: Mapped[str] = mapped_column(primary_key=True)
    outcome: Mapped[str] = mapped_column(String(16), primary_key=True)
    reason: Mapped[str] = mapped_column(String(64), primary_key=True)
    samples: Mapped[int]


class Event(Base):
    """Something happened to a cell or a deployment. An event without ``closed_at`` is still open."""

    __tablename__ = "events"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(64))
    cell_id: Mapped[int | None] = mapped_column(Id, ForeignKey("cells.id", ondelete="SET NULL"), index=True)
    deployment_id: Mapped[int | None] = mapped_column(Id, ForeignKey("deployments.id", ondelete="SET NULL"))
    segment: Mapped[str]
    split: Mapped[str] = mapped_column(String(8))
    draft: Mapped[str]
    cause: Mapped[str] = mapped_column(String(32))
    opened_at: Mapped[float] = mapped_column(index=True)
    closed_at: Mapped[float | None]
    request_id: Mapped[str]
    """The request at which it fired."""
    start_request_id: Mapped[str | None]
    """The request at which the change is estimated to have begun."""
    details: Mapped[dict[str, Any]]


class Delivery(Base):
    """An event on its way to one webhook endpoint: the exact body that is signed and sent."""

    __tablename__ = "outbox"
    id: Mapped[int] = mapped_column(Id, primary_key=True)
    event_id: Mapped[str] = mapped_column(String(64))
    """Sent as webhook-id and CloudEvent id, the same on every attempt."""
    endpoint: Mapped[str]
    type: Mapped[str]
    body: Mapped[bytes] = mapped_column(LargeBinary)
    state: Mapped[str] = mapped_column(String(16))
    """pending, delivered or dead"""
    attempts: Mapped[int] = mapped_column(default=0)
    given_up: Mapped[int] = mapped_column(default=0)
    """How often it was dead; to send it again takes nothing back."""
    due_at: Mapped[float]
    created_at: Mapped[float]
    delivered_at: Mapped[float | None]
    error: Mapped[str | None]

    __table_args__ = (
        UniqueConstraint("event_id", "endpoint"),
        Index(
            "ix_outbox_pending",
            "due_at",
            postgresql_where=text_("state = 'pending'"),
            sqlite_where=text_("state = 'pending'"),
        ),
    )


class Retrain(Base):
    """What was decided on an event: to ask for training, and then how far that has come, or not to ask, and why."""

    __tablename__ = "retrains"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    event_id: Mapped[str] = mapped_column(String(64), ForeignKey("events.id"), unique=True)
    cell_id: Mapped[int | None] = mapped_column(Id, ForeignKey("cells.id"), index=True)
    model: Mapped[str] = mapped_column(default="")
    draft: Mapped[str] = mapped_column(default="")
    state: Mapped[str] = mapped_column(String(16))
    """See ``retrain.states``."""
    reason: Mapped[str | None]
    """Why it is in this state, in one line."""
    decision: Mapped[dict[str, Any] | None]
    """Everything the policy looked at, and what it said to each."""
    trained_on: Mapped[bytes | None] = mapped_column(LargeBinary)
    """Ids of the samples in its training data, int64 little-endian: a candidate is never judged on those."""
    token_sha256: Mapped[str | None] = mapped_column(String(64))
    """Hash of the token by which the pipeline reports back on this one."""
    created_at: Mapped[float]
    updated_at: Mapped[float]
    data: Mapped[dict[str, Any] | None]

    __table_args__ = (Index("ix_retrains_draft", "model", "draft", "state"),)


class RetrainStep(Base):
    """One transition of a retrain."""

    __tablename__ = "retrain_steps"
    id: Mapped[int] = mapped_column(Id, primary_key=True)
    retrain_id: Mapped[str] = mapped_column(String(64), ForeignKey("retrains.id", ondelete="CASCADE"), index=True)
    before: Mapped[str | None] = mapped_column(String(16))
    after: Mapped[str] = mapped_column(String(16))
    at: Mapped[float]
    reason: Mapped[str | None]


class Candidate(Base):
    """A retrained draft, judged beside the incumbent on the same samples."""

    __tablename__ = "candidates"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Also the name of the draft in ``work`` and ``replays``."""
    retrain_id: Mapped[str] = mapped_column(String(64), ForeignKey("retrains.id"), index=True)
    model: Mapped[str]
    incumbent: Mapped[str]
    path: Mapped[str]
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    """Hash of its weights, once the shadow has read them."""
    incumbent_fingerprint: Mapped[str | None] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    """history, live, promoted, rejected or failed"""
    reason: Mapped[str | None]
    history_until: Mapped[int] = mapped_column(Id)
    """The last sample of the fixed history; later ones are live."""
    queued_until: Mapped[int] = mapped_column(Id)
    """The last sample that there is work for."""
    queued_live: Mapped[int]
    """Live samples that there is, or was, work for."""
    verdict: Mapped[dict[str, Any] | None]
    details: Mapped[dict[str, Any]]
    """What the pipeline said of it."""
    created_at: Mapped[float]
    updated_at: Mapped[float]


class Pair(Base):
    """One sample on which candidate and incumbent were both judged: the counts at the model's gamma."""

    __tablename__ = "pairs"
    candidate_id: Mapped[str] = mapped_column(
        String(64), ForeignKey("candidates.id", ondelete="CASCADE"), primary_key=True
    )
    sample_id: Mapped[int] = mapped_column(Id, primary_key=True)
    """Without a key into ``samples``: pairs outlive what retention deletes."""
    taken: Mapped[int]
    """Their order, from 1: that in which they became known, which a sequential test must keep to."""
    segment: Mapped[str]
    split: Mapped[str] = mapped_column(String(8))
    session: Mapped[str | None]
    served_at: Mapped[float]
    weight: Mapped[float]
    tokens: Mapped[int]
    accepted: Mapped[float]
    tested: Mapped[float]
    steps: Mapped[float]
    incumbent_accepted: Mapped[float]
    incumbent_tested: Mapped[float]
    incumbent_steps: Mapped[float]


class Artefact(Base):
    """A file that belongs to a draft or a deployment: an export, a sketch, a cost profile."""

    __tablename__ = "artefacts"
    id: Mapped[int] = mapped_column(Id, primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    uri: Mapped[str]
    sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]
    details: Mapped[dict[str, Any]]
