"""What tests of retraining share: settings, requests that are judged, an alarm, and what was asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import httpx
import sqlalchemy as sa
import yaml
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session

from driftwatch.control.app import create_app
from driftwatch.retrain.policy import propose
from driftwatch.settings import Settings
from driftwatch.store.connection import Store
from driftwatch.store.migrate import upgrade
from driftwatch.store.schema import Cell, Delivery, Event, Retrain
from tests.e2e.machine import Machine

from .test_control import judge, record

CHAIN = Path(__file__).parents[1] / "data" / "models" / "chain"
HOOK = {"name": "hook", "url": "http://127.0.0.1:9/hook", "secrets": ["whsec_c2VjcmV0"]}


def settings_of(folder: Path, **retrain: Any) -> Settings:
    return Settings(
        models=[{"name": "*", "drafts": [{"name": "incumbent", "path": str(CHAIN)}], "gamma": 3}],
        detect={"baseline": {"min_requests": 10_000}},
        webhooks=[HOOK],
        control={"tick_s": 3600, "token": "secret"},
        shadow={"device": "cpu", "threads": 1},
        retrain={"export_dir": folder / "exports", "candidates_dir": folder / "candidates"} | retrain,
    )


@contextmanager
def controlled(store: Store, settings: Settings) -> Iterator[TestClient]:
    """Control, asked with its token; the folder of candidates is there."""
    assert settings.retrain.candidates_dir is not None
    settings.retrain.candidates_dir.mkdir(exist_ok=True)
    with TestClient(create_app(store, settings), raise_server_exceptions=False) as client:
        client.headers["authorization"] = "Bearer secret"
        yield client


def send(client: TestClient, numbers: range, tenant: str = "a", **fields: Any) -> None:
    """Requests with tokens of their own, so that none is another's duplicate."""
    records = [record(i, tenant, output_token_ids=[i, *range(32)]) | fields for i in numbers]
    assert client.post("/v1/samples", json=records).json()["stored"] == len(records)


def alarm(store: Store, settings: Settings, *, start: float, segment: str = "tenant=a", **details: Any) -> Retrain:
    """An event as the detector writes it, and the decision on it."""
    with store.write() as session:
        number = session.scalar(sa.select(sa.func.count()).select_from(Event)) or 0
        return alarmed(session, settings, start=start, segment=segment, number=number, **details)


def alarmed(
    session: Session, settings: Settings, *, start: float, segment: str, number: int, **details: Any
) -> Retrain:
    """The same in a transaction of the caller's."""
    cell = session.scalars(sa.select(Cell).where(Cell.segment == segment).order_by(Cell.id.desc())).first()
    assert cell is not None
    event = Event(
        id=f"event{number}",
        kind="drift",
        cell_id=cell.id,
        deployment_id=cell.deployment_id,
        segment=segment,
        split=cell.split,
        draft=cell.draft,
        cause=details.get("cause", "unknown"),
        opened_at=time.time(),
        closed_at=time.time(),
        request_id="r1",
        start_request_id="r1",
        details={"start_served_at": start, "cause": "unknown"} | details,
    )
    session.add(event)
    session.flush()
    return propose(session, event, cooldown_s=3600, policy=settings.retrain.policy)


@contextmanager
def asking(folder: Path, **settings: Any) -> Iterator[tuple[Machine, Store, str]]:
    """A machine whose control runs and has asked for training after 40 requests; its store, and the retrain's id."""
    models = CHAIN.parent
    model = {"name": "*", "target": str(models / "target"), "drafts": [{"path": str(models / "eagle3")}], "gamma": 3}
    machine = Machine(folder, models=[model], detect={"baseline": {"min_requests": 10_000}}, **settings)
    read = Settings(**yaml.safe_load(machine.config.read_text()))
    store = Store(read.store.url)
    try:
        upgrade(store)
        machine.start_control()
        records = [record(i, "a", output_token_ids=[i, *range(32)]) for i in range(40)]
        assert httpx.post(f"{machine.control}/v1/samples", json=records).json()["stored"] == 40
        judge(store, read, 0.5)
        yield machine, store, alarm(store, read, start=0.0).id
    finally:
        machine.stop()
        store.close()


def lines(uri: str) -> list[dict[str, Any]]:
    with fsspec.open(uri, "rt") as file:
        return [json.loads(line) for line in file]


def asked(store: Store) -> dict[str, Any]:
    """The one request that was announced."""
    with store.read() as session:
        query = sa.select(Delivery.body).where(Delivery.type == "driftwatch.retrain.requested")
        found: dict[str, Any] = json.loads(session.scalars(query).one())
    return found


def file_bytes(uri: str) -> bytes:
    with fsspec.open(uri, "rb") as file:
        found: bytes = file.read()
    return found


def the_cell(store: Store) -> Cell:
    with store.read() as session:
        return session.scalars(sa.select(Cell).where(Cell.segment == "tenant=a")).one()
