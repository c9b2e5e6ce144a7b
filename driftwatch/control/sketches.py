"""``GET /v1/sketches``: what the split on and off the training distribution is worth, draft by draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter
from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.acceptance import tally
from driftwatch.control.terms import figure
from driftwatch.drift.interval import EMPTY, ratio
from driftwatch.drift.sketch.usefulness import usefulness
from driftwatch.store.connection import Store
from driftwatch.store.replays import Judged, newest
from driftwatch.store.schema import Cell, Deployment, Replay

NEWEST = 2000
"""Requests looked at: of the newest weights of each draft."""


def router(store: Store) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/sketches")
    def get_sketches() -> dict[str, Any]:
        """Each draft with a sketch, over all segments: the share of requests that are off, how new outputs are to the
        draft, acceptance by p-value, and whether the sketch tells anything at all."""
        with store.read() as session:
            return {"sketches": [_report(session, *one) for one in _drafts(session)]}

    return routes


def _drafts(session: Session) -> list[tuple[str, Cell]]:
    """Model and latest cell of each draft whose requests are split."""
    cells = select(Deployment.model, Cell).join(Deployment, Deployment.id == Cell.deployment_id)
    found = {}
    for model, cell in session.execute(cells.where(Cell.split != "none").order_by(Cell.updated_at, Cell.id)):
        found[model, cell.draft] = cell
    return [(model, cell) for (model, _), cell in sorted(found.items())]


def _report(session: Session, model: str, cell: Cell) -> dict[str, Any]:
    mine = (Deployment.model == model, Replay.draft == cell.draft, Replay.fingerprint == cell.fingerprint)
    judged = newest(session, *mine, Replay.split != "none", limit=NEWEST)
    found = usefulness(_counts(one, cell.gamma) for one in judged)
    return {
        "model": model,
        "draft": cell.draft,
        "fingerprint": cell.fingerprint,
        "requests": len(judged),
        "off": _share(judged, lambda one: (float(one.split == "off"), 1.0)) if judged else None,
        "output_novelty": _share(judged, lambda one: _known(one, "output_novelty", 1.0)),
        "outside_draft_vocabulary": _share(judged, lambda one: _known(one, "outside", float(one.weights.tokens))),
        "gamma": cell.gamma,
        "acceptance": found.as_dict(),
    }


def _share(judged: Sequence[Judged], part_of: Callable[[Judged], tuple[float, float]]) -> dict[str, Any]:
    """A ratio of sums over requests, weighted to all traffic: segments are sampled at rates of their own."""
    moments = EMPTY
    for one in judged:
        part, whole = part_of(one)
        if whole:
            moments = moments.with_unit(one.weight * part, one.weight * whole)
    return figure(ratio(moments))


def _known(one: Judged, name: str, whole: float) -> tuple[float, float]:
    """A figure of the replay out of a whole; nothing out of nothing where the shadow did not say."""
    said = (one.figures or {}).get(name)
    return (0.0, 0.0) if said is None else (float(said), whole)


def _counts(one: Judged, gamma: int) -> tuple[float, float, float]:
    """p with accepted and tested proposals, weighted to all traffic."""
    depths = gamma if one.weights.depth_free else min(gamma, one.weights.values.shape[1])
    found = tally(one.weights, depths)
    p = float((one.figures or {}).get("p", 1.0))
    return p, one.weight * float(found.accepted[-1]), one.weight * float(found.tested[-1])
