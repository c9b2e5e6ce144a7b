"""``GET /v1/sampling``: how many requests each tap is to keep, so that a day's tokens make all intervals equally wide.

Reckoned from the store at each request, so that any control can answer. Budgets are for all taps together: each gets
its part, by how many have asked lately, whichever control they asked. What cells have shown, and how much traffic came,
decides on windows to come alone; so a window's own requests never change their chance to be kept. A tap that is new has
its part at once, and the others less from their next question on: for one window they may keep too much, which the
day's tokens bound in any case.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.drift.allocation import Demand, allocate, window_tokens, within
from driftwatch.drift.cell import CellState
from driftwatch.drift.interval import Moments
from driftwatch.settings import Settings
from driftwatch.store import deployments, taps
from driftwatch.store.arrivals import arrivals
from driftwatch.store.connection import Store
from driftwatch.store.samples import DAY, spent
from driftwatch.store.schema import Cell, Event

MISSED = 4
"""Windows after which a tap that did not ask again is gone."""
MINED = ("drift", "off_share")
"""Events that more training data helps against."""


def router(store: Store, settings: Settings, *, clock: Callable[[], float] = time.time) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/sampling")
    def get_sampling(
        response: Response,
        tap: Annotated[
            str, Query(max_length=64, description="The tap that asks. Without a name one only looks, and gets no part.")
        ] = "",
        if_none_match: Annotated[str | None, Header()] = None,
    ) -> Any:
        """Requests that one tap is to keep per segment and window: for figures, and further ones for training alone."""
        now = clock()
        since = now - MISSED * max(settings.sampling.window_s, 1.0)
        if tap:  # a short transaction of its own: on SQLite nobody else can write meanwhile
            with store.write() as session:
                taps.asked(session, tap, now, since)
        with store.read() as session:
            said = budgets(session, settings, max(taps.count(session, since), 1), now)
        version = f'"{hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]}"'
        if if_none_match == version:
            return Response(status_code=304, headers={"etag": version})
        response.headers["etag"] = version
        return said

    return routes


def budgets(session: Session, settings: Settings, sharers: int, now: float) -> dict[str, Any]:
    """Of one of ``sharers`` taps. Segments that are not named keep ``per_window``."""
    sampling = settings.sampling
    segments: dict[str, int] = {}
    if sampling.tokens_per_day is not None:
        left = sampling.tokens_per_day - spent(session, now)
        left_s = DAY - now % DAY
        tokens = window_tokens(left, sampling.tokens_per_day, sampling.window_s, left_s) / sharers
        segments = dict(sorted(allocate(_demands(session, settings, sharers, now), tokens).items()))
    mining = {}
    if sampling.mining_per_window:
        open_now = select(Event.segment).where(Event.kind.in_(MINED), Event.closed_at.is_(None)).distinct()
        mining = dict.fromkeys(sorted(session.scalars(open_now)), sampling.mining_per_window)
    return {"per_window": sampling.per_window, "segments": segments, "mining": mining, "taps": sharers}


def _demands(session: Session, settings: Settings, sharers: int, now: float) -> dict[str, Demand]:
    """What each segment with recent traffic asks of one tap. A request costs its tokens once for each draft."""
    spreads = _spreads(session)
    drafts = max(1, *(sum(draft.path is not None for draft in model.drafts) for model in settings.models))
    return {
        segment: Demand(
            within(spreads[segment]), one.rate * settings.sampling.window_s / sharers, max(one.tokens, 1.0) * drafts
        )
        for segment, one in arrivals(session, now).items()
    }


def _spreads(session: Session) -> dict[str, list[tuple[float, Moments]]]:
    """Requests and moments of each segment's cells in the deployment in use: the others get no traffic."""
    newest: dict[str, int] = {}
    found: dict[str, list[tuple[float, Moments]]] = defaultdict(list)
    began = deployments.since(session)
    cells = session.scalars(select(Cell).where(Cell.channel == "shadow").order_by(Cell.id)).all()
    for cell in sorted(cells, key=lambda cell: (-began[cell.deployment_id], -cell.deployment_id)):
        if newest.setdefault(cell.segment, cell.deployment_id) == cell.deployment_id:
            moments = CellState.from_json(cell.state).baseline.moments
            found[cell.segment].append((float(cell.sums["requests"]), moments))
    return found
