"""Budgets from control to the tap, on both databases; and mined samples, which reach no figure."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from aiohttp import web
from fastapi import FastAPI
from fastapi.testclient import TestClient

from driftwatch.control import sampling
from driftwatch.control.app import create_app
from driftwatch.control.judge import fold
from driftwatch.settings import Settings
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, Event, Replay, Sample, Tap, Work
from driftwatch.tap.budget import Budget, Budgets
from driftwatch.tap.sampler import Room

from .test_control import SETTINGS, judge, metrics, record

TOKEN = "sesame"
NOON = 20_000 * 86_400.0 + 43_200


def settings_with(**changes: Any) -> Settings:
    return Settings(**SETTINGS | {"sampling": {"per_window": 8, "window_s": 15} | changes})


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    settings = settings_with(tokens_per_day=576_000)
    with TestClient(create_app(store, settings), raise_server_exceptions=False) as client:
        yield client


def asker(store: Store, settings: Settings, now: list[float]) -> TestClient:
    """The route alone, at a time of our choice."""
    app = FastAPI()
    app.include_router(sampling.router(store, settings, clock=lambda: now[0]))
    return TestClient(app)


def sampled(store: Store, now: float, **segments: tuple[int, float, int]) -> None:
    """Samples of the last hour by tenant: how many, what each stands for, and its tokens."""
    with store.write() as session:
        session.execute(sa.update(Sample).values(arrived_at=now - 3600.5))
        ids = iter(session.scalars(sa.select(Sample.id).order_by(Sample.id)).all())
        for tenant, (count, weight, tokens) in segments.items():
            for i in range(count):
                values = {"segment": f"tenant={tenant}", "weight": weight, "tokens": tokens, "labels": {}}
                at = now - 3599 + 3598 * i / max(count - 1, 1)
                session.execute(sa.update(Sample).where(Sample.id == next(ids)).values(**values, arrived_at=at))


def test_without_a_days_budget_the_settings_hold(store: Store) -> None:
    client = asker(store, settings_with(), [NOON])
    assert client.get("/v1/sampling").json() == {"per_window": 8, "segments": {}, "mining": {}, "taps": 1}


def test_a_wilder_segment_gets_more_and_the_budget_is_kept(client: TestClient, store: Store) -> None:
    settings = settings_with(tokens_per_day=576_000)
    calm = [record(i, "calm") for i in range(100)]
    wild = [record(100 + i, "wild") for i in range(100)]
    client.post("/v1/samples", json=calm + wild)
    judge(store, settings, 0.7)
    with store.write() as session:
        moments = {"tenant=calm": 0.02, "tenant=wild": 0.25}
        for cell in session.scalars(sa.select(Cell)):
            xs = np.random.default_rng(0).normal(0.5, moments[cell.segment], 5000)
            state = json.loads(json.dumps(cell.state))
            sums = [float(len(xs)), float(xs.sum()), float(len(xs)), float((xs**2).sum()), float(xs.sum()), 5000.0]
            state["baseline"]["moments"] = [5000, *sums]
            cell.state = state
    sampled(store, NOON, calm=(100, 360.0, 100), wild=(100, 360.0, 100))  # 10 requests a second each
    found = asker(store, settings, [NOON]).get("/v1/sampling").json()
    # 576,000 tokens a day are 100 a window of 15 s; those of the last hour, 20,000, are spent, and half a day is left.
    assert set(found["segments"]) == {"tenant=calm", "tenant=wild"}
    spent = 100 * sum(found["segments"].values())
    assert spent <= 2 * 100 + 2 * 100
    rich = settings_with(tokens_per_day=576_000_000)
    found = asker(store, rich, [NOON]).get("/v1/sampling").json()["segments"]
    assert found["tenant=calm"] == found["tenant=wild"] == 151  # all that comes in a window, rounded up
    middle = settings_with(tokens_per_day=57_600_000)
    found = asker(store, middle, [NOON]).get("/v1/sampling").json()["segments"]
    assert found["tenant=wild"] > 3 * found["tenant=calm"] >= 3
    assert Budgets.parse(asker(store, middle, [NOON]).get("/v1/sampling").content).segments == found  # as the tap reads
    assert 100 * sum(found.values()) <= 2 * 57_600_000 / 5760


def test_taps_share_the_budget(client: TestClient, store: Store) -> None:
    client.post("/v1/samples", json=[record(i) for i in range(50)])
    sampled(store, NOON, a=(50, 720.0, 100))
    now = [NOON]
    asked = asker(store, settings_with(tokens_per_day=5_760_000), now)
    alone = asked.get("/v1/sampling?tap=one").json()
    both = asked.get("/v1/sampling?tap=two").json()
    assert (alone["taps"], both["taps"]) == (1, 2)
    assert alone["segments"]["tenant=a"] == pytest.approx(2 * both["segments"]["tenant=a"], abs=1)
    now[0] += 61  # the first one has not asked for four windows
    assert asked.get("/v1/sampling?tap=two").json()["taps"] == 1


def test_several_controls_count_the_same_taps(client: TestClient, store: Store) -> None:
    """Each with a store of its own, as two processes have: whichever a tap asks, the day's tokens go out once."""
    client.post("/v1/samples", json=[record(i) for i in range(50)])
    sampled(store, NOON, a=(50, 720.0, 100))
    now, other = [NOON], Store(store.url.render_as_string(hide_password=False))
    settings = settings_with(tokens_per_day=5_760_000)
    one, two = asker(store, settings, now), asker(other, settings, now)
    alone = one.get("/v1/sampling?tap=a").json()
    for asked in (one, two):
        asked.get("/v1/sampling?tap=b")  # through a balancer: now here, now there
    found = [one.get("/v1/sampling?tap=a").json(), two.get("/v1/sampling?tap=b").json()]
    assert [each["taps"] for each in found] == [2, 2]
    whole = alone["segments"]["tenant=a"]
    assert whole - 2 <= sum(each["segments"]["tenant=a"] for each in found) <= whole
    assert two.get("/v1/sampling").json()["taps"] == 2, "who only looks gets no part"
    now[0] += 61
    assert two.get("/v1/sampling?tap=b").json()["taps"] == 1
    with other.read() as session:
        assert list(session.scalars(sa.select(Tap.id))) == ["b"]
    other.close()


def test_an_unchanged_answer_is_not_sent_again(store: Store) -> None:
    client = asker(store, settings_with(), [NOON])
    first = client.get("/v1/sampling?tap=a")
    again = client.get("/v1/sampling?tap=a", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    changed = client.get("/v1/sampling?tap=b", headers={"if-none-match": first.headers["etag"]})
    assert changed.status_code == 200


def test_budgets_are_for_those_who_have_the_token(store: Store) -> None:
    guarded = Settings(**SETTINGS | {"control": {"tick_s": 3600, "token": TOKEN}})
    with TestClient(create_app(store, guarded)) as client:
        assert client.get("/v1/sampling").status_code == 401
        assert client.get("/v1/sampling", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        long = client.get(f"/v1/sampling?tap={'x' * 65}", headers={"authorization": f"Bearer {TOKEN}"})
        assert long.status_code == 422


def test_mining_is_asked_for_where_an_event_is_open(client: TestClient, store: Store) -> None:
    base: dict[str, Any] = {
        "cell_id": None,
        "deployment_id": None,
        "split": "none",
        "draft": "incumbent",
        "cause": "unknown",
    }
    base |= {"opened_at": 1.0, "request_id": "r", "start_request_id": None, "details": {}}
    with store.write() as session:
        for i, (kind, segment, closed) in enumerate(
            [("drift", "tenant=a", None), ("drift", "tenant=b", 2.0), ("deployment_changed", "all", None)]
        ):
            session.add(Event(**base, id=f"e{i}", kind=kind, segment=segment, closed_at=closed))
    asked = asker(store, settings_with(mining_per_window=3), [NOON])
    assert asked.get("/v1/sampling").json()["mining"] == {"tenant=a": 3}
    assert asker(store, settings_with(), [NOON]).get("/v1/sampling").json()["mining"] == {}


def test_mined_samples_reach_no_figure_no_work_and_no_budget(client: TestClient, store: Store) -> None:
    settings = settings_with(tokens_per_day=576_000)
    engine = {"windows": 10, "drafted": 30, "accepted": 12, "accepted_histogram": [4, 2, 2, 2]}
    mined = [record(i, purpose="mining", engine=engine) for i in range(20)]
    estimated = [record(100 + i, engine=engine) for i in range(4)]
    assert client.post("/v1/samples", json=estimated[:2] + mined + estimated[2:]).json()["stored"] == 24
    judge(store, settings, 0.5)
    fold(store, settings, time.time())
    with store.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Work)) == 4
        assert session.scalar(sa.select(sa.func.count()).select_from(Replay)) == 4
        purposes = sa.select(Sample.purpose).join(Replay, Replay.sample_id == Sample.id).distinct()
        assert session.scalars(purposes).all() == ["estimate"]
        assert {cell.sums["requests"] for cell in session.scalars(sa.select(Cell))} == {4}
        folded = sa.select(sa.func.count()).where(Sample.purpose == "mining", Sample.live_folded_at.is_not(None))
        assert session.scalar(folded) == 0
    found = metrics(client)
    for name in ("shadow_requests_total", "estimated_requests_total", "live_requests_total"):
        assert sum(found[f"driftwatch_{name}"].values()) == 4
    sampled(store, NOON, a=(24, 150.0, 100))
    (rate,) = asker(store, settings_with(tokens_per_day=10**12), [NOON]).get("/v1/sampling").json()["segments"].values()
    assert rate == 3  # 4 estimates x 150 an hour: 2.5 in 15 s; the mined ones stand for nothing


class Control:
    """A server that answers as a test says: control at its worst."""

    def __init__(self) -> None:
        self.answer: tuple[int, bytes] = (200, b"{}")
        self.asked: list[web.Request] = []
        self.called: asyncio.Queue[None] = asyncio.Queue()

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(request)
        self.called.put_nowait(None)
        status, body = self.answer
        return web.Response(status=status, body=body, headers={"etag": '"v1"'} if status == 200 else {})

    async def url(self) -> str:
        server = web.Application()
        server.router.add_get("/v1/sampling", self.handle)
        self.runner = web.AppRunner(server)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]


async def test_the_tap_keeps_the_last_budgets_whatever_control_says() -> None:
    control = Control()
    budget = Budget(await control.url(), 8, every_s=0.02, token=TOKEN)
    assert budget.room("tenant=a") == Room(8, 0)
    running = asyncio.create_task(budget.run())

    async def says(status: int, body: bytes) -> None:
        control.answer = status, body
        control.called = asyncio.Queue()
        for _ in range(2):  # the first answer has been read when the second one is asked for
            await asyncio.wait_for(control.called.get(), 10)

    try:
        await says(503, b"")
        assert budget.room("tenant=a") == Room(8, 0)
        await says(200, b'{"per_window": 4, "segments": {"tenant=a": 12}, "mining": {"tenant=a": 2}, "taps": 1}')
        assert (budget.room("tenant=a"), budget.room("new")) == (Room(12, 2), Room(4, 0))
        assert control.asked[-1].headers["if-none-match"] == '"v1"'
        assert control.asked[-1].headers["authorization"] == f"Bearer {TOKEN}"
        assert len({request.query["tap"] for request in control.asked}) == 1
        for status, body in (
            (304, b""),
            (500, b""),
            (200, b"[]"),
            (200, b"nonsense"),
            (200, b'{"per_window": -1, "segments": {}, "mining": {}}'),
            (200, b'{"per_window": 1, "segments": {"a": "x"}, "mining": {}}'),
            (200, b" " * (1 << 20) + b"{}"),
        ):
            await says(status, body)
            assert budget.room("tenant=a") == Room(12, 2)
        await control.runner.cleanup()
        await asyncio.sleep(0.1)
        assert budget.room("tenant=a") == Room(12, 2)
        assert not running.done()
    finally:
        running.cancel()
        await control.runner.cleanup()


def test_a_budget_beyond_reason_is_cut() -> None:
    found = Budgets.parse(b'{"per_window": 8, "segments": {"a": 1000000000}, "mining": {}}')
    assert found.segments == {"a": 10_000}
