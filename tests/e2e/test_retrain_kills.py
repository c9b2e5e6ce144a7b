"""SIGKILL between decision and delivery, fifty times: every event arrives, each under one id, with its data whole."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from driftwatch.records import Record
from driftwatch.retrain.delivery import Courier
from driftwatch.retrain.policy import propose
from driftwatch.retrain.request import request
from driftwatch.settings import Policy, Settings
from driftwatch.store import samples
from driftwatch.store.connection import Store
from driftwatch.store.schema import Delivery, Deployment, Event, Retrain
from tests.receiving import receiving

KILLS = 50


def settings_of(folder: Path, url: str) -> Settings:
    return Settings(
        store={"url": f"sqlite:///{folder / 'driftwatch.db'}"},
        webhooks=[{"name": "hook", "url": url, "secrets": ["whsec_c2VjcmV0"]}],
        retrain={"export_dir": folder / "exports"},
    )


def decide(store: Store, number: int) -> None:
    """One alarm, and the decision on it, in one transaction. Each is for a draft of its own, so that none is open."""
    with store.write() as session:
        deployment = session.scalars(sa.select(Deployment)).one()
        event = Event(
            id=f"event{number}",
            kind="drift",
            cell_id=None,
            deployment_id=deployment.id,
            segment="tenant=a",
            split="none",
            draft=f"draft{number}",
            cause="traffic",
            opened_at=time.time(),
            closed_at=None,
            request_id="r0",
            start_request_id="r0",
            details={"start_served_at": 0.0, "cause": "traffic"},
        )
        session.add(event)
        session.flush()
        propose(session, event, cooldown_s=0.0, policy=Policy())


def control(folder: str, url: str, first: int) -> None:
    """What control does between an alarm and its delivery, over and over, until it is killed."""
    settings = settings_of(Path(folder), url)
    store = Store(settings.store.url)
    courier = Courier(store, settings.webhooks)
    number = first
    while True:
        request(store, settings, time.time())
        courier.run()
        decide(store, number)
        number += 1


def test_a_killed_control_loses_no_event_and_doubles_none(tmp_path: Path, sqlite_store: Store) -> None:
    records = [
        Record(id=f"r{i}", prompt_token_ids=[1, i], output_token_ids=[2, 3], labels={"tenant": "a"}, model="m")
        for i in range(20)
    ]
    with sqlite_store.write() as session:
        samples.add(session, [(record, []) for record in records], now=1.0, max_segments=10)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["driftwatch.retrain.request", "driftwatch.retrain.delivery", __name__])
    chance = random.Random(5)
    with receiving() as receiver:
        url = receiver.url
        for kill in range(KILLS):
            child = processes.Process(target=control, args=(str(tmp_path), url, 1000 * kill))
            child.start()
            before = len(set(receiver.ids))
            deadline = time.monotonic() + 20
            while len(set(receiver.ids)) == before and time.monotonic() < deadline:
                time.sleep(0.001)  # until it is at work: a kill during its start would show nothing
            time.sleep(chance.uniform(0, 0.06))
            child.kill()
            child.join()
        settings = settings_of(tmp_path, url)
        request(sqlite_store, settings, time.time())
        with sqlite_store.write() as session:
            session.execute(sa.update(Delivery).values(due_at=0.0))
        courier = Courier(sqlite_store, settings.webhooks)
        courier.run()
        courier.close()
    with sqlite_store.read() as session:
        retrains = session.scalars(sa.select(Retrain)).all()
        events = set(session.scalars(sa.select(Event.id)))
        states = set(session.scalars(sa.select(Delivery.state)))
    assert len(events) >= KILLS
    assert {retrain.event_id for retrain in retrains} == events
    assert {retrain.state for retrain in retrains} == {"requested"}
    assert states == {"delivered"}
    bodies: dict[str, set[bytes]] = defaultdict(set)
    for headers, body in receiver.requests:
        bodies[headers["webhook-id"]].add(body)
    assert set(bodies) == {retrain.id for retrain in retrains}
    for id, different in bodies.items():
        (body,) = different  # the same bytes on every attempt
        event: dict[str, Any] = json.loads(body)
        assert (event["id"], event["data"]["idempotency_key"]) == (id, id)
        data = Path(urlsplit(event["data"]["data"]["uri"]).path).read_bytes()
        assert hashlib.sha256(data).hexdigest() == event["data"]["data"]["sha256"]
    assert not list((tmp_path / "exports").glob(".*"))  # nothing half-written is left of those that were killed
