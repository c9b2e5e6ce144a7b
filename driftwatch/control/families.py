"""Metric families and the labels of a cell: shared by the modules that export figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from driftwatch.control.reports import CellReport

CELL = ("model", "draft", "segment", "split")
LIVE_CELL = ("model", "draft", "segment")
DRAFT = ("model", "draft")


def labels_of(report: CellReport) -> tuple[str, ...]:
    """The engine knows no split."""
    labels = report.deployment.model, report.cell.draft, report.cell.segment
    return labels if report.cell.channel == "live" else (*labels, report.cell.split)


def by_labels(cells: Iterable[CellReport]) -> dict[tuple[str, ...], list[CellReport]]:
    groups: dict[tuple[str, ...], list[CellReport]] = {}
    for report in cells:
        groups.setdefault(labels_of(report), []).append(report)
    return groups


def counter(name: str, text: str, labels: Sequence[str]) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=labels)


def gauge(name: str, text: str, labels: Sequence[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def add_limits(
    families: Sequence[GaugeMetricFamily], labels: Sequence[str], value: float | None, *limits: float | None
) -> None:
    """Add a value and its limits to a family each; what is not known is absent."""
    for family, number in zip(families, (value, *limits), strict=True):
        if number is not None:
            family.add_metric(labels, number)


def with_limits(name: str, text: str, labels: Sequence[str]) -> tuple[GaugeMetricFamily, ...]:
    """A gauge, with its lower and its upper 95% limit."""
    limits = (gauge(f"{name}_{side}", f"{text} 95% limit.", labels) for side in ("lower", "upper"))
    return gauge(name, text, labels), *limits


def quantiles(name: str, text: str, labels: Sequence[str]) -> tuple[GaugeMetricFamily, ...]:
    """The same by quantile of requests. A summary without count: the label ``quantile`` belongs to that type."""
    families = with_limits(name, text, (*labels, "quantile"))
    for family in families:
        family.type = "summary"
    return families
