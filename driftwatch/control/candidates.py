"""Candidates over HTTP: what is judged, on how much, and with what verdict."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control.problems import Problem
from driftwatch.control.reports import rfc3339
from driftwatch.drift.interval import Estimate
from driftwatch.drift.sums import Sums
from driftwatch.store import candidates
from driftwatch.store.connection import Store
from driftwatch.store.schema import Candidate, Cell

Limit = Annotated[int, Query(ge=1, le=1000, description="Newest entries at most.")]


def router(store: Store) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/candidates")
    def get_candidates(limit: Limit = 100) -> dict[str, Any]:
        """Candidates with their verdicts, newest first."""
        with store.read() as session:
            return {"candidates": [candidate_dict(row) for row in candidates.newest(session, limit)]}

    @routes.get("/candidates/{id}")
    def getcandidate_dict(id: str) -> dict[str, Any]:
        """One candidate; while it is undecided, how many samples it was judged on."""
        with store.read() as session:
            row = session.get(Candidate, id)
            if row is None:
                raise Problem(
                    404, "unknown_candidate", f"no candidate {id!r}", "GET /v1/candidates lists those there are"
                )
            judged: dict[str, Any] = {
                "judged": candidates.count_pairs(session, row),
                "waiting": candidates.waiting(session, row),
            }
            return candidate_dict(row) | judged | {"after_promotion": _after_promotion(session, row)}

    return routes


def _after_promotion(session: Session, row: Candidate) -> list[dict[str, Any]] | None:
    """What a promoted candidate does since it serves, cell by cell, beside what it showed; None while it does not.

    It serves once the incumbent's name is replayed with the candidate's weights: those are cells of their own.
    ``kept`` is whether the interval holds what was shown, or lies above; None where the data cannot say.
    """
    if row.state != "promoted" or row.fingerprint is None or row.verdict is None:
        return None
    shown = {(one["segment"], one["split"]): one["candidate"] for one in row.verdict["table"]}
    mine = (Cell.fingerprint == row.fingerprint, Cell.draft == row.incumbent)
    cells = session.scalars(select(Cell).where(*mine).order_by(Cell.segment, Cell.split)).all()
    found = []
    for cell in cells:
        now = Sums.from_json(cell.sums).interval("hit_rate", cell.gamma)
        promised = shown.get((cell.segment, cell.split))
        where = {"segment": cell.segment, "split": cell.split, "promised": promised}
        found.append(where | {"hit_rate": asdict(now), "kept": _kept(now, promised)})
    return found or None


def _kept(now: Estimate, promised: float | None) -> bool | None:
    return None if promised is None or now.upper is None else now.upper >= promised


def candidate_dict(row: Candidate) -> dict[str, Any]:
    return {
        "id": row.id,
        "retrain_id": row.retrain_id,
        "model": row.model,
        "incumbent": row.incumbent,
        "path": row.path,
        "fingerprint": row.fingerprint,
        "incumbent_fingerprint": row.incumbent_fingerprint,
        "state": row.state,
        "reason": row.reason,
        "verdict": row.verdict,
        "details": row.details,
        "created_at": rfc3339(row.created_at),
        "updated_at": rfc3339(row.updated_at),
    }
