"""Several controls on one PostgreSQL: one leads; whatever becomes of it, nothing is lost, and nothing happens twice."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import sqlalchemy as sa

from driftwatch.store import migrate
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, Delivery, Event, Sample
from tests.e2e.machine import Machine, free_port, until
from tests.receiving import Receiver, receiving

WITHIN_S = 15.0
TENANTS = [f"t{i}" for i in range(5)]
FIGURES = {"windows": 20, "drafted": 60, "drafted_per_window": [3] * 20}
GOOD, BAD = [3, 3, 2, 3] * 5, [0, 1, 0, 0] * 5
"""Accepted proposals of each window."""


@pytest.fixture
def url(postgres: str) -> str:
    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(postgres, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    return postgres.replace("postgresql://", "postgresql+psycopg://").replace("/postgres?", f"/{name}?")


class Controls:
    """Three controls with the same settings, each with a port of its own."""

    def __init__(self, folder: Path, url: str, hook: str) -> None:
        self.machine = Machine(
            folder,
            store={"url": url},
            models=[{"name": "*", "drafts": [{"name": "incumbent"}], "gamma": 3}],
            detect={
                "baseline": {"min_requests": 30, "min_hours": 0},
                "tolerance": 0.15,
                "requests_between_false_alarms": 1000,
            },
            webhooks=[{"name": "hook", "url": hook}],
            retrain={"export_dir": str(folder / "exports")},
        )
        self.addresses: dict[str, str] = {}
        for name in ("first", "second", "third"):
            port = free_port()
            self.addresses[name] = f"http://127.0.0.1:{port}"
            os.environ["DRIFTWATCH_CONTROL__LISTEN"] = f"127.0.0.1:{port}"
            self.machine.start(name, *_command(self.machine))
        del os.environ["DRIFTWATCH_CONTROL__LISTEN"]
        for address in self.addresses.values():
            self.machine.wait_for(f"{address}/readyz")

    def leaders(self) -> list[str]:
        """Those who say that they lead."""
        found = []
        for name in self.running():
            try:
                text = httpx.get(f"{self.addresses[name]}/metrics", timeout=5, trust_env=False).text
            except httpx.HTTPError:
                continue
            found += [name] if "driftwatch_leader 1.0" in text else []
        return found

    def running(self) -> list[str]:
        return [name for name in self.addresses if name in self.machine.processes]

    def the_leader(self, seconds: float = WITHIN_S) -> str:
        (leader,) = until(self.leaders, seconds)
        return str(leader)


def _command(machine: Machine) -> list[str]:
    return [sys.executable, "-m", "driftwatch", "control", "--config", str(machine.config)]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as one:
        yield one


@pytest.fixture
def controls(tmp_path: Path, url: str, receiver: Receiver) -> Iterator[Controls]:
    three = Controls(tmp_path, url, receiver.url)
    yield three
    for process in three.machine.processes.values():
        process.send_signal(signal.SIGCONT)
    three.machine.stop()


class Traffic(threading.Thread):
    """Samples of all tenants to all controls in turn; what one does not take goes to the next, until one has."""

    def __init__(self, controls: Controls) -> None:
        super().__init__()
        self._controls = controls
        self._over = threading.Event()
        self.acknowledged: list[str] = []
        self.accepted = GOOD

    def run(self) -> None:
        targets = itertools.cycle(self._controls.addresses.values())
        with httpx.Client(timeout=20, trust_env=False) as client:
            for number in itertools.count():
                if self._over.wait(0.05):
                    return
                body = [self._record(number, tenant) for tenant in TENANTS]
                while not self._send(client, next(targets), body):
                    time.sleep(0.02)
                self.acknowledged += [one["id"] for one in body]

    def _send(self, client: httpx.Client, address: str, body: list[dict[str, Any]]) -> bool:
        try:
            return client.post(f"{address}/v1/samples", json=body).status_code == 201
        except httpx.HTTPError:
            return False

    def _record(self, number: int, tenant: str) -> dict[str, Any]:
        engine = FIGURES | {"accepted": sum(self.accepted), "accepted_per_window": self.accepted}
        ids = {"prompt_token_ids": [1, 2], "output_token_ids": list(range(sum(self.accepted) + 21))}
        return {"id": f"{tenant}-{number}", "model": "m", "labels": {"tenant": tenant}, "engine": engine} | ids

    def stop(self) -> None:
        self._over.set()
        self.join()


def opened(store: Store) -> Counter[str]:
    with store.read() as session:
        return Counter(session.scalars(sa.select(Event.segment).where(Event.kind == "drift")))


def folded(store: Store) -> int:
    """Requests in all cells."""
    with store.read() as session:
        return sum(int(cell.sums["requests"]) for cell in session.scalars(sa.select(Cell)))


def test_killed_leaders_lose_no_event_and_double_none(controls: Controls, receiver: Receiver, url: str) -> None:
    store = Store(url)
    traffic = Traffic(controls)
    traffic.start()
    try:
        until(lambda: len(traffic.acknowledged) > 60 * len(TENANTS))
        traffic.accepted = BAD
        took = []
        for _ in range(2):
            time.sleep(0.7)  # into the fall: alarms are near, or just written, or on their way
            leader = controls.the_leader()
            controls.machine.kill(leader)
            begin = time.monotonic()
            after = controls.the_leader()
            took.append(time.monotonic() - begin)
            assert after != leader
        until(lambda: len(opened(store)) == len(TENANTS))
        until(lambda: len(traffic.acknowledged) > 120 * len(TENANTS))
    finally:
        traffic.stop()
    assert max(took) < WITHIN_S
    until(lambda: folded(store) == len(traffic.acknowledged))
    with store.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Sample)) == len(set(traffic.acknowledged))
    assert opened(store) == dict.fromkeys((f"tenant={tenant}" for tenant in TENANTS), 1)
    until(lambda: _states(store).keys() == {"delivered"})
    with store.read() as session:
        sent = list(session.scalars(sa.select(Delivery.event_id)))
    assert len(sent) == len(set(sent))
    assert set(receiver.ids) == set(sent)
    # Who is killed between an answer and its record has it sent again, under the same id.
    assert len(receiver.ids) - len(sent) <= 2
    store.close()


def _states(store: Store) -> Counter[str]:
    with store.read() as session:
        return Counter(session.scalars(sa.select(Delivery.state)))


def test_followers_take_samples_serve_reads_and_export_only_themselves(controls: Controls) -> None:
    logs = [controls.machine.log(name) for name in controls.addresses]
    assert not [log for log in logs if "error" in log.lower()], "they start at once, and one of them migrates"
    leader = controls.the_leader()
    follower = next(name for name in controls.running() if name != leader)
    address = controls.addresses[follower]
    record = {"id": "x", "prompt_token_ids": [1, 2], "output_token_ids": [3, 4], "labels": {"tenant": "a"}}
    assert httpx.post(f"{address}/v1/samples", json=record, trust_env=False).status_code == 201
    for path in ("/v1/segments", "/v1/events", "/v1/deployments", "/ui", "/readyz"):
        assert httpx.get(address + path, trust_env=False, timeout=20).status_code == 200, path
    names = {
        name: set(re.findall(r"^([a-z_]+)", httpx.get(f"{at}/metrics", trust_env=False).text, re.MULTILINE))
        for name, at in controls.addresses.items()
    }
    own = {name for name in names[follower] if name.startswith("driftwatch_")}
    assert own == {"driftwatch_leader"}
    assert "process_cpu_seconds_total" in names[follower]
    assert "driftwatch_samples_total" in names[leader]


def test_a_leader_that_hangs_or_goes_in_order_is_replaced(controls: Controls, url: str) -> None:
    hung = controls.the_leader()
    controls.machine.kill(hung, signal.SIGSTOP)
    stopped = controls.machine.processes.pop(hung)
    begin = time.monotonic()
    second = controls.the_leader()
    assert time.monotonic() - begin < WITHIN_S
    stopped.send_signal(signal.SIGCONT)
    controls.machine.processes[hung] = stopped
    time.sleep(3)
    assert controls.leaders() == [second], "who was away follows"
    controls.machine.kill(second, signal.SIGTERM)
    begin = time.monotonic()
    assert controls.the_leader() != second
    assert time.monotonic() - begin < WITHIN_S
    store = Store(url)
    assert migrate.problems(store) == []
    store.close()


def test_a_leader_whose_session_the_server_ends_stops_at_once(controls: Controls, url: str) -> None:
    leader = controls.the_leader()
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as admin:
        held = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"
        admin.execute(held.encode())
    until(lambda: "leads no longer" in controls.machine.log(leader), WITHIN_S)
    assert len(until(controls.leaders, WITHIN_S)) == 1
