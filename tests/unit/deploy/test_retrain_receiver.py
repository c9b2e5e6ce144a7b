"""The reference receiver: one run an event, whatever comes twice or is away for a while."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi.testclient import TestClient
from standardwebhooks import Webhook

from tests.e2e.machine import until
from tests.serving import serving

RECEIVER = Path(__file__).parents[3] / "deploy" / "retrain-pipeline" / "receiver.py"
SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"


class Control(ThreadingHTTPServer):
    """driftwatch's side of the callback: the reports that came, and what each was answered."""

    def __init__(self, statuses: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), Reports)
        self.statuses = statuses
        self.reports: list[tuple[str, dict[str, Any], int]] = []

    @property
    def told(self) -> list[str]:
        """Steps that were taken."""
        return [body.get("state", path) for path, body, status in self.reports if status == 200]


class Reports(BaseHTTPRequestHandler):
    server: Control

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        self.server.reports.append((self.path, body, status))
        assert self.headers["authorization"] == "Bearer of-this-retrain"
        self.send_response(status)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def control(*statuses: int) -> Iterator[Control]:
    server = Control(list(statuses))
    with serving(server):
        yield server


@pytest.fixture
def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PIPELINE_SECRET", SECRET)
    monkeypatch.setenv("PIPELINE_FOLDER", str(tmp_path / "runs"))
    monkeypatch.setenv("PIPELINE_COMMAND", "cp train.jsonl draft")
    spec = importlib.util.spec_from_file_location("receiver", RECEIVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAUSES_S", (0.01, 0.01))
    return module


def event(tmp_path: Path, server: Control, **changed: Any) -> bytes:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2], "loss_mask": [0, 1]}\n')
    sha256 = hashlib.sha256(rows.read_bytes()).hexdigest()
    data = {"uri": rows.as_uri(), "sha256": sha256, "eval_uri": rows.as_uri(), "eval_sha256": sha256} | changed
    callback = {"url": f"http://127.0.0.1:{server.server_port}", "token": "of-this-retrain"}
    specforge = {"run_configuration": "out: OUTPUT_DIR", "offline_run_configuration": "offline: OUTPUT_DIR"}
    whole = {"data": data, "specforge": specforge, "callback": callback}
    return json.dumps({"id": "e1", "type": "driftwatch.retrain.requested", "data": whole}).encode()


def post(client: TestClient, body: bytes, secret: str = SECRET) -> int:
    now = datetime.now(UTC)
    signed = Webhook(secret).sign("e1", now, body.decode())
    headers = {"webhook-id": "e1", "webhook-timestamp": str(int(now.timestamp())), "webhook-signature": signed}
    return client.post("/hook", content=body, headers=headers).status_code


def folder(receiver: ModuleType) -> Path:
    (only,) = Path(receiver.FOLDER).iterdir()
    return only


def test_an_event_is_one_run_however_often_it_comes(receiver: ModuleType, tmp_path: Path) -> None:
    with control() as server, TestClient(receiver.app) as client:
        body = event(tmp_path, server)
        assert [post(client, body) for _ in range(3)] == [204] * 3
        until((folder(receiver) / "over").exists)
        assert post(client, body) == 204
    with TestClient(receiver.app):  # started anew: nothing is left to do
        pass
    run = folder(receiver)
    assert server.told == ["accepted", "training", "/candidate"]
    assert server.reports[-1][1] == {"path": str(run / "draft")}
    assert (run / "draft").read_bytes() == (run / "train.jsonl").read_bytes()
    assert (run / "run.yaml").read_text() == f"out: {run}"
    assert (run / "run.offline.yaml").read_text() == f"offline: {run}"


def test_a_forged_event_starts_nothing(receiver: ModuleType, tmp_path: Path) -> None:
    with control() as server, TestClient(receiver.app) as client:
        assert post(client, event(tmp_path, server), SECRET[:-4] + "eHg=") == 401
    assert not Path(receiver.FOLDER).exists()


def test_a_run_that_was_taken_goes_on_after_a_restart(receiver: ModuleType, tmp_path: Path) -> None:
    run = Path(receiver.FOLDER) / "0123456789abcdef"
    run.mkdir(parents=True)
    with control(409) as server:  # "accepted" was told before
        (run / "request.json").write_bytes(event(tmp_path, server))
        with TestClient(receiver.app):
            until((run / "over").exists)
    assert server.told == ["training", "/candidate"]


def test_a_control_that_is_away_is_told_again(receiver: ModuleType, tmp_path: Path) -> None:
    with control(503, 503) as server, TestClient(receiver.app) as client:
        assert post(client, event(tmp_path, server)) == 204
        until((folder(receiver) / "over").exists)
    assert server.told == ["accepted", "training", "/candidate"]
    assert len(server.reports) == 5


@pytest.mark.parametrize("command", ["false", "no-such-program"])
def test_a_training_that_fails_is_told(
    receiver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(receiver, "COMMAND", [command])
    with control() as server, TestClient(receiver.app) as client:
        post(client, event(tmp_path, server))
        until((folder(receiver) / "over").exists)
    assert server.told == ["accepted", "training", "failed"]
    assert command in server.reports[-1][1]["reason"]


def test_data_that_is_not_what_was_announced_is_not_trained_on(receiver: ModuleType, tmp_path: Path) -> None:
    with control() as server, TestClient(receiver.app) as client:
        post(client, event(tmp_path, server, sha256="0" * 64))
        until((folder(receiver) / "over").exists)
    assert server.told == ["accepted", "failed"]
    assert "is not what was announced" in server.reports[-1][1]["reason"]
