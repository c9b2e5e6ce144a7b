"""What is at stake in an event: the expected gain a day of having acceptance back, in the currency of the prices.

The requests before the change and those since are priced at the load that is seen (:mod:`driftwatch.control.value`);
the difference is paid for each output token that the event's cells had in the last 24 hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.orm import Session

from driftwatch.control import costs, reports, value
from driftwatch.control.cells import model_of
from driftwatch.control.conditions import Conditions
from driftwatch.control.reports import CellReport
from driftwatch.drift.sums import Sums
from driftwatch.economics.range import Range
from driftwatch.economics.stake import per_day
from driftwatch.retrain.evidence import Sides
from driftwatch.settings import Settings
from driftwatch.store.schema import Cell, Event

MOST = 300
"""Requests priced on each side: they are counted while the event's transaction is open."""


def at_stake(session: Session, settings: Settings, event: Event, now: float) -> dict[str, Any] | None:
    """The gain with its interval and what it was made of; None without a cost profile or a price, for an event of no
    cell, or where there is no request on one of the two sides."""
    cell = session.get(Cell, event.cell_id) if event.cell_id is not None else None
    if cell is None or settings.value.gpu_hour_price is None or not _is_profiled(session, settings, cell):
        return None
    cells = [one for one in reports.cells(session, now, event.segment) if _is_of(one.cell, cell, event)]
    sides = Sides.of(session, event, cell, most=MOST)
    before, since = (_price(cells, cell, sums, settings) for sums in sides.sums())
    tokens = sum(one.recent.total("tokens", cell.gamma) for one in cells)
    gain = per_day(before, since, tokens)
    if gain.value is None:
        return None
    return {
        "value": gain.value,
        "lower": gain.lower,
        "upper": gain.upper,
        "tokens_per_day": tokens,
        "per_million_tokens": {"before": before.to_json(), "now": since.to_json()},
        "requests": {"before": len(sides.before), "now": len(sides.since)},
    }


def _is_profiled(session: Session, settings: Settings, cell: Cell) -> bool:
    cost = costs.of(model_of(session, settings, cell.deployment_id), cell.draft)
    return cost is not None and cost.profile is not None


def _is_of(one: Cell, cell: Cell, event: Event) -> bool:
    """Whether a cell of the segment is the event's: that of its split, or any where it is of none."""
    same = ("deployment_id", "draft", "channel", "fingerprint")
    return all(getattr(one, name) == getattr(cell, name) for name in same) and event.split in ("none", one.split)


def _price(cells: Sequence[CellReport], cell: Cell, sums: Sums, settings: Settings) -> Range:
    """Per million output tokens, were the cells' requests accepted like these."""
    own = next((one for one in cells if one.cell.id == cell.id), None)
    if own is None or not sums.requests:
        return Range()
    seen = sum((one.conditions for one in cells), Conditions())
    found = value.judge([replace(own, recent=sums, conditions=seen)], settings).get(cell.id)
    return Range() if found is None or found.price is None else found.price.speculative
