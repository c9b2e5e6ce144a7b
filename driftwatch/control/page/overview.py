"""The first page: is it worth it, where not, since when, and does the loop run?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from markupsafe import Markup
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from driftwatch.control import reports, watched
from driftwatch.control.judge import REFUSED
from driftwatch.control.page import hours
from driftwatch.control.page.cells import Line, baseline_of, by_segment, lines
from driftwatch.control.page.hours import Hour
from driftwatch.control.page.plot import Stretch, spark
from driftwatch.control.page.words import metric
from driftwatch.control.watched import MonitorReport
from driftwatch.drift.interval import Estimate
from driftwatch.drift.live import Metric
from driftwatch.drift.sums import Sums
from driftwatch.retrain.states import OPEN
from driftwatch.settings import Settings
from driftwatch.store import candidates, outbox, samples
from driftwatch.store.deployments import CHANGED
from driftwatch.store.schema import Candidate, Cell, Delivery, Deployment, Event, Outcome, Retrain, Sample, Segment

SHOWN = 20
"""Newest entries of each list."""


@dataclass(frozen=True)
class Health:
    """Whether samples come in, are judged, and events go out."""

    last_sample_s: float | None
    outcomes: dict[str, int]
    unjudged: list[tuple[str, str, int]]
    """Outcome, reason and number of samples that were not judged."""
    waiting: int
    oldest_s: float | None
    """Age of the oldest sample that waits for its replay."""
    deliveries: dict[str, int]
    retrains_open: int
    leads: bool
    """Whether this control judges and sends; else another does, or should."""


@dataclass(frozen=True)
class SegmentRow:
    id: str
    lines: list[tuple[Line, Markup]]
    """Each with its last hours drawn."""
    off: Estimate
    """Share of requests off the training distribution."""
    open_events: list[Event]
    below: list[MonitorReport]
    """Tests that hold an event open."""


@dataclass(frozen=True)
class Asked:
    """A decision on retraining with the event that it is about, and its newest candidate."""

    retrain: Retrain
    event: Event
    candidate: Candidate | None


@dataclass(frozen=True)
class Overview:
    now: float
    health: Health
    segments: list[SegmentRow]
    open_events: Sequence[Event]
    events: Sequence[Event]
    retrains: list[Asked]
    deployments: list[tuple[Deployment, Event | None]]
    """Newest first, each with the event of its change."""
    deliveries: Sequence[Delivery]

    @property
    def learning(self) -> int:
        """Segments in which nothing is watched yet."""
        return sum(all(line.report.state.state == "learning" for line, _ in row.lines) for row in self.segments)

    @property
    def watched(self) -> list[str]:
        """Names of what the detectors watch."""
        return sorted({metric(line.metric) for row in self.segments for line, _ in row.lines}) or ["hit rate"]

    @property
    def troubled(self) -> int:
        return sum(bool(row.open_events) for row in self.segments)


def overview(session: Session, settings: Settings, *, leads: bool, now: float) -> Overview:
    """All that the first page says, in one read of the store."""
    still_open = session.scalars(
        select(Event).where(Event.closed_at.is_(None)).order_by(Event.opened_at.desc(), Event.id)
    ).all()
    open_first = select(Event).order_by(Event.closed_at.is_not(None), Event.opened_at.desc(), Event.id)
    return Overview(
        now,
        _health(session, leads, now),
        _segments(session, settings, still_open, now),
        still_open,
        session.scalars(open_first.limit(max(SHOWN, len(still_open)))).all(),
        _retrains(session),
        deployments(session),
        session.scalars(select(Delivery).order_by(Delivery.id.desc()).limit(SHOWN)).all(),
    )


def _health(session: Session, leads: bool, now: float) -> Health:
    rows = select(Outcome.outcome, Outcome.reason, func.sum(Outcome.samples)).where(Outcome.outcome != REFUSED)
    outcomes: dict[str, int] = {}
    unjudged = []
    for outcome, reason, number in session.execute(rows.group_by(Outcome.outcome, Outcome.reason)):
        outcomes[outcome] = outcomes.get(outcome, 0) + int(number)
        if reason:
            unjudged.append((outcome, reason, int(number)))
    waiting, oldest = samples.waiting(session)
    asked = select(func.count()).select_from(Retrain).where(Retrain.state.in_(OPEN))
    return Health(
        session.scalar(select(func.max(Sample.arrived_at))),
        outcomes,
        sorted(unjudged),
        waiting,
        None if oldest is None else max(0.0, now - oldest),
        outbox.counts(session),
        session.scalar(asked) or 0,
        leads,
    )


def _segments(session: Session, settings: Settings, still_open: Sequence[Event], now: float) -> list[SegmentRow]:
    since = reports.since(now) * hours.HOUR_S
    drawn: dict[int, list[Hour]] = defaultdict(list)

    def draw(cell: Cell, hour: int, sums: Sums) -> None:
        drawn[cell.id].append(hours.of(cell, hour, sums, [cast("Metric", cell.metric)]))

    cells = list(reports.cells(session, now, each_hour=draw))
    found = by_segment(lines(cells, settings))
    tests = list(watched.monitors(session))
    rows = []
    for id in sorted({*session.scalars(select(Segment.id)), *found}):
        group = found.get(id, [])
        shadow = [line.report for line in group if line.report.cell.channel == "shadow"]
        alarmed = [test for test in tests if test.row.segment == id and test.open_event is not None]
        mine = [event for event in still_open if event.segment == id]
        each = [(line, _spark(line, drawn[line.report.cell.id], since)) for line in group]
        rows.append(SegmentRow(id, each, watched.off_share(_incumbent(shadow, settings)), mine, alarmed))
    return sorted(rows, key=lambda row: not row.open_events)  # what wants a look comes first


def _incumbent(shadow: Sequence[reports.CellReport], settings: Settings) -> list[reports.CellReport]:
    """The draft that the engine runs: shares of several drafts' requests would count the same requests twice."""
    found = []
    for report in shadow:
        model = settings.model_for(report.deployment.model)
        if model is not None and model.drafts and report.cell.draft == model.drafts[0].name:
            found.append(report)
    return found


def _spark(line: Line, found: Sequence[Hour], since: float) -> Markup:
    points = [(hour.start_s, hour.figures[line.metric]) for hour in found]
    stretch = Stretch(points, baseline_of(line.report))
    low = 1.0 if line.metric == "acceptance_length" else 0.0
    return spark(stretch, since=since, until=since + reports.RECENT_HOURS * hours.HOUR_S, low=low, high=line.high)


def _retrains(session: Session) -> list[Asked]:
    rows = select(Retrain, Event).join(Event, Event.id == Retrain.event_id).order_by(Retrain.created_at.desc())
    return [
        Asked(row.Retrain, row.Event, next(reversed(candidates.of_retrain(session, row.Retrain.id)), None))
        for row in session.execute(rows.limit(SHOWN))
    ]


def deployments(session: Session) -> list[tuple[Deployment, Event | None]]:
    """What has been serving, newest first."""
    rows = session.scalars(select(Deployment).order_by(Deployment.id.desc()).limit(SHOWN)).all()
    changes = select(Event).where(Event.kind == CHANGED, Event.deployment_id.in_([row.id for row in rows]))
    events = {event.deployment_id: event for event in session.scalars(changes)}
    return [(row, events.get(row.id)) for row in rows]
