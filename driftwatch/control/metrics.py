"""Control's metrics, read from the store on each scrape: what is stored is what is exported, after a restart too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from driftwatch.control import reports
from driftwatch.control.judge import REFUSED
from driftwatch.control.reports import CellReport
from driftwatch.drift.sums import Figure
from driftwatch.store import outbox, samples
from driftwatch.store.connection import Store
from driftwatch.store.schema import Outcome

CELL = ("model", "draft", "segment", "split")
LIVE_CELL = ("model", "draft", "segment")
STATES = ("learning", "watching", "drifting")

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
GAUGES: dict[Figure, str] = {
    "acceptance_length": "Tokens per window over the last 24 hours, bonus included.",
    "hit_rate": "Accepted over tested proposals, last 24 hours.",
}
LIVE_GAUGES: dict[Figure, str] = GAUGES | {"acceptance_rate": "Accepted over drafted proposals, last 24 hours."}


def registry(store: Store) -> CollectorRegistry:
    """A registry of its own; nothing global is touched."""
    own = CollectorRegistry(auto_describe=False)
    own.register(StoreCollector(store))
    return own


class StoreCollector(Collector):
    """Raises StoreError on a scrape while the store is away: no figures rather than stale ones."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        now = time.time()
        with self._store.read() as session:
            cells = list(reports.cells(session, now))
            shadow = [report for report in cells if report.cell.channel == "shadow"]
            live = [report for report in cells if report.cell.channel == "live"]
            yield from _counters(shadow)
            yield from _live_counters(live)
            yield from _judgement(shadow, GAUGES, "driftwatch_")
            yield from _judgement(live, LIVE_GAUGES, "driftwatch_live_")
            yield from _loop(session, now)
            yield _deployments(cells)


def _labels(report: CellReport) -> tuple[str, ...]:
    """The engine knows no split."""
    labels = report.deployment.model, report.cell.draft, report.cell.segment
    return labels if report.cell.channel == "live" else (*labels, report.cell.split)


def _counters(cells: list[CellReport]) -> Iterator[Metric]:
    """Counts at the configured gamma, of what was judged and weighted to all traffic, over all deployments."""
    plain = {name: _counter(f"driftwatch_shadow_{name}", text, CELL) for name, text in COUNTERS.items()}
    weighted = {
        name: _counter(f"driftwatch_estimated_{name}", f"{text} Weighted to all traffic.", CELL)
        for name, text in COUNTERS.items()
    }
    depth = (*CELL, "depth")
    plain_at = _counter("driftwatch_shadow_accepted_at_depth", "Windows in which this depth was accepted.", depth)
    weighted_at = _counter(
        "driftwatch_estimated_accepted_at_depth", "Windows in which this depth was accepted, weighted.", depth
    )
    for labels, group in _by_labels(cells).items():
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
    counters = {name: _counter(f"driftwatch_live_{name}", text, LIVE_CELL) for name, text in LIVE_COUNTERS.items()}
    text = "Windows in which this depth was accepted."
    at = _counter("driftwatch_live_accepted_at_depth", text, (*LIVE_CELL, "depth"))
    for labels, group in _by_labels(cells).items():
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


def _by_labels(cells: list[CellReport]) -> dict[tuple[str, ...], list[CellReport]]:
    groups: dict[tuple[str, ...], list[CellReport]] = {}
    for report in cells:
        groups.setdefault(_labels(report), []).append(report)
    return groups


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


def _judgement(cells: list[CellReport], gauges: dict[Figure, str], prefix: str) -> Iterator[Metric]:
    """Gauges of the newest deployment of each cell; one without enough data is absent, never zero."""
    names = LIVE_CELL if gauges is LIVE_GAUGES else CELL
    newest = [
        max(group, key=lambda report: (report.cell.deployment_id, report.cell.id))
        for group in _by_labels(cells).values()
    ]
    for name, text in gauges.items():
        for suffix, part in (("", "value"), ("_lower", "lower"), ("_upper", "upper")):
            family = _gauge(f"{prefix}{name}{suffix}", text if not suffix else f"{text} 95% limit.", names)
            for report in newest:
                value = getattr(report.estimate(name), part)
                if value is not None:
                    family.add_metric(_labels(report), value)
            yield family
    evidence = _gauge(f"{prefix}drift_evidence_ratio", "Evidence of a fall, log M / log A: 1 is an alarm.", names)
    active = _gauge(f"{prefix}drift_active", "1 while a drift event is open.", (*names, "kind", "cause"))
    states = _gauge(f"{prefix}baseline_state", "1 for the state that the cell is in.", (*names, "state"))
    for report in newest:
        labels = _labels(report)
        evidence.add_metric(labels, report.state.evidence_ratio)
        event = report.open_event
        active.add_metric((*labels, "drift", event.cause if event else "none"), 1.0 if event else 0.0)
        for state in STATES:
            states.add_metric((*labels, state), float(report.state.state == state))
    yield from (evidence, active, states)


def _loop(session: Session, now: float) -> Iterator[Metric]:
    counted = _counter("driftwatch_samples", "Samples by how they ended.", ("segment", "outcome"))
    reasons = _counter("driftwatch_samples_unjudged", "Samples that were not judged, and why.", ("outcome", "reason"))
    refused = _counter("driftwatch_live_refused", "Requests whose engine figures went into no cell.", ("reason",))
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
    depth = _gauge("driftwatch_queue_depth", "Entries waiting in a queue.", ("queue",))
    depth.add_metric(("work",), waiting)
    lag = _gauge("driftwatch_shadow_lag_seconds", "Age of the oldest sample that waits for its replay.", ())
    lag.add_metric((), max(0.0, now - oldest) if oldest is not None else 0.0)
    deliveries = _counter("driftwatch_webhook_deliveries", "Webhook deliveries by how they ended.", ("outcome",))
    counts = outbox.counts(session)
    for outcome in ("delivered", "dead"):
        deliveries.add_metric((outcome,), counts.get(outcome, 0))
    depth.add_metric(("webhooks",), counts.get("pending", 0))
    yield from (counted, reasons, refused, depth, lag, deliveries)


def _deployments(cells: list[CellReport]) -> Metric:
    keys = sorted({key for report in cells for key in report.deployment.facts} - {"deployment", "model"})
    family = _gauge("driftwatch_deployment_info", "Known facts of each deployment.", ("deployment", "model", *keys))
    for deployment in {report.deployment.id: report.deployment for report in cells}.values():
        facts = [str(deployment.facts.get(key, "")) for key in keys]
        family.add_metric((str(deployment.id), deployment.model, *facts), 1.0)
    return family


def _counter(name: str, text: str, labels: Sequence[str]) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=labels)


def _gauge(name: str, text: str, labels: Sequence[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)
