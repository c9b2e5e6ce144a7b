"""What control says of the tests beside the hit rate's: the same figures for the API and the metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control.monitors import DEFINITIONS, EVENTS, told
from driftwatch.control.reports import CellReport, rfc3339
from driftwatch.control.terms import figure
from driftwatch.drift.interval import Estimate, student_quantile, wilson
from driftwatch.drift.watch import Watch
from driftwatch.store import deployments
from driftwatch.store.schema import Deployment, Event, Monitor


@dataclass(frozen=True)
class MonitorReport:
    """One test of one draft and segment, in the deployment in use."""

    row: Monitor
    deployment: Deployment
    watch: Watch
    open_event: Event | None

    @property
    def labels(self) -> tuple[str, str, str]:
        return self.deployment.model, self.row.draft, self.row.segment

    @property
    def event_kind(self) -> str:
        return EVENTS.get(self.watch.terms.kind, self.watch.terms.kind)

    def as_dict(self) -> dict[str, Any]:
        terms, baseline, monitor = self.watch.terms, self.watch.baseline, self.watch.monitor
        missing = [] if baseline is None or monitor is not None else baseline.progress.missing
        return {
            "kind": terms.kind,
            "definition": DEFINITIONS[terms.kind],
            "channel": self.row.channel,
            "draft": self.row.draft,
            "model": self.deployment.model,
            "deployment": self.deployment.id,
            "state": self.watch.state,
            "baseline": None if baseline is None else figure(told(terms, baseline.estimate)) | {"missing": missing},
            "current": None if monitor is None else figure(told(terms, monitor.estimate)),
            "limit": None if monitor is None else told(terms, _level(monitor.limit)).value,
            "drift_evidence_ratio": self.watch.evidence_ratio,
            "event": self.open_event.id if self.open_event else None,
            "updated_at": rfc3339(self.row.updated_at),
        }


def monitors(session: Session, segment: str | None = None, heard_since: float = 0.0) -> Iterator[MonitorReport]:
    """Reports of all tests, or of one segment's, in order of segment; ``heard_since`` as in ``reports.cells``."""
    query = select(Monitor, Deployment).join(Deployment, Deployment.id == Monitor.deployment_id)
    if segment is not None:
        query = query.where(Monitor.segment == segment)
    newest: dict[tuple[str, ...], MonitorReport] = {}
    began = deployments.since(session)
    rows = session.execute(query.where(Monitor.updated_at >= heard_since)).all()
    for row in sorted(rows, key=lambda row: (began[row.Deployment.id], row.Monitor.updated_at, row.Monitor.id)):
        report = MonitorReport(row.Monitor, row.Deployment, Watch.from_json(row.Monitor.state), None)
        newest[(*report.labels, report.watch.terms.kind)] = report
    still_open = session.scalars(select(Event).where(Event.closed_at.is_(None)).order_by(Event.opened_at)).all()
    events = {(one.kind, one.deployment_id, one.draft, one.segment): one for one in still_open}
    for key in sorted(newest, key=lambda key: (key[2], key)):
        report = newest[key]
        mine = report.row.deployment_id, report.row.draft, report.row.segment
        yield replace(report, open_event=events.get((report.event_kind, *mine)))


def off_share(cells: Sequence[CellReport]) -> Estimate:
    """Share of a draft's requests that are off its training distribution, from the cells of one segment or of all.

    Weighted to all traffic, since segments are sampled at rates of their own. The Wilson (1927) interval is on the
    effective number of requests, (sum w)^2 / sum w^2 (Kish 1965): in one cell all weigh about the same. Without a
    request that was scored there is no value.
    """
    weight, squares, requests = {"on": 0.0, "off": 0.0}, 0.0, 0
    for report in cells:
        recent = report.recent
        if report.cell.split in weight and recent.requests:
            weight[report.cell.split] += recent.weight
            squares += recent.weight**2 / recent.requests
            requests += recent.requests
    total = sum(weight.values())
    if not total:
        return Estimate(None, None, None, 0, 0.0, 0.0)
    share = weight["off"] / total
    effective = total**2 / squares
    if effective < 2.0:
        return Estimate(share, None, None, requests, weight["off"], total)
    # The small addition keeps equal weights at requests - 1 when the division above rounds down.
    lower, upper = wilson(share, effective, student_quantile(int(effective - 1.0 + 1e-9)))
    return Estimate(share, min(max(lower, 0.0), share), max(min(upper, 1.0), share), requests, weight["off"], total)


def _level(limit: float) -> Estimate:
    return Estimate(limit, None, None, 0, 0.0, 0.0)
