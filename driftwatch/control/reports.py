"""What control says of its cells: the same figures for the API, the metrics and the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control import conditions, tails
from driftwatch.control.conditions import Conditions
from driftwatch.control.terms import figure, fitted
from driftwatch.drift.cell import CellState
from driftwatch.drift.interval import Estimate
from driftwatch.drift.live import METRICS, Metric
from driftwatch.drift.quantiles import Quantiles
from driftwatch.drift.sums import Figure, Sums
from driftwatch.records import segment_labels
from driftwatch.store.schema import Cell, CellHour, Deployment, Event

RECENT_HOURS = 24
QUANTILES = (0.5, 0.95, 0.99)
FIGURES: tuple[Figure, ...] = ("hit_rate", "acceptance_rate", "acceptance_length", "steps_per_token")


@dataclass(frozen=True)
class CellReport:
    """One cell: lifetime sums, those of the last 24 hours, and what its detector says."""

    cell: Cell
    deployment: Deployment
    state: CellState
    sums: Sums
    recent: Sums
    tail: Quantiles
    """Steps per token of the last 24 hours."""
    conditions: Conditions
    """What those requests were served under."""
    open_event: Event | None

    @property
    def metric(self) -> Metric:
        """What the detector watches."""
        return cast("Metric", self.cell.metric)

    def gives(self, name: Figure) -> bool:
        """Whether the counts behind a figure are known: an engine may say less than a replay."""
        return name == "steps_per_token" or METRICS.index(name) >= METRICS.index(self.metric)

    def estimate(self, name: Figure) -> Estimate:
        """A figure over the last 24 hours at the cell's gamma; empty where it is not known."""
        if not self.gives(name):
            return Estimate(None, None, None, self.recent.requests, 0.0, 0.0)
        return self.recent.interval(name, self.cell.gamma)

    def counts(self) -> dict[str, Any]:
        """Lifetime counts and ratios; None where not known."""
        found = self.sums.tally.figures(self.cell.gamma)
        unknown = [] if self.gives("hit_rate") else ["rejected", "hit_rate", "accepted_per_depth"]
        unknown += [] if self.gives("acceptance_rate") else ["drafted", "acceptance_rate"]
        return found | dict.fromkeys(unknown)

    def as_dict(self) -> dict[str, Any]:
        baseline = self.state.baseline
        return {
            "segment": self.cell.segment,
            "labels": segment_labels(self.cell.segment),
            "split": self.cell.split,
            "channel": self.cell.channel,
            "draft": self.cell.draft,
            "model": self.deployment.model,
            "deployment": self.deployment.id,
            "gamma": self.cell.gamma,
            "metric": self.metric,
            "state": self.state.state,
            "requests": self.sums.requests,
            "tokens": self.sums.tokens,
            "counts": self.counts(),
            "recent": {"hours": RECENT_HOURS} | {name: figure(self.estimate(name)) for name in FIGURES},
            "tail": {f"{q:g}": asdict(self.tail.quantile(q)) for q in QUANTILES},
            "baseline": {self.metric: figure(baseline.estimate), "missing": baseline.progress.missing},
            "floor": None if self.state.detector is None else self.state.detector.floor,
            "drift_evidence_ratio": self.state.evidence_ratio,
            "drift_event": self.open_event.id if self.open_event else None,
            "updated_at": rfc3339(self.cell.updated_at),
        }


def cells(session: Session, now: float, segment: str | None = None) -> Iterator[CellReport]:
    """Reports of all cells, or of one segment's, in order of segment."""
    query = select(Cell, Deployment).join(Deployment, Deployment.id == Cell.deployment_id)
    if segment is not None:
        query = query.where(Cell.segment == segment)
    since = int(now // 3600) - RECENT_HOURS + 1
    order = (Cell.segment, Cell.channel.desc(), Cell.split, Cell.draft, Cell.deployment_id)
    for row in session.execute(query.order_by(*order)).all():
        sums = Sums.from_json(row.Cell.sums)
        recent = Sums.zero(sums.gammas)
        tail = tails.empty(row.Cell.gamma)
        under = Conditions()
        hours = select(CellHour.sums).where(CellHour.cell_id == row.Cell.id, CellHour.hour >= since)
        for hour in session.scalars(hours):
            recent += fitted(Sums.from_json(hour), sums.gammas, row.Cell.channel)
            tail += tails.read(hour, row.Cell.gamma)
            under += conditions.read(hour)
        mine = (Event.cell_id == row.Cell.id, Event.kind == "drift", Event.closed_at.is_(None))
        state = CellState.from_json(row.Cell.state)
        event = session.scalars(select(Event).where(*mine)).first()
        yield CellReport(row.Cell, row.Deployment, state, sums, recent, tail, under, event)


def event_dict(event: Event) -> dict[str, Any]:
    return {
        "id": event.id,
        "kind": event.kind,
        "segment": event.segment,
        "split": event.split,
        "channel": event.details.get("channel"),
        "draft": event.draft,
        "cause": event.cause,
        "opened_at": rfc3339(event.opened_at),
        "closed_at": rfc3339(event.closed_at) if event.closed_at is not None else None,
        "request_id": event.request_id,
        "start_request_id": event.start_request_id,
        "details": event.details,
    }


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
