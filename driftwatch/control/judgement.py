"""The gauges of what is judged: figures with their limits, evidence, open events; what users wait for, prompt lookup.

Those of cells are of the deployment in use. What is not known, or rests on too few requests, is absent and never zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client.core import Metric

from driftwatch.control.families import (
    CELL,
    DRAFT,
    LIVE_CELL,
    add_limits,
    by_labels,
    gauge,
    labels_of,
    quantiles,
    with_limits,
)
from driftwatch.control.reports import QUANTILES, CellReport
from driftwatch.control.slo import State, Verdict, window_name
from driftwatch.control.untrained import Untrained
from driftwatch.control.value import CellValue
from driftwatch.control.watched import MonitorReport, off_share
from driftwatch.drift.sums import Figure

STATES = ("learning", "watching", "drifting")

GAUGES: dict[Figure, str] = {
    "acceptance_length": "Tokens per window over the last 24 hours, bonus included.",
    "hit_rate": "Accepted over tested proposals, last 24 hours.",
}
LIVE_GAUGES: dict[Figure, str] = GAUGES | {"acceptance_rate": "Accepted over drafted proposals, last 24 hours."}


Values = Mapping[int, CellValue]
"""By the ids of cells."""


def shadow(cells: Sequence[CellReport], monitors: Sequence[MonitorReport], values: Values) -> Iterator[Metric]:
    """Of replays."""
    newest = _newest(cells)
    mine = [report for report in monitors if report.row.channel == "shadow"]
    yield from _figures(newest, GAUGES, "driftwatch_", CELL)
    yield from _tests(newest, mine, "driftwatch_", CELL)
    yield from _value(newest, values, "driftwatch_", CELL)
    yield from _off_distribution(newest)


def live(cells: Sequence[CellReport], monitors: Sequence[MonitorReport], values: Values) -> Iterator[Metric]:
    """Of what engines report."""
    newest = _newest(cells)
    mine = [report for report in monitors if report.row.channel == "live"]
    yield from _figures(newest, LIVE_GAUGES, "driftwatch_live_", LIVE_CELL)
    yield from _tests(newest, mine, "driftwatch_live_", LIVE_CELL)
    yield from _value(newest, values, "driftwatch_live_", LIVE_CELL)


def untrained(found: Iterable[Untrained]) -> Iterator[Metric]:
    """The differences, by the prompt-lookup draft that stands beside the incumbent."""
    text = "Decode time with prompt lookup less that with the trained draft, as a share of the plain time."
    families = with_limits("driftwatch_untrained_time_difference_ratio", text, LIVE_CELL)
    for one in found:
        more = one.difference
        add_limits(families, (one.model, one.draft, one.segment), more.value, more.lower, more.upper)
    yield from families


def slo(found: Sequence[Verdict]) -> Iterator[Metric]:
    """For alerts on the limits that are set, where the rules' own have other limits."""
    limit = gauge("driftwatch_slo_limit_seconds", "Limit that a share of requests may exceed.", ("figure",))
    budget = gauge("driftwatch_slo_budget_ratio", "That share.", ("figure",))
    text = "Share of requests over the limit, in budgets."
    burn = gauge("driftwatch_slo_burn_rate", text, ("segment", "figure", "window"))
    state = gauge("driftwatch_slo_state", "1 for the state that the limit is in.", ("segment", "figure", "state"))
    for figure, one in {one.figure: one for one in found}.items():
        limit.add_metric((figure,), one.limit_s)
        budget.add_metric((figure,), one.share)
    for one in found:
        for seconds, rate in one.burn_rates.items():
            burn.add_metric((one.segment, one.figure, window_name(seconds)), rate)
        for name in get_args(State):
            state.add_metric((one.segment, one.figure, name.replace(" ", "_")), float(one.state == name))
    yield from (limit, budget, burn, state)


def _newest(cells: Sequence[CellReport]) -> list[CellReport]:
    groups = by_labels(cells).values()
    return [max(group, key=lambda report: report.order) for group in groups]


def _figures(cells: list[CellReport], gauges: dict[Figure, str], prefix: str, names: Sequence[str]) -> Iterator[Metric]:
    for name, text in gauges.items():
        families = with_limits(f"{prefix}{name}", text, names)
        for report in cells:
            found = report.estimate(name)
            add_limits(families, labels_of(report), found.value, found.lower, found.upper)
        yield from families
    text = "Steps per judged token of requests that are long enough, last 24 hours."
    families = quantiles(f"{prefix}steps_per_token", text, names)
    left_out = gauge(f"{prefix}steps_per_token_left_out_ratio", "Share of requests too short to count there.", names)
    for report in cells:
        for q in QUANTILES:
            at = report.tail.quantile(q)
            add_limits(families, (*labels_of(report), f"{q:g}"), at.value, at.lower, at.upper)
        if report.tail.left_out is not None:
            left_out.add_metric(labels_of(report), report.tail.left_out)
    yield from (*families, left_out)


def _tests(
    cells: list[CellReport], monitors: list[MonitorReport], prefix: str, names: Sequence[str]
) -> Iterator[Metric]:
    """Evidence and open events, by kind: ``drift`` is the test of each cell, the others are over all splits."""
    text = "Evidence of a test, log M / log A: 1 is an alarm."
    evidence = gauge(f"{prefix}drift_evidence_ratio", text, (*names, "kind"))
    active = gauge(f"{prefix}drift_active", "1 while an event is open.", (*names, "kind", "cause"))
    states = gauge(f"{prefix}baseline_state", "1 for the state that the cell is in.", (*names, "state"))
    floor = gauge(f"{prefix}baseline_floor", "Mean below which the watched figure is drift.", names)
    normal = gauge(f"{prefix}baseline_hit_rate", "Hit rate that was frozen as normal.", names)
    for report in cells:
        labels = labels_of(report)
        evidence.add_metric((*labels, "drift"), report.state.evidence_ratio)
        event = report.open_event
        active.add_metric((*labels, "drift", event.cause if event else "none"), float(event is not None))
        for state in STATES:
            states.add_metric((*labels, state), float(report.state.state == state))
        if report.state.detector is not None:
            floor.add_metric(labels, report.state.detector.floor)
            if report.metric == "hit_rate":
                add_limits((normal,), labels, report.state.baseline.estimate.value)
    shown = set()
    for monitor in monitors:
        labels = monitor.labels if names == LIVE_CELL else (*monitor.labels, "none")
        evidence.add_metric((*labels, monitor.watch.terms.kind), monitor.watch.evidence_ratio)
        key = (*labels, monitor.event_kind)
        if key not in shown:  # two tests may share a kind of event
            shown.add(key)
            cause = monitor.open_event.cause if monitor.open_event else "none"
            active.add_metric((*key, cause), float(monitor.open_event is not None))
    yield from (evidence, active, states, floor, normal)


def _value(cells: list[CellReport], values: Values, prefix: str, names: Sequence[str]) -> Iterator[Metric]:
    """What speculation is worth, of cells whose costs are known."""
    even = gauge(f"{prefix}break_even_acceptance_length", "Acceptance length below which speculation costs.", names)
    speedup = with_limits(f"{prefix}speedup_ratio", "Plain decode time over that with speculation.", names)
    whole = with_limits(f"{prefix}end_to_end_speedup_ratio", "The same of whole requests, prefill included.", names)
    slower = with_limits(f"{prefix}slower_requests_ratio", "Share of requests that speculation makes slower.", names)
    text = "Predicted time per output token over that of plain decoding, of single requests."
    times = quantiles(f"{prefix}token_time_ratio", text, names)
    length = gauge(f"{prefix}best_gamma", "Proposal length with the largest speedup; 0: none pays.", names)
    more = gauge(f"{prefix}best_gamma_gain_ratio", "What it would gain over the present one.", names)
    batch = gauge(f"{prefix}batch", "Requests that decode together, as value is judged.", (*names, "origin"))
    text = "Cost of a million output tokens at that batch; added_gpus: plain, at the latency of speculation."
    cost = gauge(f"{prefix}cost_per_million_tokens", text, (*names, "mode"))
    for report in cells:
        if (value := values.get(report.cell.id)) is None:
            continue
        labels = labels_of(report)
        even.add_metric(labels, value.current.break_even)
        batch.add_metric((*labels, value.load.origin), value.load.batch)
        for families, found in ((speedup, value.speedup), (whole, value.end_to_end), (slower, value.tail.slower)):
            add_limits(families, labels, found.value, found.lower, found.upper)
        for q, at in value.tail.relative.items():
            add_limits(times, (*labels, f"{q:g}"), at.value, at.lower, at.upper)
        add_limits((length,), labels, value.best_gamma)
        add_limits((more,), labels, value.gain)
        if (price := value.price) is not None:
            modes = {"plain": price.plain, "speculative": price.speculative.value, "added_gpus": price.added}
            for mode, amount in modes.items():
                add_limits((cost,), (*labels, mode), amount)
    yield from (even, *speedup, *whole, *slower, *times, length, more, batch, cost)


def _off_distribution(cells: list[CellReport]) -> Iterator[Metric]:
    """By segment, and over all of them, weighted to all traffic: no sum over the first gives the second."""
    text = "Share of requests off the draft's training distribution, last 24 hours"
    for name, told, names in (("off", f"{text}.", LIVE_CELL), ("overall_off", f"{text}, all segments.", DRAFT)):
        families = with_limits(f"driftwatch_{name}_distribution_ratio", told, names)
        groups: dict[tuple[str, ...], list[CellReport]] = {}
        for report in cells:
            groups.setdefault(labels_of(report)[: len(names)], []).append(report)
        for labels, group in groups.items():
            found = off_share(group)
            add_limits(families, labels, found.value, found.lower, found.upper)
        yield from families
