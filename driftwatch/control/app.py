"""Control as an application and as a process."""

from __future__ import annotations

import asyncio
import hmac
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request

import driftwatch
from driftwatch.control import (
    api,
    canary,
    candidates,
    costs,
    health,
    intake,
    metrics,
    problems,
    retrains,
    sampling,
    sketches,
)
from driftwatch.control.leader import Leader
from driftwatch.control.looks import Looks
from driftwatch.control.page import routes as page
from driftwatch.control.problems import Problem
from driftwatch.control.schedule import scheduler
from driftwatch.errors import DriftwatchError
from driftwatch.retrain.delivery import Courier
from driftwatch.settings import Settings, host_port, secret
from driftwatch.store.connection import Store


def create_app(store: Store, settings: Settings, leader: Leader | None = None, looks: Looks | None = None) -> FastAPI:
    """The whole of control: routes, and while the application runs the schedules, if it leads."""

    leader, looks = leader or Leader(store), looks or Looks(settings)
    prompts = canary.read(settings.canary.prompts)
    costs.check(settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        courier = Courier(leader.store, settings.webhooks, settings.delivery.hosts)
        jobs = scheduler(leader, settings, courier, prompts)
        leader.start()
        jobs.start()
        try:
            yield
        finally:
            jobs.shutdown(wait=True)
            leader.stop()
            courier.close()

    app = FastAPI(
        title="driftwatch control",
        version=driftwatch.__version__,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    problems.install(app)
    app.include_router(health.router(store, metrics.registry(store, settings, leader, looks)))
    token = secret(settings.control.token, settings.control.token_file, "control.token_file")
    bearer = _bearer(token)
    guard = [Depends(bearer)]
    app.include_router(intake.router(store, settings), dependencies=guard)
    app.include_router(api.router(store, settings, looks), dependencies=guard)
    app.include_router(retrains.router(store, settings, bearer))
    app.include_router(candidates.router(store), dependencies=guard)
    app.include_router(sampling.router(store, settings), dependencies=guard)
    app.include_router(sketches.router(store), dependencies=guard)
    app.include_router(page.router(store, settings, token, leader))

    @app.get("/openapi.json", dependencies=guard, include_in_schema=False)
    def openapi() -> dict[str, Any]:
        return app.openapi()

    return app


def metrics_app(store: Store, settings: Settings, leader: Leader, looks: Looks) -> FastAPI:
    """Health and metrics alone, for a listener that others may reach."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    problems.install(app)
    app.include_router(health.router(store, metrics.registry(store, settings, leader, looks)))
    return app


def _bearer(token: str | None) -> Any:
    def check(request: Request) -> None:
        if token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Header bytes come as latin-1: back to bytes, to compare them with the token's own.
        same = hmac.compare_digest(given.strip().encode("latin-1"), token.encode())
        if scheme.lower() != "bearer" or not same:
            raise Problem(
                401, "unauthorized", "a bearer token is wanted", "send `Authorization: Bearer <control.token>`"
            )

    return check


def run(store: Store, settings: Settings) -> None:
    """Serve until a signal ends it. Raises DriftwatchError if a port cannot be bound."""
    leader, looks = Leader(store), Looks(settings)
    apps = [(create_app(store, settings, leader, looks), settings.control.listen)]
    if settings.control.metrics_listen is not None:
        apps.append((metrics_app(store, settings, leader, looks), settings.control.metrics_listen))
    listeners = [(app, bind(listen, "control")) for app, listen in apps]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again when it is done: that is all we need
    asyncio.run(_serve(listeners))


def bind(listen: str, what: str) -> socket.socket:
    """A listening socket. Raises DriftwatchError naming the address."""
    host, port = host_port(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise DriftwatchError(f"{what} cannot listen on {listen}: {error.strerror or error}") from None


async def _serve(listeners: list[tuple[FastAPI, socket.socket]]) -> None:
    async with asyncio.TaskGroup() as group:
        for app, listener in listeners:
            config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False)
            group.create_task(uvicorn.Server(config).serve(sockets=[listener]))
