"""A segment's own page: each of its cells over time, against what is normal and what pays, and what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control import reports, slo, untrained, watched
from driftwatch.control.page import hours
from driftwatch.control.page.cells import Line, baseline_of, floor_of, lines, most
from driftwatch.control.page.hours import HOUR_S, Hour
from driftwatch.control.page.plot import Period, Stretch, over_time
from driftwatch.control.page.words import kind
from driftwatch.control.reports import CellReport
from driftwatch.control.untrained import Untrained
from driftwatch.control.watched import MonitorReport
from driftwatch.drift.sums import Figure
from driftwatch.settings import Settings
from driftwatch.store.schema import Event, Segment

MOST_HOURS = 14 * 24
LEAST_HOURS = 6
"""Of the axis: longer than a fortnight nobody sees an hour, shorter than this there is nothing to see."""
EVENTS = 100


@dataclass(frozen=True)
class Plot:
    title: str
    figure: Figure
    drawing: Markup
    even: bool
    """Whether break-even is drawn."""
    baseline: bool
    floor: bool


@dataclass(frozen=True)
class Panel:
    """One line of cells with its plots, and the hours behind them, newest first."""

    line: Line
    plots: list[Plot]
    hours: list[Hour]


@dataclass(frozen=True)
class SegmentPage:
    id: str
    panels: list[Panel]
    tests: list[MonitorReport]
    untrained: list[Untrained]
    """Prompt lookup beside the trained draft."""
    waits: list[slo.Verdict]
    """What users wait for, against the limits that are set."""
    events: Sequence[Event]


def segment_page(session: Session, settings: Settings, id: str, now: float) -> SegmentPage | None:
    """All that is known of a segment; None if there is none of that id."""
    cells = list(reports.cells(session, now, id))
    found = lines(cells, settings)
    if not found and session.get(Segment, id) is None:
        return None
    mine = select(Event).where(Event.segment == id).order_by(Event.opened_at.desc(), Event.id).limit(EVENTS)
    events = session.scalars(mine).all()
    panels = [_panel(session, line, events, now) for line in found]
    return SegmentPage(
        id,
        panels,
        list(watched.monitors(session, id)),
        list(untrained.beside(session, settings, id, cells)),
        slo.verdicts(session, settings.slo, now, id),
        events,
    )


def _panel(session: Session, line: Line, events: Sequence[Event], now: float) -> Panel:
    """Earlier cells are drawn as far as they watch the same at the same proposal length."""
    newest = line.report
    alike = [one for one in line.earlier if (one.metric, one.cell.gamma) == (line.metric, newest.cell.gamma)]
    cells = [*alike, newest]
    names = sorted({line.metric, "acceptance_length"})
    found = hours.by_cell(session, cells, names, (now // HOUR_S - MOST_HOURS + 1) * HOUR_S)
    starts = [hour.start_s for group in found.values() for hour in group]
    until = (now // HOUR_S + 1) * HOUR_S
    since = min([until - LEAST_HOURS * HOUR_S, *starts])
    same = [one for one in events if one.cell_id in found and one.draft == newest.cell.draft]
    periods = [Period(_began(one), one.closed_at, kind(one.kind)) for one in same]
    plots = [_plot(line, name, cells, found, since, until, periods) for name in names]
    return Panel(line, plots, found[newest.cell.id][::-1])


def _began(event: Event) -> float:
    """Where the change seems to have begun, where that is known: an alarm comes later."""
    began = event.details.get("start_served_at")
    return min(float(began), event.opened_at) if began is not None else event.opened_at


def _plot(
    line: Line,
    figure: Figure,
    cells: Sequence[CellReport],
    found: dict[int, list[Hour]],
    since: float,
    until: float,
    periods: Sequence[Period],
) -> Plot:
    length = figure == "acceptance_length"
    normal = figure == line.metric
    stretches = [
        Stretch(
            [(hour.start_s, hour.figures[figure]) for hour in found[report.cell.id]],
            baseline_of(report) if normal else None,
            floor_of(report) if normal else None,
        )
        for report in cells
    ]
    title = (
        "Acceptance length (tokens a window, bonus included)" if length else f"{figure.replace('_', ' ').capitalize()}"
    )
    drawing = over_time(
        title,
        stretches,
        since=since,
        until=until,
        low=1.0 if length else 0.0,
        high=most(figure, line.report.cell.gamma),
        even=line.break_even if length else None,
        periods=periods,
    )
    return Plot(
        title,
        figure,
        drawing,
        length and line.break_even is not None,
        any(one.baseline is not None for one in stretches),
        any(one.floor is not None for one in stretches),
    )
