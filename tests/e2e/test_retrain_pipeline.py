"""The loop over real processes: control, shadow and the reference receiver, from the decision to the verdict."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

from driftwatch.retrain.policy import propose
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, Event
from tests.e2e.machine import CHAIN, TRACE, Machine, free_port, until

ROOT = Path(__file__).parents[2]
SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()


def records(name: str, copies: int) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()]
    return [
        row | {"id": f"{name}{copy}-{row['id']}", "model": "m", "labels": {"tenant": "a"}}
        for copy in range(copies)
        for row in rows
    ]


def test_a_request_is_trained_on_and_its_candidate_judged(tmp_path: Path) -> None:
    """The command only copies the incumbent, so the candidate is no better, and that is what driftwatch says of it."""
    shutil.copytree(CHAIN, tmp_path / "trained")
    port = free_port()
    machine = Machine(
        tmp_path,
        models=[{"name": "*", "drafts": [{"name": "incumbent", "path": str(CHAIN)}], "gamma": 3}],
        webhooks=[{"name": "retrain", "url": f"http://127.0.0.1:{port}/hook", "secrets": [SECRET]}],
        retrain={
            "export_dir": str(tmp_path / "exports"),
            "candidates_dir": str(tmp_path / "candidates"),
            "data": {"low_share": 0, "replay_share": 0},
            "gate": {"margin": 0.2},
        },
    )
    environment = {
        "PIPELINE_SECRET": SECRET,
        "PIPELINE_FOLDER": str(tmp_path / "candidates"),
        "PIPELINE_COMMAND": f"cp -r {tmp_path / 'trained'} draft",
    }
    receiver = ("env", *(f"{key}={value}" for key, value in environment.items()), sys.executable, "-m", "uvicorn")
    try:
        machine.start("db", sys.executable, "-m", "driftwatch", "db", "upgrade", "--config", str(machine.config)).wait(
            60
        )
        machine.start("control")
        machine.start("shadow")
        machine.start(
            "receiver",
            *receiver,
            "--app-dir",
            str(ROOT / "deploy" / "retrain-pipeline"),
            "receiver:app",
            "--port",
            str(port),
        )
        until(lambda: answers(f"{machine.control}/readyz"))
        until(lambda: answers(f"http://127.0.0.1:{port}/openapi.json"))
        assert httpx.post(f"{machine.control}/v1/samples", json=records("before", 5)).status_code == 201
        until(lambda: judged(machine) == 5 * 72)
        start = time.time()
        assert httpx.post(f"{machine.control}/v1/samples", json=records("since", 1)).status_code == 201
        until(lambda: judged(machine) == 6 * 72)
        retrain = decide(Store(f"sqlite:///{tmp_path / 'driftwatch.db'}"), start)
        over = until(lambda: ended(machine, retrain))
    finally:
        machine.stop()
    steps = [step["after"] for step in over["history"]]
    assert steps == ["proposed", "requested", "accepted", "training", "candidate_ready", "evaluating", "rejected"]
    (candidate,) = over["candidates"]
    assert candidate["fingerprint"] == candidate["incumbent_fingerprint"]
    assert candidate["verdict"]["overall"]["difference"] == 0.0
    assert over["reason"] == "no gain of 0.2 in tenant=a"
    (folder,) = (tmp_path / "candidates").iterdir()
    assert (folder / "train.jsonl").read_bytes()
    assert (folder / "over").exists()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def judged(machine: Machine) -> int:
    segments = httpx.get(f"{machine.control}/v1/segments").json()["segments"]
    return sum(cell["requests"] for segment in segments for cell in segment["cells"] if cell["channel"] == "shadow")


def ended(machine: Machine, id: str) -> dict[str, Any] | None:
    found: dict[str, Any] = httpx.get(f"{machine.control}/v1/retrains/{id}").json()
    return found if found["state"] in ("promoted", "rejected", "failed") else None


def decide(store: Store, start: float) -> str:
    """An alarm as the detector writes it: recorded traffic of 72 requests gives none by itself."""
    with store.write() as session:
        cell = session.scalars(sa.select(Cell).where(Cell.channel == "shadow")).one()
        event = Event(
            id="event",
            kind="drift",
            cell_id=cell.id,
            deployment_id=cell.deployment_id,
            segment=cell.segment,
            split=cell.split,
            draft=cell.draft,
            cause="traffic",
            opened_at=time.time(),
            closed_at=time.time(),
            request_id="x",
            start_request_id="x",
            details={"start_served_at": start, "cause": "traffic"},
        )
        session.add(event)
        session.flush()
        id = propose(session, event, cooldown_s=0.0).id
    store.close()
    return id
