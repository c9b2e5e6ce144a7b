"""A cell hour by hour: the same sums and the same intervals as its figures of a day, cut smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control.reports import CellReport, gives
from driftwatch.control.terms import fitted
from driftwatch.drift.interval import Estimate
from driftwatch.drift.sums import Figure, Sums
from driftwatch.store.schema import Cell, CellHour

HOUR_S = 3600.0


@dataclass(frozen=True)
class Hour:
    """Figures of the requests served in one hour."""

    start_s: float
    requests: int
    figures: Mapping[Figure, Estimate]


def of(cell: Cell, hour: int, sums: Sums, figures: Sequence[Figure]) -> Hour:
    """What was counted in an hour since the epoch; a figure that is not known is left out."""
    known = {name: sums.interval(name, cell.gamma) for name in figures if gives(cell, name)}
    return Hour(hour * HOUR_S, sums.requests, known)


def by_cell(
    session: Session, reports: Sequence[CellReport], figures: Sequence[Figure], since_s: float
) -> dict[int, list[Hour]]:
    """Hours with requests from a time on, oldest first, by id of the cell."""
    mine = {report.cell.id: report for report in reports}
    found: dict[int, list[Hour]] = {id: [] for id in mine}
    rows = select(CellHour).where(CellHour.cell_id.in_(mine), CellHour.hour >= int(since_s // HOUR_S))
    for row in session.scalars(rows.order_by(CellHour.cell_id, CellHour.hour)):
        report = mine[row.cell_id]
        sums = fitted(Sums.from_json(row.sums), report.sums.gammas, report.cell.channel)
        found[row.cell_id].append(of(report.cell, row.hour, sums, figures))
    return found
