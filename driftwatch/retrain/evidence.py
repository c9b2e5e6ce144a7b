"""What is known of an event's requests beyond it: counts before and now, depth by depth, and how they are sampled."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from driftwatch.acceptance import Tally, tally
from driftwatch.drift.interval import EMPTY, ratio
from driftwatch.drift.live import Metric, Refused, counts
from driftwatch.drift.sums import Sums
from driftwatch.store import live, replays
from driftwatch.store.live import Reported
from driftwatch.store.replays import Judged
from driftwatch.store.schema import Cell, Event, Replay, Sample

MOST = 1000
"""Requests on each side: enough for intervals of a hundredth or two."""
SAMPLINGS = 5

METRICS = {
    "hit_rate": "accepted / (accepted + rejected): tested proposals that the target accepted",
    "acceptance_rate": "accepted / drafted",
    "acceptance_length": "tokens per window, bonus included: 1 + accepted / windows",
    "survival_at_depth": "windows whose proposal at this 0-based depth was accepted / windows",
}


@dataclass(frozen=True)
class Counted:
    """One request's counts up to the cell's gamma."""

    unit: str
    """The session where it is known, else the request."""
    weight: float
    tally: Tally
    outside: int | None
    """Judged tokens that the draft cannot propose; None where nobody counted them."""


@dataclass(frozen=True)
class Sides:
    """An event's requests before the change and since, newest first; as they were replayed, or else as the engine
    counted them."""

    cell: Cell
    before: Sequence[Counted]
    since: Sequence[Counted]

    @classmethod
    def of(cls, session: Session, event: Event, cell: Cell, *, most: int = MOST) -> Sides:
        """Of all splits where the event is of none; ``most`` requests on each side."""
        start = start_of(event)
        mine = (Sample.deployment_id == cell.deployment_id, Sample.segment == cell.segment)
        sides = (Sample.served_at < start, Sample.served_at >= start)
        if cell.channel == "live":
            told = [live.newest(session, *mine, side, limit=most) for side in sides]
            return cls(cell, *([found for one in side if (found := _reported(one, cell))] for side in told))
        draft = (Replay.draft == cell.draft, Replay.fingerprint == cell.fingerprint)
        split = () if event.split == "none" else (Replay.split == event.split,)
        judged = [replays.newest(session, *mine, *draft, *split, side, limit=most) for side in sides]
        return cls(cell, *([found for one in side if (found := _replayed(one, cell.gamma))] for side in judged))

    def sums(self) -> tuple[Sums, Sums]:
        """Before and since."""
        before, since = (_sums(side, self.cell.gamma) for side in (self.before, self.since))
        return before, since

    def depths(self) -> dict[str, Any] | None:
        """Survival at each depth, with intervals; None where an engine does not tell depths apart."""
        if self.cell.metric != "hit_rate":
            return None
        gamma = self.cell.gamma
        return {"baseline": _survival(self.before, gamma), "current": _survival(self.since, gamma)}

    def out_of_vocabulary(self) -> dict[str, Any] | None:
        """Share of the judged tokens that the draft cannot propose, whatever they follow on; None where nobody counted
        them."""
        shares = {"baseline": _outside(self.before), "current": _outside(self.since)}
        return shares if shares["current"]["requests"] else None

    def not_known(self) -> Mapping[str, str]:
        """Why what is None is so."""
        live_only = self.cell.channel == "live"
        reasons = {}
        if self.cell.metric != "hit_rate":
            reasons["depths"] = f"the engine does not tell depths apart: its {self.cell.metric} is watched"
        if self.out_of_vocabulary() is None:
            reasons["out_of_vocabulary"] = (
                "only a replay can tell, and there is none beside the engine's figures"
                if live_only
                else "the draft has the target's whole vocabulary, or nothing since the change was counted"
            )
        return reasons


def start_of(event: Event) -> float:
    """When the change is estimated to have begun, seconds since the epoch."""
    start = event.details.get("start_served_at")
    return event.opened_at if start is None else float(start)


def _replayed(one: Judged, gamma: int) -> Counted | None:
    """None for what was replayed to fewer depths."""
    try:
        found = tally(one.weights, gamma)
    except ValueError:
        return None
    return Counted(_unit(one), one.weight, found, (one.figures or {}).get("outside"))


def _reported(one: Reported, cell: Cell) -> Counted | None:
    """None for figures that say less than the cell watches, or do not fit into it."""
    metric = cast("Metric", cell.metric)
    try:
        found = counts(one.engine, cell.gamma)
    except Refused:
        return None
    if found is None or found.gamma > cell.gamma or not found.gives(metric):
        return None
    return Counted(_unit(one), one.weight, found.tally(cell.gamma, metric), None)


def _unit(one: Judged | Reported) -> str:
    return f"session {one.session}" if one.session is not None else f"request {one.request_id}"


def _sums(side: Iterable[Counted], gamma: int) -> Sums:
    units: defaultdict[str, list[tuple[Tally, float]]] = defaultdict(list)
    for one in side:
        units[one.unit].append((one.tally, one.weight))
    return sum((Sums.session(parts) for parts in units.values()), Sums.zero(gamma))


def _survival(side: Iterable[Counted], gamma: int) -> list[dict[str, Any]]:
    found: dict[str, NDArray[np.float64]] = {}
    requests: Counter[str] = Counter()
    for one in side:
        row = one.weight * np.append(one.tally.accepted_at[gamma - 1, :gamma], one.tally.windows[gamma - 1])
        found[one.unit] = found.get(one.unit, np.zeros(gamma + 1)) + row
        requests[one.unit] += 1
    survival = []
    for depth in range(gamma):
        moments = EMPTY
        for unit, row in found.items():
            moments = moments.with_unit(float(row[depth]), float(row[gamma]), requests[unit])
        survival.append({"depth": depth} | asdict(ratio(moments)))
    return survival


def _outside(side: Iterable[Counted]) -> dict[str, Any]:
    found: dict[str, tuple[int, float, float]] = {}
    for one in side:
        if one.outside is not None:
            requests, y, n = found.get(one.unit, (0, 0.0, 0.0))
            tokens = one.weight * one.tally.tokens
            found[one.unit] = requests + 1, y + one.weight * one.outside, n + tokens
    moments = EMPTY
    for requests, y, n in found.values():
        moments = moments.with_unit(y, n, requests)
    return asdict(ratio(moments))


def sampling(session: Session, cell: Cell, start: float) -> list[dict[str, Any]]:
    """The commonest sampling parameters of the cell's requests since ``start``; null is unknown."""
    columns = (Sample.temperature, Sample.top_p, Sample.top_k)
    query = (
        select(*columns, func.count().label("requests"))
        .where(Sample.deployment_id == cell.deployment_id, Sample.segment == cell.segment, Sample.served_at >= start)
        .group_by(*columns)
        .order_by(func.count().desc())
        .limit(SAMPLINGS)
    )
    return [dict(row._mapping) for row in session.execute(query)]
