"""What is known of a cell beyond its event: acceptance depth by depth before and now, and how it is sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from driftwatch.acceptance import tally
from driftwatch.drift.interval import EMPTY, ratio
from driftwatch.store import replays
from driftwatch.store.replays import Judged
from driftwatch.store.schema import Cell, Replay, Sample

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
class Sides:
    """Replays of a cell's draft before the change and since, newest first."""

    gamma: int
    before: Sequence[Judged]
    since: Sequence[Judged]

    @classmethod
    def of(cls, session: Session, cell: Cell, start: float) -> Sides | None:
        """None for a cell whose figures came from the engine: it does not tell them request by request and depth."""
        if cell.channel != "shadow":
            return None
        own = (
            Sample.deployment_id == cell.deployment_id,
            Sample.segment == cell.segment,
            Replay.draft == cell.draft,
            Replay.split == cell.split,
            Replay.fingerprint == cell.fingerprint,
        )
        before = replays.newest(session, *own, Sample.served_at < start, limit=MOST)
        return cls(cell.gamma, before, replays.newest(session, *own, Sample.served_at >= start, limit=MOST))

    def depths(self) -> dict[str, Any]:
        """Survival at each depth, with intervals."""
        return {"baseline": _survival(self.before, self.gamma), "current": _survival(self.since, self.gamma)}

    def out_of_vocabulary(self) -> dict[str, Any] | None:
        """Share of the judged tokens that the draft cannot propose, whatever they follow on; None for one without a
        vocabulary of its own."""
        shares = {"baseline": _outside(self.before), "current": _outside(self.since)}
        return shares if shares["current"]["requests"] else None


def _survival(judged: Iterable[Judged], gamma: int) -> list[dict[str, Any]]:
    found: dict[str, NDArray[np.float64]] = {}
    requests: Counter[str] = Counter()
    for one in judged:
        try:
            counts = tally(one.weights, gamma)
        except ValueError:  # replayed to fewer depths
            continue
        row = one.weight * np.append(counts.accepted_at[gamma - 1, :gamma], counts.windows[gamma - 1])
        found[_unit(one)] = found.get(_unit(one), np.zeros(gamma + 1)) + row
        requests[_unit(one)] += 1
    survival = []
    for depth in range(gamma):
        moments = EMPTY
        for unit, row in found.items():
            moments = moments.with_unit(float(row[depth]), float(row[gamma]), requests[unit])
        survival.append({"depth": depth} | asdict(ratio(moments)))
    return survival


def _outside(judged: Iterable[Judged]) -> dict[str, Any]:
    found: dict[str, tuple[int, float, float]] = {}
    for one in judged:
        outside = (one.figures or {}).get("outside")
        if outside is not None:
            requests, y, n = found.get(_unit(one), (0, 0.0, 0.0))
            found[_unit(one)] = requests + 1, y + one.weight * outside, n + one.weight * one.weights.tokens
    moments = EMPTY
    for requests, y, n in found.values():
        moments = moments.with_unit(y, n, requests)
    return asdict(ratio(moments))


def _unit(one: Judged) -> str:
    return f"session {one.session}" if one.session is not None else f"request {one.request_id}"


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
