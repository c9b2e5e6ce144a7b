"""A retraining pipeline's side of driftwatch's webhook: verify, start one run for each request, report back.

Small enough to be read and changed; requirements.txt has what it needs, and nothing of driftwatch is among it.
Settings are environment variables:

    PIPELINE_SECRET    the endpoint's secret, `whsec_...`, as in driftwatch's `webhooks[].secrets`
    PIPELINE_FOLDER    where requests, data and results lie; candidates must be visible to driftwatch's shadow there
    PIPELINE_COMMAND   what trains: run in a folder that holds request.json, run.yaml, run.offline.yaml, train.jsonl and
                       eval.jsonl, with OUTPUT_DIR already replaced; it leaves the draft in ./draft

    uvicorn receiver:app --host 0.0.0.0 --port 9000
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fsspec
import httpx
from fastapi import FastAPI, HTTPException, Request, Response
from standardwebhooks import Webhook, WebhookVerificationError

FOLDER = Path(os.environ["PIPELINE_FOLDER"]).absolute()
COMMAND = shlex.split(os.environ["PIPELINE_COMMAND"])
VERIFIER = Webhook(os.environ["PIPELINE_SECRET"])
REQUESTED = "driftwatch.retrain.requested"
PAUSES_S = (1, 5, 30, 120, 600)


@asynccontextmanager
async def _resume(_app: FastAPI) -> AsyncIterator[None]:
    """Go on with what a receiver that died had taken: it answered for it."""
    for request in sorted(FOLDER.glob("*/request.json")):
        if not (request.parent / "over").exists():
            _start(request.parent)
    yield


app = FastAPI(lifespan=_resume)


@app.post("/hook", status_code=204)
async def hook(request: Request) -> Response:
    """Answer once the request is kept. The same event may come again: it has the same id, and one folder."""
    body = await request.body()
    try:
        event = VERIFIER.verify(body, dict(request.headers))
    except WebhookVerificationError:
        raise HTTPException(401, "the signature does not fit") from None
    if event["type"] == REQUESTED:
        folder = FOLDER / hashlib.sha256(event["id"].encode()).hexdigest()[:16]
        if not (folder / "request.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "request.part").write_bytes(body)
            (folder / "request.part").rename(folder / "request.json")
            _start(folder)
    return Response(status_code=204)


def _start(folder: Path) -> None:
    threading.Thread(target=_run, args=(folder,), daemon=True).start()


def _run(folder: Path) -> None:
    data = json.loads((folder / "request.json").read_text())["data"]
    try:
        _report(data, "state", state="accepted")
        _fetch(data, folder)
        _report(data, "state", state="training")
        with (folder / "log").open("ab") as log:
            subprocess.run(COMMAND, cwd=folder, stdout=log, stderr=log, check=True)
        _report(data, "candidate", path=str(folder / "draft"))
    except (OSError, ValueError, subprocess.SubprocessError, httpx.HTTPError) as error:
        _report(data, "state", state="failed", reason=f"{type(error).__name__}: {error}"[:1000])
    (folder / "over").touch()


def _fetch(data: dict[str, Any], folder: Path) -> None:
    """Training data by reference: read it, compare the hash."""
    for name, uri, expected in (
        ("train.jsonl", data["data"]["uri"], data["data"]["sha256"]),
        ("eval.jsonl", data["data"]["eval_uri"], data["data"]["eval_sha256"]),
    ):
        with fsspec.open(uri, "rb") as file:
            content = file.read()
        if hashlib.sha256(content).hexdigest() != expected:
            raise ValueError(f"{uri} is not what was announced")
        (folder / name).write_bytes(content)
    for name, key in (("run.yaml", "run_configuration"), ("run.offline.yaml", "offline_run_configuration")):
        if data["specforge"] is not None:
            (folder / name).write_text(data["specforge"][key].replace("OUTPUT_DIR", str(folder)))


def _report(data: dict[str, Any], what: str, **body: Any) -> None:
    """Tell driftwatch, with the token of this retrain. A step that it knows already (409) is no failure; one that it
    cannot take at the moment is told again.
    """
    headers = {"authorization": f"Bearer {data['callback']['token']}"}
    for pause_s in (*PAUSES_S, None):
        try:
            answer = httpx.post(f"{data['callback']['url']}/{what}", json=body, headers=headers, timeout=30)
            if answer.status_code != 409:
                answer.raise_for_status()
            return
        except httpx.HTTPError as error:
            refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
            if refused or pause_s is None:
                raise
            time.sleep(pause_s)
