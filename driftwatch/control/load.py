"""What the load has to do with an event of value: whether batches grew with it, and whether any proposal pays there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control import conditions, costs
from driftwatch.control.conditions import Conditions
from driftwatch.control.terms import fitted
from driftwatch.control.value import rate_at
from driftwatch.drift.sums import Sums
from driftwatch.economics.value import of_sums
from driftwatch.settings import Model
from driftwatch.store.schema import Cell, CellHour, Event

KINDS = ("below_break_even", "slower", "tail_worse")
"""Kinds of event that a load may be behind."""

BEFORE_HOURS = 7 * 24
"""Hours before an event that it is compared with."""


@dataclass(frozen=True)
class Burden:
    """None is unknown."""

    load_up: bool | None = None
    below_cost_at_one: bool | None = None


def behind(session: Session, event: Event, cells: Sequence[Cell], model: Model) -> Burden:
    """Of an event and the cells of its segment: requests of the hours since it began beside those of the week before.

    The load is up where the 95% interval of the median batch since lies above that of before.
    """
    if event.kind not in KINDS or not cells:
        return Burden()
    start = int((event.details.get("start_served_at") or event.opened_at) // 3600)
    hours = select(CellHour).where(CellHour.cell_id.in_([cell.id for cell in cells]))
    rows = session.scalars(hours.where(CellHour.hour >= start - BEFORE_HOURS)).all()
    before, since = Conditions(), Conditions()
    for row in rows:
        if row.hour < start:
            before += conditions.read(row.sums)
        else:
            since += conditions.read(row.sums)
    late = [row for row in rows if row.hour >= start]
    return Burden(_up(before, since), _loses_at_one(event, cells, late, since, model))


def _up(before: Conditions, since: Conditions) -> bool | None:
    usual, now = before.running.quantile(0.5), since.running.quantile(0.5)
    if usual.upper is None or now.lower is None:
        return None
    return now.lower > usual.upper


def _loses_at_one(
    event: Event, cells: Sequence[Cell], hours: Sequence[CellHour], since: Conditions, model: Model
) -> bool | None:
    """Whether even one proposal a window loses, by the limits of its speedup at this arrival rate."""
    cost = costs.of(model, event.draft)
    median = since.running.quantile(0.5).value
    batch = model.batch or median
    channels = {cell.channel for cell in cells}
    if cost is None or cost.profile is None or batch is None or channels != {"shadow"}:
        return None
    parts = [Sums.from_json(row.sums) for row in hours]
    gammas = max((part.gammas for part in parts), default=1)
    sums = sum((fitted(part, gammas, "shadow") for part in parts), Sums.zero(gammas))
    context = since.context if cost.profile.timings else None
    gamma = cells[0].gamma
    found = {one.gamma: one for one in of_sums(sums, cost.profile, batch=batch, context=context, gammas={1, gamma})}
    if not found.keys() >= {1, gamma}:
        return None
    one, tokens = found[1], sums.tokens / sums.requests
    if (rate := rate_at(found[gamma], cost, batch, tokens, context)) is not None:
        one = one.under(cost.profile, rate=rate, tokens=tokens, context=context)
    return None if one.judged.upper is None else one.judged.upper < 1.0
