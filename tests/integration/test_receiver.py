"""A receiver written from `deploy/retrain-pipeline/README.md` and the schemas alone, with nothing of ours imported.

It is what somebody would write in another language: an HTTP server, HMAC, JSON, a schema, files.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from fastapi.testclient import TestClient
from jsonschema import Draft202012Validator

from driftwatch.control.app import create_app
from driftwatch.retrain.delivery import Courier
from driftwatch.retrain.request import request
from driftwatch.settings import Webhook
from driftwatch.store.connection import Store

from .retraining import CHAIN, alarm, send, settings_of
from .test_control import judge

ROOT = Path(__file__).parents[2]
KEY = b"0123456789abcdef01234567"


class Receiver:
    """Steps 1 to 3 of the README: verify, tell repetitions, fetch the data and start."""

    def __init__(self, secret: str, schemas: Path, folder: Path) -> None:
        self.key = base64.b64decode(secret.removeprefix("whsec_"))
        self.schemas, self.folder = schemas, folder
        self.started: dict[str, dict[str, Any]] = {}

    def take(self, headers: dict[str, str], body: bytes) -> int:
        if abs(time.time() - int(headers["webhook-timestamp"])) > 300:
            return 401
        signed = headers["webhook-id"].encode() + b"." + headers["webhook-timestamp"].encode() + b"." + body
        expected = "v1," + base64.b64encode(hmac.new(self.key, signed, hashlib.sha256).digest()).decode()
        if not any(hmac.compare_digest(one, expected) for one in headers["webhook-signature"].split(" ")):
            return 401
        event = json.loads(body)
        name, version = event["dataschema"].removeprefix("urn:driftwatch:driftwatch.").split(":")
        schema = json.loads((self.schemas / f"{name}.{version}.json").read_text())
        Draft202012Validator(schema).validate(event)
        if event["type"] == "driftwatch.retrain.requested" and headers["webhook-id"] not in self.started:
            self.start(event["data"])
            self.started[headers["webhook-id"]] = event["data"]
        return 204

    def start(self, data: dict[str, Any]) -> None:
        for name, uri, expected in (
            ("train.jsonl", data["data"]["uri"], data["data"]["sha256"]),
            ("eval.jsonl", data["data"]["eval_uri"], data["data"]["eval_sha256"]),
        ):
            content = Path(unquote(urlsplit(uri).path)).read_bytes()
            assert hashlib.sha256(content).hexdigest() == expected
            (self.folder / name).write_bytes(content)
        run = data["specforge"]["run_configuration"]
        for placeholder in data["specforge"]["placeholders"]:
            run = run.replace(placeholder, {"OUTPUT_DIR": str(self.folder)}.get(placeholder, "here"))
        (self.folder / "run.yaml").write_text(run)


@pytest.mark.parametrize("secret_known", [True, False])
def test_the_documentation_is_enough_to_start_a_run(sqlite_store: Store, tmp_path: Path, secret_known: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    known = KEY if secret_known else KEY[::-1]
    receiver = Receiver(
        "whsec_" + base64.b64encode(known).decode(), ROOT / "driftwatch" / "retrain" / "schemas", folder
    )

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(receiver.take({key.lower(): value for key, value in self.headers.items()}, body))
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/"
    hook = Webhook(name="r", url=url, secrets=["whsec_" + base64.b64encode(KEY).decode()])
    models = CHAIN.parent
    base = settings_of(tmp_path)
    model = {"target": str(models / "target"), "drafts": [{"path": str(models / "eagle3")}], "gamma": 3}
    settings = base.model_copy(update={"webhooks": [hook], "models": [base.models[0].model_validate(model)]})
    try:
        with TestClient(create_app(sqlite_store, settings)) as client:
            client.headers["authorization"] = "Bearer secret"
            send(client, range(40))
            judge(sqlite_store, settings, 0.5)
            retrain = alarm(sqlite_store, settings, start=0.0)
            assert request(sqlite_store, settings, time.time()) == 1
            courier = Courier(sqlite_store, settings.webhooks)
            assert courier.run() == (1 if secret_known else 0)
            courier.close()
            if not secret_known:
                assert receiver.started == {}
                return
            data = receiver.started[retrain.id]
            run = yaml.safe_load((folder / "run.yaml").read_text())
            assert Path(run["data"]["prompts_path"]) == folder / "train.jsonl"
            assert len((folder / "train.jsonl").read_text().splitlines()) == data["data"]["rows"]
            # Step 4: report, with the token that the request carried.
            report = urlsplit(data["callback"]["url"]).path
            client.headers["authorization"] = f"Bearer {data['callback']['token']}"
            assert client.post(f"{report}/state", json={"state": "training"}).status_code == 200
            assert client.get(report).json()["state"] == "training"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
