"""The whole way in JavaScript (``receiver.mjs``), against a control and a shadow that run: verify, train, report, and
take the verdict; written from the documentation alone."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.machine import until

from .retraining import asking

SCRIPT = Path(__file__).parent / "receiver.mjs"
SECRET, OTHER = ("whsec_" + base64.b64encode(key * 24).decode() for key in (b"a", b"b"))


@contextmanager
def listening(folder: Path, secret: str, candidates: Path) -> Iterator[str]:
    folder.mkdir()
    command = ["node", str(SCRIPT), secret, str(folder), str(candidates)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/"
        finally:
            process.kill()


def test_a_receiver_in_javascript_goes_all_the_way(tmp_path: Path) -> None:
    candidates, runs = tmp_path / "candidates", tmp_path / "runs"
    candidates.mkdir()
    with listening(runs, SECRET, candidates) as url, listening(tmp_path / "wrong", OTHER, candidates) as wrong:
        hooks = [{"name": "right", "url": url, "secrets": [OTHER, SECRET]}]
        hooks += [{"name": "wrong", "url": wrong, "secrets": [SECRET]}]
        places = {"export_dir": str(tmp_path / "exports"), "candidates_dir": str(candidates)}
        with asking(tmp_path, retrain=places, webhooks=hooks) as (machine, _, id):
            machine.start("shadow")
            verdict: dict[str, Any] = until(lambda: told(runs), 180)
            retrain = httpx.get(f"{machine.control}/v1/retrains/{id}").json()
            refused = httpx.get(f"{machine.control}/v1/deliveries").json()["deliveries"]
    assert [step["after"] for step in retrain["history"]] == [
        "proposed",
        "requested",
        "accepted",
        "training",
        "candidate_ready",
        "evaluating",
        "failed",
    ]
    (candidate,) = retrain["candidates"]
    assert candidate["details"] == {"loss": 1.25}
    assert (verdict["retrain_id"], verdict["verdict"]) == (id, "failed")  # there is no draft in the folder
    assert "config.json" in verdict["reasons"][0]
    run = candidates / id
    assert len((run / "train.jsonl").read_text().splitlines()) == retrain["data"]["rows"]
    assert yaml.safe_load((run / "run.yaml").read_text())["data"]["prompts_path"] == f"{run}/train.jsonl"
    assert {one["error"] for one in refused if one["endpoint"] == "wrong"} <= {"401 Unauthorized", None}
    assert not list((tmp_path / "wrong").iterdir())


def told(runs: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((runs / "verdict.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return found
