"""What control says of its cells: the same figures for the API, the metrics and the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, cast

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from driftwatch.control import conditions, tails
from driftwatch.control.conditions import Conditions
from driftwatch.control.counters import Counters
from driftwatch.control.terms import figure, fitted
from driftwatch.drift.cell import CellState
from driftwatch.drift.interval import Estimate
from driftwatch.drift.live import METRICS, Metric
from driftwatch.drift.quantiles import Quantiles
from driftwatch.drift.sums import Figure, Sums
from driftwatch.records import segment_labels
from driftwatch.store import deployments
from driftwatch.store.schema import Cell, CellHour, Deployment, Event

RECENT_HOURS = 24
QUANTILES = (0.5, 0.95, 0.99)
EachHour = Callable[[Cell, int, Sums], None]
"""Takes a cell, whole hours since the epoch, and what was counted in that hour."""
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
    since: float
    """When its deployment last began to serve."""

    @property
    def order(self) -> tuple[float, float, int]:
        """The largest is in use, of all that have one name: one that was rolled back to comes last again."""
        return self.since, self.cell.updated_at, self.cell.id

    @cached_property
    def counters(self) -> Counters:
        """Lifetime counts, as they are exported."""
        return Counters.read(self.cell.sums) + Counters.of(self.sums, self.cell.gamma)

    @property
    def metric(self) -> Metric:
        """What the detector watches."""
        return cast("Metric", self.cell.metric)

    def gives(self, name: Figure) -> bool:
        return gives(self.cell, name)

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


def since(now: float) -> int:
    """The first of the last 24 hours, the present one included, in whole hours since the epoch."""
    return int(now // 3600) - RECENT_HOURS + 1


def gives(cell: Cell, name: Figure) -> bool:
    """Whether the counts behind a figure are known: an engine may say less than a replay."""
    return name == "steps_per_token" or METRICS.index(name) >= METRICS.index(cast("Metric", cell.metric))


def cells(
    session: Session,
    now: float,
    segment: str | None = None,
    heard_since: float | None = None,
    each_hour: EachHour = lambda _cell, _hour, _sums: None,
) -> Iterator[CellReport]:
    """Reports of all cells, or of one segment's, in order of segment.

    ``heard_since`` leaves out those of names (model, draft, segment, split, channel) that had no request since then.
    ``each_hour`` is shown the hours of the last 24 in which a cell had requests, a cell's own in order.
    """
    query = select(Cell, Deployment).join(Deployment, Deployment.id == Cell.deployment_id)
    if segment is not None:
        query = query.where(Cell.segment == segment)
    if heard_since is not None:
        name = (Deployment.model, Cell.draft, Cell.segment, Cell.split, Cell.channel)
        heard = func.max(Cell.updated_at).over(partition_by=name).label("heard")
        of_name = select(Cell.id, heard).join(Deployment, Deployment.id == Cell.deployment_id).subquery()
        query = query.join(of_name, of_name.c.id == Cell.id).where(of_name.c.heard >= heard_since)
    order = (Cell.segment, Cell.channel.desc(), Cell.split, Cell.draft, Cell.deployment_id)
    rows = session.execute(query.order_by(*order)).all()
    began = deployments.since(session)  # after the cells: all of their deployments are there by then
    days = {row.Cell.id: _Day(row.Cell) for row in rows}
    ids = query.with_only_columns(Cell.id)
    hours = select(CellHour.cell_id, CellHour.hour, CellHour.sums)
    hours = hours.where(CellHour.hour >= since(now), CellHour.cell_id.in_(ids)).order_by(
        CellHour.cell_id, CellHour.hour
    )
    for hour in session.execute(hours, execution_options={"yield_per": 500}):
        if (day := days.get(hour.cell_id)) is not None:  # else a cell that began since
            each_hour(day.cell, hour.hour, day.add(hour.sums))
    still_open = select(Event).where(Event.kind == "drift", Event.closed_at.is_(None), Event.cell_id.in_(ids))
    events = {event.cell_id: event for event in session.scalars(still_open)}
    for row in rows:
        day = days[row.Cell.id]
        state = CellState.from_json(row.Cell.state)
        figures = day.sums, day.recent, day.tail, day.conditions
        yield CellReport(row.Cell, row.Deployment, state, *figures, events.get(row.Cell.id), began[row.Deployment.id])


class _Day:
    """A cell's sums, and those of its last 24 hours."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.sums = cell, Sums.from_json(cell.sums)
        self.recent, self.tail, self.conditions = Sums.zero(self.sums.gammas), tails.empty(cell.gamma), Conditions()

    def add(self, hour: dict[str, Any]) -> Sums:
        """The sums of that hour."""
        sums = fitted(Sums.from_json(hour), self.sums.gammas, self.cell.channel)
        self.recent += sums
        self.tail += tails.read(hour, self.cell.gamma)
        self.conditions += conditions.read(hour)
        return sums


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
