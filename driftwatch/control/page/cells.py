"""Cells as the page shows them: the newest of each name, with those that it took over from, and what it is worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from driftwatch.control import value
from driftwatch.control.families import by_labels
from driftwatch.control.reports import CellReport
from driftwatch.control.value import CellValue
from driftwatch.drift.interval import Estimate
from driftwatch.drift.sums import Figure
from driftwatch.settings import Settings

Tone = Literal["good", "bad", "open"]


@dataclass(frozen=True)
class Line:
    """One name (model, draft, segment, split, channel): its newest cell, and the earlier ones, oldest first."""

    report: CellReport
    earlier: tuple[CellReport, ...]
    value: CellValue | None
    """None where costs are not known."""

    @property
    def name(self) -> str:
        """Whose figures they are."""
        cell = self.report.cell
        split = {"on": ", on its training distribution", "off": ", off its training distribution"}.get(cell.split, "")
        return f"{cell.draft}{split}" if cell.channel == "shadow" else f"{cell.draft}, as the engine reports"

    @property
    def metric(self) -> Figure:
        """What the detector watches."""
        return self.report.metric

    @property
    def watched(self) -> Estimate:
        return self.report.estimate(self.metric)

    @property
    def length(self) -> Estimate:
        return self.report.estimate("acceptance_length")

    @property
    def baseline(self) -> float | None:
        """What is normal, on the scale of ``watched``; None while it is learnt."""
        return baseline_of(self.report)

    @property
    def break_even(self) -> float | None:
        """Acceptance length at which speculation costs what it saves, at today's load."""
        return None if self.value is None else self.value.current.break_even

    @property
    def pays(self) -> tuple[Tone, str]:
        """The verdict on the last 24 hours; by the limits of the speedup where costs are one number."""
        if self.value is None:
            return "open", "costs not set"
        verdict, speedup = self.value.verdict, self.value.speedup
        if verdict is not None:
            decision, gamma = verdict.decision, verdict.gamma
        elif speedup.lower is not None and speedup.lower > 1.0:
            decision, gamma = "use", None
        else:
            lost = speedup.upper is not None and speedup.upper < 1.0
            decision, gamma = "do_not_use" if lost else "not_enough_data", None
        if decision == "do_not_use":
            return "bad", "does not pay"
        if decision == "not_enough_data":
            return "open", "not enough data"
        if self.report.state.state == "drifting":  # what those hours show is over
            return "open", "paid over 24 hours"
        return "good", "pays" if decision == "use" else f"pays with {gamma} proposals"

    @property
    def high(self) -> float:
        """The most that the watched figure can be."""
        return most(self.metric, self.report.cell.gamma)


def lines(reports: Iterable[CellReport], settings: Settings) -> list[Line]:
    """In the order of the reports, which is by segment."""
    reports = list(reports)
    values = value.judge(reports, settings)
    found = []
    for group in by_labels(reports).values():
        *earlier, newest = sorted(group, key=lambda report: report.order)
        found.append(Line(newest, tuple(earlier), values.get(newest.cell.id)))
    return found


def baseline_of(report: CellReport) -> float | None:
    return on_scale(report, report.state.baseline.estimate.value if report.state.baseline.lower is not None else None)


def floor_of(report: CellReport) -> float | None:
    """The level below which the detector gathers evidence."""
    return on_scale(report, None if report.state.detector is None else report.state.detector.floor)


def on_scale(report: CellReport, value: float | None) -> float | None:
    """Detectors watch shares: one of the acceptance length is (length - 1) / gamma (``terms.DEFINITIONS``)."""
    if value is None or report.metric != "acceptance_length":
        return value
    return 1.0 + report.cell.gamma * value


def most(figure: Figure, gamma: int) -> float:
    return 1.0 + gamma if figure == "acceptance_length" else 1.0


def by_segment(found: Sequence[Line]) -> dict[str, list[Line]]:
    segments: dict[str, list[Line]] = {}
    for line in found:
        segments.setdefault(line.report.cell.segment, []).append(line)
    return segments
