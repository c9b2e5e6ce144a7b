"""Retrains over HTTP: what was decided and done, the pipeline's reports, its candidates."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control.candidates import candidate_dict
from driftwatch.control.problems import Problem
from driftwatch.control.reports import rfc3339
from driftwatch.retrain.candidates import CandidateError, submit
from driftwatch.retrain.progress import advance
from driftwatch.retrain.states import IllegalTransition
from driftwatch.settings import Settings
from driftwatch.store import candidates, retrains
from driftwatch.store.connection import Store
from driftwatch.store.schema import Retrain, RetrainStep

Limit = Annotated[int, Query(ge=1, le=1000, description="Newest entries at most.")]
DETAILS_BYTES = 16_384


class Report(BaseModel):
    """How far a pipeline has come."""

    model_config = ConfigDict(extra="forbid")

    state: Literal["accepted", "training", "failed"]
    reason: str | None = Field(None, max_length=1000)


class Submission(BaseModel):
    """A candidate: where it lies, as the shadow sees it; anything else is kept and shown."""

    model_config = ConfigDict(extra="allow")

    path: str = Field(min_length=1, max_length=4096)


def router(store: Store, settings: Settings, guard: Callable[[Request], None]) -> APIRouter:
    """``guard`` wants control's own token; a pipeline may report with that of its retrain instead."""
    routes = APIRouter(prefix="/v1")
    guarded = [Depends(guard)]

    def pipeline(id: str, request: Request) -> None:
        try:
            guard(request)
        except Problem:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            with store.read() as session:
                retrain = session.get(Retrain, id)
            known = (retrain.token_sha256 if retrain else None) or ""
            same = hmac.compare_digest(hashlib.sha256(given.strip().encode("latin-1")).hexdigest(), known)
            if scheme.lower() != "bearer" or not same:
                raise

    @routes.get("/retrains", dependencies=guarded)
    def get_retrains(limit: Limit = 100) -> dict[str, Any]:
        """Decisions on retraining, newest first, the noes too."""
        with store.read() as session:
            query = select(Retrain).order_by(Retrain.created_at.desc()).limit(limit)
            return {"retrains": [_retrain(row) for row in session.scalars(query)]}

    @routes.get("/retrains/{id}", dependencies=[Depends(pipeline)])
    def get_retrain(id: str) -> dict[str, Any]:
        """One decision: why, each step since, and its candidates."""
        with store.read() as session:
            row = session.get(Retrain, id)
            if row is None:
                raise _unknown("retrain", id)
            steps = [_step(step) for step in retrains.history(session, id)]
            found = [candidate_dict(one) for one in candidates.of_retrain(session, id)]
            return _retrain(row) | {"history": steps, "candidates": found}

    @routes.post("/retrains/{id}/state", dependencies=[Depends(pipeline)])
    def post_state(id: str, report: Report) -> dict[str, Any]:
        """A pipeline's word on how far it has come."""
        with store.write() as session:
            retrain = _locked(session, id)
            try:
                advance(session, retrain, report.state, time.time(), report.reason)
            except IllegalTransition as error:
                raise _illegal(error) from None
            return _retrain(retrain)

    @routes.post("/retrains/{id}/candidate", status_code=202, dependencies=[Depends(pipeline)])
    def post_candidate(id: str, submission: Annotated[Submission, Body()]) -> dict[str, Any]:
        """Hand in a candidate; it is judged beside the incumbent, and the verdict comes by webhook and here."""
        details = submission.model_extra or {}
        if len(json.dumps(details)) > DETAILS_BYTES:
            raise Problem(413, "too_large", f"over {DETAILS_BYTES} bytes beside the path", "send less")
        with store.write() as session:
            retrain = _locked(session, id)
            try:
                return candidate_dict(submit(session, settings, retrain, submission.path, details, time.time()))
            except IllegalTransition as error:
                raise _illegal(error) from None
            except CandidateError as error:
                raise Problem(422, "unusable_candidate", str(error), "correct the path or the settings") from None

    return routes


def _locked(session: Session, id: str) -> Retrain:
    retrain = retrains.locked(session, id)
    if retrain is None:
        raise _unknown("retrain", id)
    return retrain


def _unknown(what: str, id: str) -> Problem:
    return Problem(404, f"unknown_{what}", f"no {what} {id!r}", f"GET /v1/{what}s lists those there are")


def _illegal(error: IllegalTransition) -> Problem:
    return Problem(409, "illegal_transition", str(error), "GET the retrain to see where it stands")


def _retrain(row: Retrain) -> dict[str, Any]:
    return {
        "id": row.id,
        "event_id": row.event_id,
        "model": row.model,
        "draft": row.draft,
        "state": row.state,
        "reason": row.reason,
        "decision": row.decision,
        "created_at": rfc3339(row.created_at),
        "updated_at": rfc3339(row.updated_at),
        "data": row.data,
    }


def _step(step: RetrainStep) -> dict[str, Any]:
    return {"before": step.before, "after": step.after, "at": rfc3339(step.at), "reason": step.reason}
