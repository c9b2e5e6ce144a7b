"""Health and metrics: the routes that never want a token."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from sqlalchemy import text

from driftwatch.store.connection import Store


def router(store: Store, metrics: CollectorRegistry) -> APIRouter:
    routes = APIRouter()

    @routes.get("/healthz")
    def healthz() -> dict[str, str]:
        """Alive."""
        return {"status": "ok"}

    @routes.get("/readyz")
    def readyz() -> dict[str, str]:
        """The store answers."""
        with store.read() as session:
            session.execute(text("SELECT 1"))
        return {"status": "ok"}

    @routes.get("/metrics", response_class=Response)
    def get_metrics(request: Request) -> Response:
        """Prometheus or OpenMetrics text."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics), media_type=content_type)

    return routes
