"""The retraining pipeline of ``deploy/retrain-pipeline`` as a process of the demo, and what becomes of its candidate.

Its receiver takes the webhook, runs :mod:`driftwatch.demo.train` on the exported rows, and reports over HTTP.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from driftwatch.demo.engine import running
from driftwatch.errors import DriftwatchError

STEPS, BATCH, RATE = 120, 8, 7e-4
"""With 70 requests of each kind: chat .08 -> .25, code .84 -> .82, in 34 s of CPU time. More steps at a higher rate
give .26, and code .79.
"""
LEAST_ROWS = 60
"""Requests since the shift that the training data must hold; as many from before it, or badly drafted, come on top."""
DECIDED_S = 900.0
LIVE = 400
"""Live samples after which an undecided candidate is rejected."""


def reference() -> Path:
    """The folder of the receiver: in the package when installed, in ``deploy`` in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "demo" / "reference"
    return installed if installed.is_dir() else package.parent / "deploy" / "retrain-pipeline"


def settings(folder: Path) -> dict[str, Any]:
    """What driftwatch is told of it. The gate's tolerances are as wide as some hundred requests need them."""
    return {
        "candidates_dir": str(folder / "candidates"),
        "policy": {"min_samples": LEAST_ROWS},
        "data": {"replay_share": 0.3},
        "gate": {"margin": 0.02, "tolerance": 0.1, "tail_tolerance": 0.05, "live": LIVE},
    }


@contextmanager
def running_pipeline(port: int, secret: str, folder: Path, draft: Path, cache: Path) -> Iterator[None]:
    """The receiver, until the end of the block; it trains ``draft`` further, on one thread."""
    train = [sys.executable, "-m", "driftwatch.demo.train", "--from", str(draft), "--answers", "train.jsonl"]
    train += ["--steps", str(STEPS), "--batch", str(BATCH), "--rate", str(RATE)]
    train += ["--cache", str(cache.absolute()), "--out", "draft"]
    environment = {
        "PIPELINE_SECRET": secret,
        "PIPELINE_FOLDER": str(folder / "candidates"),
        "PIPELINE_COMMAND": shlex.join(train),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(reference()), "receiver:app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--no-access-log"]
    ready = [f"http://127.0.0.1:{port}/openapi.json"]
    with running("the pipeline", command, log=folder / "pipeline.log", ready=ready, cwd=folder, **environment):
        yield


async def followed(control: str, say: Callable[[str], None], more: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    """The retrain that was asked for, once its candidate is judged; says each step, and calls for more requests while
    the gate wants them.

    Raises DriftwatchError if there is no verdict.
    """
    deadline, said = time.monotonic() + DECIDED_S, 0
    async with httpx.AsyncClient(base_url=control, trust_env=False, timeout=30) as client:
        while time.monotonic() < deadline:
            found = await _asked(client)
            for step in found["history"][said:]:
                say(f"retrain: {step['after']}" + (f", {step['reason']}" if step["reason"] else ""))
            said = len(found["history"])
            if found["state"] in ("promoted", "rejected"):
                return found
            if found["state"] in ("failed", "expired"):
                raise DriftwatchError(f"the retrain is {found['state']}: {found['reason']}; see pipeline.log")
            if any(candidate["state"] == "live" for candidate in found["candidates"]):
                await more()
            await asyncio.sleep(1)
    raise DriftwatchError(f"the retrain is {found['state']} after {DECIDED_S:.0f} s; see driftwatch.log, pipeline.log")


async def _asked(client: httpx.AsyncClient) -> dict[str, Any]:
    """The retrain with its history and candidates; while none is asked for, why."""
    listed = (await _get(client, "/v1/retrains"))["retrains"]
    for one in listed:
        if one["state"] != "suppressed":
            return await _get(client, f"/v1/retrains/{one['id']}")
    reasons = "; ".join(one["reason"] for one in listed) or "no alarm"
    return {"state": f"not asked for ({reasons})", "history": [], "candidates": []}


async def _get(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = (await client.get(path)).raise_for_status().json()
    except httpx.HTTPError as error:
        raise DriftwatchError(f"control did not answer {path}: {error!r}; see driftwatch.log") from error
    return found
