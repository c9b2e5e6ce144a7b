"""Against a real HTTP server in the place of control."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from driftwatch.tap import shipper as module
from driftwatch.tap.metrics import Metrics
from driftwatch.tap.shipper import Line, Shipper


class Control:
    """Keeps what it is sent, and answers as told."""

    def __init__(self, status: int = 201) -> None:
        self.status = status
        self.batches: list[list[dict[str, Any]]] = []
        self.stored: list[list[dict[str, Any]]] = []
        self.wrong: set[int] = set()
        self.headers: list[dict[str, str]] = []
        self.got = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.batches.append([json.loads(line) for line in body.splitlines()])
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.got.set()
        wrong = any(one["id"] in self.wrong for one in self.batches[-1])
        if not wrong and self.status == 201:
            self.stored.append(self.batches[-1])
        return web.Response(status=400 if wrong else self.status, text='{"stored": 1}')

    @contextlib.asynccontextmanager
    async def on(self, port: int) -> AsyncIterator[None]:
        app = web.Application(client_max_size=20_000_000)
        app.router.add_post("/v1/samples", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield
        finally:
            await runner.cleanup()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(module, "LONGEST_RETRY_S", 0.05)


def make(port: int, metrics: Metrics, queue: int = 100, token: str | None = None) -> Shipper:
    return Shipper(f"http://127.0.0.1:{port}", queue=queue, token=token, metrics=metrics)


def line(number: int, size: int = 0) -> Line:
    return Line("tenant=a", json.dumps({"id": number, "pad": "x" * size}).encode())


@contextlib.asynccontextmanager
async def running(shipper: Shipper) -> AsyncIterator[None]:
    task = asyncio.create_task(shipper.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


async def test_sends_batches_in_order_with_the_token(port: int, metrics: Metrics) -> None:
    control, shipper = Control(), make(port, metrics, queue=1000, token="secret")
    for number in range(450):
        shipper.put(line(number))
    assert value(metrics, "driftwatch_queue_depth") == 450
    async with control.on(port), running(shipper):
        await shipper.drain(10)
    assert [len(batch) for batch in control.batches] == [200, 200, 50]
    assert [record["id"] for batch in control.batches for record in batch] == list(range(450))
    assert control.headers[0]["authorization"] == "Bearer secret"
    assert control.headers[0]["content-type"] == "application/x-ndjson"
    assert value(metrics, "driftwatch_queue_depth") == 0
    assert value(metrics, "driftwatch_samples_total", segment="tenant=a", outcome="sent") == 450


async def test_batches_are_bounded_in_bytes(port: int, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 1000)
    control, shipper = Control(), make(port, metrics)
    for number, size in enumerate([400, 400, 400, 5000, 10]):
        shipper.put(line(number, size))
    async with control.on(port), running(shipper):
        await shipper.drain(10)
    assert [[record["id"] for record in batch] for batch in control.batches] == [[0, 1], [2], [3], [4]]


async def test_control_that_is_away_is_waited_for(
    port: int, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost and nothing is sent twice; the outage is one line in the log."""
    control, shipper = Control(), make(port, metrics)
    async with running(shipper):
        shipper.put(line(1))
        await asyncio.sleep(0.15)
        shipper.put(line(2))
        assert value(metrics, "driftwatch_queue_depth") == 2
        async with control.on(port):
            await shipper.drain(10)
    assert sorted(record["id"] for batch in control.batches for record in batch) == [1, 2]
    assert len([entry for entry in caplog.records if entry.levelname == "WARNING"]) == 1


async def test_busy_is_away(port: int, metrics: Metrics) -> None:
    control, shipper = Control(503), make(port, metrics)
    shipper.put(line(1))
    async with control.on(port), running(shipper):
        await asyncio.wait_for(control.got.wait(), 5)
        control.status = 201
        await shipper.drain(10)
    assert len(control.batches) >= 2
    assert value(metrics, "driftwatch_samples_total", segment="tenant=a", outcome="sent") == 1


async def test_a_full_queue_drops_new_ones_and_counts_them(port: int, metrics: Metrics) -> None:
    control, shipper = Control(), make(port, metrics, queue=3)
    for number in range(10):
        shipper.put(line(number))
    assert value(metrics, "driftwatch_dropped_total", reason="queue_full") == 7
    assert value(metrics, "driftwatch_samples_total", segment="tenant=a", outcome="dropped") == 7
    async with control.on(port), running(shipper):
        await shipper.drain(10)
    assert [record["id"] for record in control.batches[0]] == [0, 1, 2]


async def test_the_queue_is_bounded_in_bytes_too(port: int, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES", 1000)
    shipper = make(port, metrics)
    for number in range(3):
        shipper.put(line(number, 400))
    assert value(metrics, "driftwatch_dropped_total", reason="queue_full") == 1


async def test_a_refused_sample_is_dropped_with_one_line_and_costs_no_other(
    port: int, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    control, shipper = Control(), make(port, metrics)
    control.wrong = {3, 5}
    for number in range(8):
        shipper.put(line(number))
    async with control.on(port), running(shipper):
        await shipper.drain(10)
    stored = [one["id"] for batch in control.stored for one in batch]
    assert sorted(stored) == [0, 1, 2, 4, 6, 7]
    assert value(metrics, "driftwatch_dropped_total", reason="refused") == 2
    assert value(metrics, "driftwatch_samples_total", segment="tenant=a", outcome="sent") == 6
    lines = [entry.message for entry in caplog.records if entry.name == module.__name__]
    assert lines == ['control refused a sample: 400 {"stored": 1}'] * 2


@pytest.mark.parametrize("status", [401, 403, 404, 429, 503])
async def test_an_answer_that_is_no_verdict_holds_the_samples(port: int, metrics: Metrics, status: int) -> None:
    control, shipper = Control(status), make(port, metrics)
    shipper.put(line(1))
    async with control.on(port), running(shipper):
        await asyncio.wait_for(control.got.wait(), 10)
        control.status = 201
        await shipper.drain(10)
    assert value(metrics, "driftwatch_samples_total", segment="tenant=a", outcome="sent") == 1


async def test_what_is_left_at_the_end_is_counted(port: int, metrics: Metrics) -> None:
    shipper = make(port, metrics)
    shipper.put(line(1))
    async with running(shipper):
        await shipper.drain(0.1)
    assert value(metrics, "driftwatch_dropped_total", reason="shutdown") == 1
    assert value(metrics, "driftwatch_queue_depth") == 0


async def test_draining_cuts_a_long_pause_short(port: int, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    control, shipper = Control(503), make(port, metrics)
    monkeypatch.setattr("random.uniform", lambda low, high: 10_000.0)
    shipper.put(line(1))
    async with control.on(port), running(shipper):
        await asyncio.wait_for(control.got.wait(), 5)
        control.status = 201
        await shipper.drain(10)
    assert value(metrics, "driftwatch_samples_total", segment="tenant=a", outcome="sent") == 1
