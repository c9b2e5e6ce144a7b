"""What moved a draft's pooled hit rate: the mix of its cells, or the rates within them. From the roll-ups by hour.

Before is the hours until the first cell knew what is normal, after the last 24 hours behind those. The unit of the
intervals is the hour: requests of one hour share what makes them easy or hard, and hours are what outlives the samples.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from driftwatch.control import reports
from driftwatch.drift.decompose import Row, bootstrap
from driftwatch.drift.sums import Sums
from driftwatch.store import deployments
from driftwatch.store.schema import Cell, CellHour, Deployment

SEED = 1955
DRAWS = 400


def split_of(session: Session, deployment_id: int, draft: str, now: float) -> dict[str, Any] | None:
    """Kitagawa's parts of the change, with its cells; None where a period has nothing, or no cell is in both."""
    cells = select(Cell).filter_by(deployment_id=deployment_id, draft=draft, channel="shadow")
    in_order = session.scalars(cells.order_by(Cell.updated_at, Cell.id))
    newest = {(cell.segment, cell.split): cell for cell in in_order}
    learnt = [_learnt(cell) for cell in newest.values()]
    ends = [end for end in learnt if end is not None]
    if not ends:
        return None
    border = min(ends)  # one period for all: what a cell learnt later on has no shares to compare
    since = max(border + 1, reports.since(now))
    before: list[Row] = []
    after: list[Row] = []
    for (segment, part), cell in newest.items():
        wanted = or_(CellHour.hour <= border, CellHour.hour >= since)
        hours = select(CellHour).where(CellHour.cell_id == cell.id, wanted).order_by(CellHour.hour)
        for hour in session.scalars(hours):
            sums = Sums.from_json(hour.sums).widened(cell.gamma)  # an hour under a smaller one has nothing to say
            tested = sums.total("tested", cell.gamma)
            row = Row(f"{segment}/{part}", hour.hour, sums.total("accepted", cell.gamma), tested)
            if tested:
                (before if hour.hour <= border else after).append(row)
    if not {row.cell for row in before} & {row.cell for row in after}:
        return None
    found = bootstrap(before, after, seed=SEED, draws=DRAWS)
    hours_of = {"before": len({row.unit for row in before}), "after": len({row.unit for row in after})}
    return {"figure": "hit_rate", "hours": hours_of} | asdict(found)


def every(session: Session, now: float) -> list[dict[str, Any]]:
    """The split of each model and draft, in the deployment in use; None while nothing of it was replayed."""
    replayed = (
        select(Cell.draft, Deployment.id, Deployment.model)
        .join(Deployment, Deployment.id == Cell.deployment_id)
        .where(Cell.channel == "shadow")
        .distinct()
    )
    began = deployments.since(session)
    rows = sorted(session.execute(replayed), key=lambda row: (began[row.id], row.id))
    newest = {(row.model, row.draft): row.id for row in rows}
    return [
        {"model": model, "draft": draft, "deployment": id, "split": split_of(session, id, draft, now)}
        for (model, draft), id in sorted(newest.items())
    ]


def _learnt(cell: Cell) -> int | None:
    """The last hour of its baseline; None while there is none."""
    baseline = cell.state["baseline"]
    if baseline["frozen"] is None or baseline["last_s"] is None:
        return None
    return int(baseline["last_s"] // 3600)
