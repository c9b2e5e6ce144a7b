"""Many taps, one control, a store that stands still: control says so, the taps keep, and all is stored once."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psycopg
import pytest
import sqlalchemy as sa
import uvicorn

from driftwatch.control import app as control_app
from driftwatch.control import intake
from driftwatch.settings import Settings
from driftwatch.store import connection, migrate
from driftwatch.store.connection import Store
from driftwatch.store.schema import Sample, Work
from driftwatch.tap import shipper
from driftwatch.tap.metrics import Metrics
from driftwatch.tap.shipper import Line, Shipper

TAPS, RECORDS = 24, 60


@pytest.fixture
def url(postgres: str) -> str:
    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(postgres, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    return postgres.replace("postgresql://", "postgresql+psycopg://").replace("/postgres?", f"/{name}?")


class Counted:
    """Control's application, and how it answered."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.answers: Counter[int] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start" and scope["path"] == "/v1/samples":
                self.answers[message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counted)


@contextmanager
def control(store: Store) -> Iterator[tuple[str, Counted]]:
    settings = Settings(control={"tick_s": 3600.0}, models=[{"drafts": [{"path": "/d"}]}])
    app = Counted(control_app.create_app(store, settings))
    listener = control_app.bind("127.0.0.1:0", "control")
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listener]),))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
    finally:
        server.should_exit = True
        thread.join(30)


def line(tap: int, number: int) -> Line:
    ids = {"prompt_token_ids": [1, 2, 3], "output_token_ids": [4, 5, 6]}
    return Line("tenant=a", json.dumps({"id": f"{tap}-{number}", "labels": {"tenant": "a"}} | ids).encode())


async def ship(url: str, release: Callable[[], None]) -> list[Metrics]:
    """Taps with a queue each; the store goes on once control has refused a few times."""
    metrics = [Metrics() for _ in range(TAPS)]
    taps = [Shipper(url, queue=1000, token=None, metrics=one) for one in metrics]
    for number, tap in enumerate(taps):
        for i in range(RECORDS):
            tap.put(line(number, i))
    running = [asyncio.create_task(tap.run()) for tap in taps]
    await asyncio.to_thread(release)
    await asyncio.gather(*(tap.drain(60) for tap in taps))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return metrics


def test_a_store_that_stands_still_loses_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BUSY_SECONDS", 1)
    monkeypatch.setattr(intake, "WAIT_S", 0.3)
    monkeypatch.setattr(shipper, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(shipper, "LONGEST_RETRY_S", 0.5)
    store = Store(url)
    migrate.upgrade(store)
    with control(store) as (address, app), psycopg.connect(_plain(url)) as blocker:
        blocker.execute("LOCK TABLE work IN ACCESS EXCLUSIVE MODE")

        def release() -> None:
            deadline = time.monotonic() + 60
            while app.answers[429] < TAPS or app.answers[503] < intake.AT_ONCE:
                assert time.monotonic() < deadline, app.answers
                time.sleep(0.05)
            assert app.answers[201] == 0
            assert httpx.get(f"{address}/healthz", timeout=5, trust_env=False).is_success
            assert httpx.get(f"{address}/v1/events", timeout=5, trust_env=False).is_success, "readers are not held up"
            blocker.rollback()

        metrics = asyncio.run(ship(address, release))
    dropped = [one.registry.get_sample_value("driftwatch_dropped_total", {"reason": "shutdown"}) for one in metrics]
    assert sum(one or 0 for one in dropped) == 0
    assert set(app.answers) == {201, 429, 503}
    with store.read() as session:
        ids = list(session.scalars(sa.select(Sample.request_id)))
        work = session.scalar(sa.select(sa.func.count()).select_from(Work))
    assert sorted(ids) == sorted(f"{tap}-{i}" for tap in range(TAPS) for i in range(RECORDS))
    assert work == len(ids)
    store.close()


def _plain(url: str) -> str:
    return url.replace("postgresql+psycopg://", "postgresql://")


def test_the_server_sees_control_alone_however_many_taps_push(url: str) -> None:
    store = Store(url)
    migrate.upgrade(store)
    with control(store) as (address, app), psycopg.connect(_plain(url), autocommit=True) as watcher:
        most = 0

        def watch() -> None:
            nonlocal most
            deadline = time.monotonic() + 60
            mine = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            while app.answers[201] < TAPS:
                assert time.monotonic() < deadline
                row = watcher.execute(mine.encode()).fetchone()
                most = max(most, row[0] if row else 0)

        asyncio.run(ship(address, watch))
    assert 0 < most <= connection.CONNECTIONS
    store.close()


def test_a_sender_that_stalls_gives_its_turn_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "READ_S", 0.5)
    monkeypatch.setattr(intake, "AT_ONCE", 1)
    store = Store(url)
    migrate.upgrade(store)

    def dripping() -> Iterator[bytes]:
        yield b'{"id": '
        time.sleep(3)
        yield b"1}"

    with control(store) as (address, _):
        slow = threading.Thread(target=lambda: answers.append(_post(address, dripping())))
        answers: list[int] = []
        slow.start()
        time.sleep(0.2)
        assert _post(address, line(0, 0).data) == 201
        slow.join(30)
    assert answers == [408]
    store.close()


def _post(address: str, body: bytes | Iterator[bytes]) -> int:
    return httpx.post(f"{address}/v1/samples", content=body, timeout=30, trust_env=False).status_code
