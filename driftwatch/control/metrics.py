"""Control's metrics, read from the store on each scrape: what is stored is what is exported, after a restart too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from driftwatch.control import judgement, reports, value, watched
from driftwatch.control.families import CELL, LIVE_CELL, by_labels, counter, gauge
from driftwatch.control.judge import REFUSED
from driftwatch.control.leader import Leader
from driftwatch.control.reports import CellReport
from driftwatch.drift.sums import Figure
from driftwatch.settings import Settings
from driftwatch.store import outbox, samples
from driftwatch.store.connection import Store
from driftwatch.store.schema import Outcome

COUNTERS = {
    "requests": "Requests replayed.",
    "tokens": "Output tokens judged: all but the first of each request.",
    "steps": "Passes of the target after prefill.",
    "windows": "Steps with at least one proposal.",
    "drafted_tokens": "Proposals made.",
    "accepted_tokens": "Proposals that the target accepted, bonus tokens left out.",
    "rejected_tokens": "Proposals that the target tested and refused.",
}
LIVE_COUNTERS = {
    "requests": "Requests whose own figures the engine gave.",
    "tokens": "Output tokens of those requests: all but the first of each.",
    "steps": "Passes of the target after prefill.",
    "windows": "Steps with at least one proposal.",
    "drafted_tokens": "Proposals made, as the engine counts them.",
    "accepted_tokens": "Proposals accepted, as the engine counts them: behind the last served token too.",
    "rejected_tokens": "Proposals tested and refused, where the engine says enough to know.",
}


def registry(store: Store, settings: Settings, leader: Leader | None = None) -> CollectorRegistry:
    """A registry of its own; nothing global is touched."""
    leader = leader or Leader(store)
    own = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=own)
    leads = Gauge("driftwatch_leader", "1 on the control that judges, decides and delivers, 0 on others.", registry=own)
    leads.set_function(lambda: float(leader.leads))
    own.register(StoreCollector(store, settings, leader))
    return own


class StoreCollector(Collector):
    """Raises StoreError on a scrape while the store is away: no figures rather than stale ones.

    Only the leader tells them: they are the same everywhere, and would be summed over all controls.
    """

    def __init__(self, store: Store, settings: Settings, leader: Leader) -> None:
        self._store = store
        self._settings = settings
        self._leader = leader

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        if not self._leader.leads:
            return
        now = time.time()
        with self._store.read() as session:
            cells = list(reports.cells(session, now))
            shadow = [report for report in cells if report.cell.channel == "shadow"]
            live = [report for report in cells if report.cell.channel == "live"]
            yield from _counters(shadow)
            yield from _live_counters(live)
            monitors = list(watched.monitors(session))
            values = value.judge(cells, self._settings)
            yield from judgement.shadow(shadow, monitors, values)
            yield from judgement.live(live, monitors, values)
            yield from _loop(session, now)
            yield _deployments(cells)


def _counters(cells: list[CellReport]) -> Iterator[Metric]:
    """Counts at the configured gamma, of what was judged and weighted to all traffic, over all deployments."""
    plain = {name: counter(f"driftwatch_shadow_{name}", text, CELL) for name, text in COUNTERS.items()}
    weighted = {
        name: counter(f"driftwatch_estimated_{name}", f"{text} Weighted to all traffic.", CELL)
        for name, text in COUNTERS.items()
    }
    depth = (*CELL, "depth")
    plain_at = counter("driftwatch_shadow_accepted_at_depth", "Windows in which this depth was accepted.", depth)
    weighted_at = counter(
        "driftwatch_estimated_accepted_at_depth", "Windows in which this depth was accepted, weighted.", depth
    )
    for labels, group in by_labels(cells).items():
        for name in COUNTERS:
            plain[name].add_metric(labels, sum(_plain(report, name) for report in group))
            weighted[name].add_metric(labels, sum(_weighted(report, name) for report in group))
        for d in range(max(report.cell.gamma for report in group)):
            at = [(report.sums.tally.accepted_at, report.sums.accepted_at, report.cell.gamma - 1) for report in group]
            plain_at.add_metric((*labels, str(d)), sum(float(counts[g, d]) for counts, _, g in at))
            weighted_at.add_metric((*labels, str(d)), sum(float(counts[g, d]) for _, counts, g in at))
    yield from (*plain.values(), *weighted.values(), plain_at, weighted_at)


def _live_counters(cells: list[CellReport]) -> Iterator[Metric]:
    """The engine's own counts over all deployments; what it does not say is absent."""
    known: dict[str, Figure] = {"drafted_tokens": "acceptance_rate", "rejected_tokens": "hit_rate"}
    counters = {name: counter(f"driftwatch_live_{name}", text, LIVE_CELL) for name, text in LIVE_COUNTERS.items()}
    text = "Windows in which this depth was accepted."
    at = counter("driftwatch_live_accepted_at_depth", text, (*LIVE_CELL, "depth"))
    for labels, group in by_labels(cells).items():
        for name, family in counters.items():
            telling = [report for report in group if report.gives(known.get(name, "steps_per_token"))]
            if telling:
                family.add_metric(labels, sum(_plain(report, name) for report in telling))
        telling = [report for report in group if report.gives("hit_rate")]
        for d in range(max((report.cell.gamma for report in telling), default=0)):
            deep = [report for report in telling if d < report.cell.gamma]
            counts = [float(report.sums.tally.accepted_at[report.cell.gamma - 1, d]) for report in deep]
            at.add_metric((*labels, str(d)), sum(counts))
    yield from (*counters.values(), at)


def _plain(report: CellReport, name: str) -> float:
    tally, i = report.sums.tally, report.cell.gamma - 1
    counts: dict[str, Any] = {
        "requests": tally.requests,
        "tokens": tally.tokens,
        "steps": tally.steps[i],
        "windows": tally.windows[i],
        "drafted_tokens": tally.drafted[i],
        "accepted_tokens": tally.accepted[i],
        "rejected_tokens": tally.rejected[i],
    }
    return float(counts[name])


def _weighted(report: CellReport, name: str) -> float:
    sums, gamma = report.sums, report.cell.gamma
    if name == "requests":
        return sums.weight
    if name == "rejected_tokens":
        return sums.total("tested", gamma) - sums.total("accepted", gamma)
    names: dict[str, Any] = {
        "tokens": "tokens",
        "steps": "steps",
        "windows": "windows",
        "drafted_tokens": "drafted",
        "accepted_tokens": "accepted",
    }
    return sums.total(names[name], gamma)


def _loop(session: Session, now: float) -> Iterator[Metric]:
    counted = counter("driftwatch_samples", "Samples by how they ended.", ("segment", "outcome"))
    reasons = counter("driftwatch_samples_unjudged", "Samples that were not judged, and why.", ("outcome", "reason"))
    refused = counter("driftwatch_live_refused", "Requests whose engine figures went into no cell.", ("reason",))
    ended = select(Outcome.segment, Outcome.outcome, func.sum(Outcome.samples)).where(Outcome.outcome != REFUSED)
    for row in session.execute(ended.group_by(Outcome.segment, Outcome.outcome)):
        counted.add_metric((row[0], row[1]), row[2])
    unjudged = select(Outcome.outcome, Outcome.reason, func.sum(Outcome.samples)).where(Outcome.reason != "")
    for row in session.execute(unjudged.group_by(Outcome.outcome, Outcome.reason)):
        if row[0] == REFUSED:
            refused.add_metric((row[1],), row[2])
        else:
            reasons.add_metric((row[0], row[1]), row[2])
    waiting, oldest = samples.waiting(session)
    depth = gauge("driftwatch_queue_depth", "Entries waiting in a queue.", ("queue",))
    depth.add_metric(("work",), waiting)
    lag = gauge("driftwatch_shadow_lag_seconds", "Age of the oldest sample that waits for its replay.", ())
    lag.add_metric((), max(0.0, now - oldest) if oldest is not None else 0.0)
    deliveries = counter("driftwatch_webhook_deliveries", "Webhook deliveries by how they ended.", ("outcome",))
    counts = outbox.counts(session)
    for outcome in ("delivered", "dead"):
        deliveries.add_metric((outcome,), counts.get(outcome, 0))
    depth.add_metric(("webhooks",), counts.get("pending", 0))
    yield from (counted, reasons, refused, depth, lag, deliveries)


def _deployments(cells: list[CellReport]) -> Metric:
    keys = sorted({key for report in cells for key in report.deployment.facts} - {"deployment", "model"})
    family = gauge("driftwatch_deployment_info", "Known facts of each deployment.", ("deployment", "model", *keys))
    for deployment in {report.deployment.id: report.deployment for report in cells}.values():
        facts = [str(deployment.facts.get(key, "")) for key in keys]
        family.add_metric((str(deployment.id), deployment.model, *facts), 1.0)
    return family
