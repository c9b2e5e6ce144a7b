"""Control's metrics, read from the store on each scrape: what is stored is what is exported, after a restart too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from driftwatch.control import judgement, reports, slo, value, watched
from driftwatch.control.counters import NAMES, Counters
from driftwatch.control.families import CELL, LIVE_CELL, by_labels, counter, gauge
from driftwatch.control.judge import REFUSED
from driftwatch.control.leader import Leader
from driftwatch.control.looks import Looks
from driftwatch.control.reports import CellReport
from driftwatch.drift.sums import Figure
from driftwatch.settings import Settings
from driftwatch.store import outbox, samples
from driftwatch.store.connection import Store
from driftwatch.store.samples import DAY, OTHER
from driftwatch.store.schema import Outcome, Segment

COUNTERS = {
    "requests": "Requests replayed.",
    "tokens": "Output tokens judged: all but the first of each request.",
    "steps": "Passes of the target after prefill.",
    "windows": "Steps with at least one proposal.",
    "drafted_tokens": "Proposals made.",
    "accepted_tokens": "Proposals that the target accepted, bonus tokens left out.",
    "rejected_tokens": "Proposals that the target tested and refused.",
}
SAMPLES = (
    "At control: samples stored, and their replays by how they ended, one for each draft. A tap's series of this name"
    " is about exchanges before they are sent."
)
LIVE_COUNTERS = {
    "requests": "Requests whose own figures the engine gave.",
    "tokens": "Output tokens of those requests: all but the first of each.",
    "steps": "Passes of the target after prefill.",
    "windows": "Steps with at least one proposal.",
    "drafted_tokens": "Proposals made, as the engine counts them.",
    "accepted_tokens": "Proposals accepted, as the engine counts them: behind the last served token too.",
    "rejected_tokens": "Proposals tested and refused, where the engine says enough to know.",
}


def registry(
    store: Store, settings: Settings, leader: Leader | None = None, looks: Looks | None = None
) -> CollectorRegistry:
    """A registry of its own; nothing global is touched."""
    leader = leader or Leader(store)
    own = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=own)
    leads = Gauge("driftwatch_leader", "1 on the control that judges, decides and delivers, 0 on others.", registry=own)
    leads.set_function(lambda: float(leader.leads))
    own.register(StoreCollector(store, settings, leader, looks or Looks(settings)))
    return own


class StoreCollector(Collector):
    """Raises StoreError on a scrape while the store is away: no figures rather than stale ones.

    Only the leader tells them: they are the same everywhere, and would be summed over all controls.
    """

    def __init__(self, store: Store, settings: Settings, leader: Leader, looks: Looks) -> None:
        self._store = store
        self._settings = settings
        self._leader = leader
        self._looks = looks

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        if not self._leader.leads:
            return
        now = time.time()
        with self._store.read() as session:
            kept_since = now - self._settings.retention.replay_days * DAY  # what is older has left the store too
            cells = list(reports.cells(session, now, heard_since=kept_since))
            shadow = [report for report in cells if report.cell.channel == "shadow"]
            live = [report for report in cells if report.cell.channel == "live"]
            yield from _counters(shadow)
            yield from _live_counters(live)
            monitors = list(watched.monitors(session, heard_since=kept_since))
            values = value.judge(cells, self._settings)
            yield from judgement.shadow(shadow, monitors, values)
            yield from judgement.live(live, monitors, values)
            looked = self._looks.over(session, cells, now).values()
            yield from judgement.untrained(one for found in looked for one in found)
            yield from judgement.slo(slo.verdicts(session, self._settings.slo, now))
            yield from _loop(session, now)
            yield _deployments([report for report in cells if report.deployment.last_seen >= kept_since])


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
        total = sum((report.counters for report in group), Counters.zero())
        for families, at, row in ((plain, plain_at, 0), (weighted, weighted_at, 1)):
            for name, count in zip(NAMES, total.counts[row], strict=True):
                families[name].add_metric(labels, count)
            for d, count in enumerate(total.depths[row]):
                at.add_metric((*labels, str(d)), count)
    yield from (*plain.values(), *weighted.values(), plain_at, weighted_at)


def _live_counters(cells: list[CellReport]) -> Iterator[Metric]:
    """The engine's own counts over all deployments; what it does not say is absent."""
    known: dict[str, Figure] = {"drafted_tokens": "acceptance_rate", "rejected_tokens": "hit_rate"}
    families = {name: counter(f"driftwatch_live_{name}", text, LIVE_CELL) for name, text in LIVE_COUNTERS.items()}
    text = "Windows in which this depth was accepted."
    at = counter("driftwatch_live_accepted_at_depth", text, (*LIVE_CELL, "depth"))
    for labels, group in by_labels(cells).items():
        for i, name in enumerate(NAMES):
            telling = [report for report in group if report.gives(known.get(name, "steps_per_token"))]
            if telling:
                families[name].add_metric(labels, sum(report.counters.counts[0, i] for report in telling))
        telling = [report for report in group if report.gives("hit_rate")]
        total = sum((report.counters for report in telling), Counters.zero())
        for d, count in enumerate(total.depths[0]):
            at.add_metric((*labels, str(d)), count)
    yield from (*families.values(), at)


def _loop(session: Session, now: float) -> Iterator[Metric]:
    counted = counter("driftwatch_samples", SAMPLES, ("segment", "outcome"))
    reasons = counter("driftwatch_samples_unjudged", "Samples that were not judged, and why.", ("outcome", "reason"))
    refused = counter("driftwatch_live_refused", "Requests whose engine figures went into no cell.", ("reason",))
    kept = or_(Outcome.segment == OTHER, Outcome.segment.in_(select(Segment.id)))  # a freed segment leaves
    ended = select(Outcome.segment, Outcome.outcome, func.sum(Outcome.samples)).where(Outcome.outcome != REFUSED, kept)
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
    text = "Webhook deliveries that ended so; dead: given up, once more for each time that it is sent again in vain."
    deliveries = counter("driftwatch_webhook_deliveries", text, ("outcome",))
    counts = outbox.counts(session)
    deliveries.add_metric(("delivered",), counts.get("delivered", 0))
    deliveries.add_metric(("dead",), outbox.given_up(session))
    dead = gauge("driftwatch_webhook_dead_letters", "Webhook deliveries that are dead now.", ())
    dead.add_metric((), counts.get("dead", 0))
    depth.add_metric(("webhooks",), counts.get("pending", 0))
    yield from (counted, reasons, refused, depth, lag, deliveries, dead)


def _deployments(cells: list[CellReport]) -> Metric:
    keys = sorted({key for report in cells for key in report.deployment.facts} - {"deployment", "model"})
    family = gauge("driftwatch_deployment_info", "Known facts of each deployment.", ("deployment", "model", *keys))
    for deployment in {report.deployment.id: report.deployment for report in cells}.values():
        facts = [str(deployment.facts.get(key, "")) for key in keys]
        family.add_metric((str(deployment.id), deployment.model, *facts), 1.0)
    return family
