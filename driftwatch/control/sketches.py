"""``GET /v1/sketches``: what the split on and off the training distribution is worth, draft by draft."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.acceptance import tally
from driftwatch.drift.sketch.sketch import Share
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
        """Each draft with a sketch: the share of requests that are off, acceptance by p-value, and whether the sketch
        tells anything at all."""
        with store.read() as session:
            return {"sketches": [_report(session, *one) for one in _drafts(session)]}

    return routes


def _drafts(session: Session) -> list[tuple[str, Cell]]:
    """Model and newest cell of each draft whose requests are split."""
    cells = select(Deployment.model, Cell).join(Deployment, Deployment.id == Cell.deployment_id)
    found = {}
    for model, cell in session.execute(cells.where(Cell.split != "none").order_by(Cell.id)):
        found[model, cell.draft] = cell
    return [(model, cell) for (model, _), cell in sorted(found.items())]


def _report(session: Session, model: str, cell: Cell) -> dict[str, Any]:
    mine = (Deployment.model == model, Replay.draft == cell.draft, Replay.fingerprint == cell.fingerprint)
    judged = newest(session, *mine, Replay.split != "none", limit=NEWEST)
    off = Share.of(sum(one.split == "off" for one in judged), len(judged)) if judged else None
    found = usefulness(_counts(one, cell.gamma) for one in judged)
    return {
        "model": model,
        "draft": cell.draft,
        "fingerprint": cell.fingerprint,
        "requests": len(judged),
        "off": None if off is None else asdict(off),
        "gamma": cell.gamma,
        "acceptance": found.as_dict(),
    }


def _counts(one: Judged, gamma: int) -> tuple[float, float, float]:
    """p with accepted and tested proposals, weighted to all traffic: segments are sampled at rates of their own."""
    depths = gamma if one.weights.depth_free else min(gamma, one.weights.values.shape[1])
    found = tally(one.weights, depths)
    p = float((one.figures or {}).get("p", 1.0))
    return p, one.weight * float(found.accepted[-1]), one.weight * float(found.tested[-1])
