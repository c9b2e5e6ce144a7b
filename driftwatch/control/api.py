"""The reading side of the API: segments, events, deployments, retrains, deliveries, settings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from sqlalchemy import select

from driftwatch.control import mix, reports, slo, untrained, value, watched
from driftwatch.control.changes import KIND
from driftwatch.control.looks import Looks
from driftwatch.control.problems import Problem
from driftwatch.control.reports import CellReport, event_dict, rfc3339
from driftwatch.control.value import CellValue
from driftwatch.records import segment_labels
from driftwatch.settings import Settings
from driftwatch.store import outbox
from driftwatch.store.connection import Store
from driftwatch.store.schema import Delivery, Deployment, Event, Segment

Limit = Annotated[int, Query(ge=1, le=1000, description="Newest entries at most.")]


def router(store: Store, settings: Settings, looks: Looks) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/segments")
    def get_segments() -> dict[str, Any]:
        """All segments with their cells. `untrained` (prompt lookup beside the trained draft) is null where it was not
        walked yet: a few segments are at each call."""
        with store.read() as session:
            known = {segment.id: segment for segment in session.scalars(select(Segment))}
            found: dict[str, list[dict[str, Any]]] = {key: [] for key in sorted(known)}
            cells = list(reports.cells(session, time.time()))
            values = value.judge(cells, settings)
            for report in cells:
                found.setdefault(report.cell.segment, []).append(_cell(report, values))
            tests: dict[str, list[dict[str, Any]]] = {}
            for test in watched.monitors(session):
                tests.setdefault(test.row.segment, []).append(test.as_dict())
            beside = looks.over(session, cells, time.time())
            return {
                "segments": [
                    {"id": key, "labels": segment_labels(key), "cells": mine, "tests": tests.get(key, [])}
                    | {"untrained": [one.as_dict() for one in beside[key]] if key in beside else None}
                    for key, mine in found.items()
                ],
                "mix": mix.every(session, time.time()),
            }

    @routes.get("/segments/{segment:path}")
    def get_segment(segment: str, request: Request) -> dict[str, Any]:
        """One segment, its cells and its events. The id may be given as it is, or percent-encoded once more."""
        with store.read() as session:
            as_written = request.scope["raw_path"].decode().partition("/segments/")[2]
            if session.get(Segment, as_written) is not None:
                segment = as_written
            cells = list(reports.cells(session, time.time(), segment))
            values = value.judge(cells, settings)
            if not cells and session.get(Segment, segment) is None:
                raise _unknown("segment", segment)
            events = session.scalars(select(Event).where(Event.segment == segment).order_by(Event.opened_at.desc()))
            return {
                "id": segment,
                "labels": segment_labels(segment),
                "cells": [_cell(report, values) for report in cells],
                "tests": [test.as_dict() for test in watched.monitors(session, segment)],
                "untrained": [one.as_dict() for one in untrained.beside(session, settings, segment, cells)],
                "slo": [one.as_dict() for one in slo.verdicts(session, settings.slo, time.time(), segment)],
                "events": [event_dict(event) for event in events],
            }

    @routes.get("/events")
    def get_events(segment: str | None = None, limit: Limit = 100) -> dict[str, Any]:
        """Newest events first."""
        query = select(Event).order_by(Event.opened_at.desc(), Event.id).limit(limit)
        if segment is not None:
            query = query.where(Event.segment == segment)
        with store.read() as session:
            return {"events": [event_dict(event) for event in session.scalars(query)]}

    @routes.get("/deployments")
    def get_deployments(limit: Limit = 100) -> dict[str, Any]:
        """What has been serving, newest first."""
        with store.read() as session:
            rows = session.scalars(select(Deployment).order_by(Deployment.id.desc()).limit(limit)).all()
            changed = select(Event).where(Event.kind == KIND, Event.deployment_id.in_([row.id for row in rows]))
            events = {event.deployment_id: event for event in session.scalars(changed)}
            return {"deployments": [_deployment(row, events.get(row.id)) for row in rows]}

    @routes.get("/deliveries")
    def get_deliveries(limit: Limit = 100) -> dict[str, Any]:
        """Webhook deliveries, newest first."""
        with store.read() as session:
            query = select(Delivery).order_by(Delivery.id.desc()).limit(limit)
            return {"deliveries": [_delivery(row) for row in session.scalars(query)]}

    @routes.post("/deliveries/{id}/redrive")
    def post_redrive(id: str, endpoint: str | None = None) -> dict[str, Any]:
        """Send an event again, under its own id, to the endpoints (or one) that it was given up for."""
        with store.write() as session:
            again = outbox.redrive(session, id, endpoint, time.time())
            if again:
                return {"id": id, "endpoints": [delivery.endpoint for delivery in again]}
            if session.scalars(select(Delivery.id).where(Delivery.event_id == id)).first() is None:
                raise Problem(404, "unknown_delivery", f"no delivery {id!r}", "GET /v1/deliveries lists them")
            raise Problem(409, "not_dead", f"no delivery of {id!r} was given up", "only dead deliveries are sent again")

    @routes.get("/config")
    def get_config() -> dict[str, Any]:
        """The settings in force; secrets are masked."""
        return settings.masked()

    return routes


def _unknown(what: str, id: str) -> Problem:
    return Problem(404, f"unknown_{what}", f"no {what} {id!r}", f"GET /v1/{what}s lists those there are")


def _cell(report: CellReport, values: Mapping[int, CellValue]) -> dict[str, Any]:
    """``value`` is null where costs are not known."""
    worth = values.get(report.cell.id)
    return report.as_dict() | {"value": None if worth is None else worth.as_dict()}


def _deployment(row: Deployment, event: Event | None) -> dict[str, Any]:
    seen = {"first_seen": rfc3339(row.first_seen), "last_seen": rfc3339(row.last_seen)}
    change = None
    if event is not None:
        before = event.details["before"]["deployment"]
        facts = {key: event.details[key] for key in ("cause", "changed")}
        change = {"event_id": event.id, "before": before} | facts
    return {"id": row.id, "model": row.model, "facts": row.facts} | seen | {"change": change}


def _delivery(row: Delivery) -> dict[str, Any]:
    return {
        "id": row.event_id,
        "endpoint": row.endpoint,
        "type": row.type,
        "state": row.state,
        "attempts": row.attempts,
        "created_at": rfc3339(row.created_at),
        "due_at": rfc3339(row.due_at) if row.state == "pending" else None,
        "delivered_at": rfc3339(row.delivered_at) if row.delivered_at is not None else None,
        "error": row.error,
    }
