"""The shadow's own listener: health, readiness and metrics of one worker."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from driftwatch.settings import host_port
from driftwatch.shadow.governor import REASONS, Governor

log = logging.getLogger(__name__)

SILENT_S = 900.0
"""A worker that finished no batch and looked for none for so long hangs. The longest samples take minutes."""


class GovernorCollector(Collector):
    """What the governor did, read at each scrape."""

    def __init__(self, governor: Governor) -> None:
        self._governor = governor

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        governor = self._governor
        yield GaugeMetricFamily(
            "driftwatch_shadow_busy_ratio", "Share of the last minute spent on batches.", governor.busy_ratio
        )
        waiting = GaugeMetricFamily("driftwatch_shadow_paused", "1 while a batch waits for this.", labels=("reason",))
        pauses = CounterMetricFamily("driftwatch_shadow_pauses", "Batches that had to wait.", labels=("reason",))
        seconds = CounterMetricFamily("driftwatch_shadow_paused_seconds", "Time spent waiting.", labels=("reason",))
        for reason in REASONS:
            waiting.add_metric((reason,), float(governor.waiting_for == reason))
            pauses.add_metric((reason,), governor.pauses[reason])
            seconds.add_metric((reason,), governor.seconds_waited[reason])
        yield from (waiting, pauses, seconds)
        yield CounterMetricFamily(
            "driftwatch_shadow_out_of_memory", "Batches that ran out of memory.", governor.out_of_memory
        )
        if (free := governor.free_bytes()) is not None:
            yield GaugeMetricFamily("driftwatch_shadow_free_memory_bytes", "Free memory of the device.", free)


def app(governor: Governor, clock: Callable[[], float] = time.monotonic) -> FastAPI:
    """``/healthz``, ``/readyz`` and ``/metrics``."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(GovernorCollector(governor))
    routes = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @routes.get("/healthz")
    def healthz(answer: Response) -> dict[str, str]:
        """The worker is at it, or pauses on purpose."""
        silent = clock() - governor.last_seen
        if silent > SILENT_S:
            answer.status_code = 503
            return {"status": f"silent for {silent:.0f} s"}
        return {"status": "ok"}

    @routes.get("/readyz")
    def readyz() -> dict[str, str]:
        """The drafts are loaded: this listens from then on."""
        return {"status": "ok"}

    @routes.get("/metrics", response_class=Response)
    def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return routes


@contextmanager
def served(listen: str, routes: FastAPI) -> Iterator[None]:
    """Serve in a thread while the block runs.

    An address that is taken stops no work: several workers may share a machine and its settings.
    """
    try:
        listener = socket.create_server(host_port(listen))
    except OSError as error:
        log.warning("`shadow.listen`: cannot listen on %s: %s; this worker serves no metrics", listen, error.strerror)
        yield
        return
    config = uvicorn.Config(routes, log_config=None, log_level=logging.WARNING, access_log=False, server_header=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="shadow-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
