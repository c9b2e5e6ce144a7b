"""The demo: the whole loop on one machine, every part of it real."""

from __future__ import annotations

import asyncio
import base64
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from driftwatch.demo import pipeline
from driftwatch.demo.engine import engine_command, free_ports, running
from driftwatch.demo.receiver import Receiver
from driftwatch.demo.report import GAMMA, Report, make
from driftwatch.demo.target import fetch_target
from driftwatch.demo.traffic import Users, plan
from driftwatch.errors import DriftwatchError
from driftwatch.retrain.announce import CANDIDATE_VERDICT, RETRAIN_REQUESTED
from driftwatch.store.connection import Store

DRAFT = Path(__file__).parent / "draft"
SETTLE_S = 600.0
HOOK_S = 20.0
HELD_OUT = 120
"""Requests that come while the pipeline trains, for its candidate to be judged on."""
MORE = 40
"""Requests at a time while the gate wants more."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Ports:
    engine: int
    tap: int
    admin: int
    control: int
    receiver: int
    shadow: int
    pipeline: int

    @property
    def urls(self) -> dict[str, str]:
        control = f"http://127.0.0.1:{self.control}"
        return {
            "tap": f"http://127.0.0.1:{self.tap}",
            "tap_metrics": f"http://127.0.0.1:{self.admin}/metrics",
            "metrics": f"{control}/metrics",
            "api": f"{control}/v1/segments",
            "openapi": f"{control}/openapi.json",
        }


def run(
    *,
    folder: Path,
    cache: Path,
    requests: int,
    seed: int,
    shift: bool,
    retrain: bool,
    say: Say,
    finished: Callable[[Report], None],
) -> None:
    """Run the loop; ``finished`` gets the report while everything is still running.

    With ``retrain`` a pipeline trains the draft further after the alarm, and the candidate is judged.
    Raises DriftwatchError with one line when a part of it does not start or a request fails.
    """
    target = fetch_target(cache, say)
    ports = Ports(*free_ports(7))
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode()
    config = folder / "settings.yaml"
    chosen = settings(ports, folder, target, secret, retrain=retrain)
    config.write_text(yaml.safe_dump(chosen, sort_keys=False))
    with ExitStack() as stack:
        say(f"starting the engine: transformers serve with {target.name}")
        engine = engine_command(Path(target.name), ports.engine)
        ready = [f"http://127.0.0.1:{ports.engine}/health"]
        one_thread = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        log = folder / "engine.log"
        stack.enter_context(running("the engine", engine, log=log, ready=ready, cwd=target.parent, **one_thread))
        say("starting driftwatch serve: tap, control, shadow")
        ready = [f"http://127.0.0.1:{ports.admin}/readyz", f"http://127.0.0.1:{ports.control}/readyz"]
        log = folder / "driftwatch.log"
        stack.enter_context(
            running("driftwatch", serve_command(config), log=log, ready=ready, cwd=folder, **one_thread)
        )
        if retrain:
            say("starting the retraining pipeline")
            pipe = pipeline.running_pipeline(ports.pipeline, secret, folder, DRAFT, cache)
            stack.enter_context(pipe)
        report = asyncio.run(_traffic(folder, ports, target.name, secret, requests, seed, shift, retrain, say))
        finished(report)


def serve_command(config: Path) -> list[str]:
    return [sys.executable, "-m", "driftwatch", "serve", "--config", str(config)]


def settings(ports: Ports, folder: Path, target: Path, secret: str, *, retrain: bool) -> dict[str, Any]:
    """A small machine's settings: every request sampled, and a baseline after tens of requests, not a day.

    So few requests allow no narrow interval, hence the wide tolerance; the shift is far wider.
    """
    webhooks = [{"name": "retrain", "url": f"http://127.0.0.1:{ports.receiver}/hook", "secrets": [secret]}]
    if retrain:
        url = f"http://127.0.0.1:{ports.pipeline}/hook"
        webhooks.append({"name": "pipeline", "url": url, "secrets": [secret], "events": [RETRAIN_REQUESTED]})
    return {
        "engine": {"url": f"http://127.0.0.1:{ports.engine}"},
        "tap": {
            "listen": f"127.0.0.1:{ports.tap}",
            "admin": f"127.0.0.1:{ports.admin}",
            "control_url": f"http://127.0.0.1:{ports.control}",
        },
        "control": {"listen": f"127.0.0.1:{ports.control}", "tick_s": 1},
        "store": {"url": f"sqlite:///{folder / 'driftwatch.db'}"},
        "models": [
            {
                "name": "*",
                "tokenizer": str(target),
                "drafts": [{"name": "incumbent", "path": str(DRAFT)}],
                "gamma": GAMMA,
            }
        ],
        "shadow": {"device": "cpu", "threads": 1, "lease_s": 30, "poll_s": 0.5, "listen": f"127.0.0.1:{ports.shadow}"},
        "sampling": {"per_window": 1000, "window_s": 1},
        "segments": [{"label": "tenant", "header": "x-tenant"}],
        "detect": {
            "baseline": {"mode": "auto", "min_requests": 30, "min_hours": 0},
            "tolerance": 0.15,
            "requests_between_false_alarms": 10_000,
        },
        "retrain": {"export_dir": str(folder / "exports")} | (pipeline.settings(folder) if retrain else {}),
        "webhooks": webhooks,
    }


async def _traffic(
    folder: Path, ports: Ports, model: str, secret: str, requests: int, seed: int, shift: bool, retrain: bool, say: Say
) -> Report:
    further = HELD_OUT + pipeline.LIVE if retrain else 0
    planned, middle = plan(requests, seed=seed, shift=shift, further=further)
    users = Users(ports.urls["tap"], model, planned, say)
    receiver = Receiver(secret)
    async with receiver.listening(ports.receiver):
        say(f"sending {requests} chat requests through the tap" + (f", shift at {middle}" if shift else ""))
        await users.send(requests)
        say("waiting for the shadow, the detectors and the webhook")
        await _settled(ports, requests)
        found = None
        if retrain:
            say(f"the pipeline trains, and {HELD_OUT} further requests come, for its candidate to be judged on")
            control = f"http://127.0.0.1:{ports.control}"
            more = partial(users.send, MORE)
            found, _ = await asyncio.gather(pipeline.followed(control, say, more), users.send(HELD_OUT))
            await receiver.wait_for(CANDIDATE_VERDICT, HOOK_S)
            await _settled(ports, len(users.sent))
        elif shift:
            await receiver.wait_for(RETRAIN_REQUESTED, HOOK_S)
        store = Store(f"sqlite:///{folder / 'driftwatch.db'}")
        report = make(store, users.sent, middle, shift, list(receiver.events.values()), ports.urls, found)
        store.close()
        return report


async def _settled(ports: Ports, sent: int) -> None:
    """Until every sample is judged and folded, and no webhook waits."""

    async def settled() -> bool:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            found = _samples((await client.get(ports.urls["metrics"])).text)
        ended = sum(value for (name, outcome), value in found.items() if name == "samples" and outcome != "stored")
        waiting = sum(value for (name, _), value in found.items() if name == "queue")
        folded = sum(value for (name, _), value in found.items() if name == "folded")
        unjudged = sum(value for (name, _), value in found.items() if name == "unjudged")
        return ended >= sent and waiting == 0 and folded + unjudged >= sent

    deadline = time.monotonic() + SETTLE_S
    while not await settled():
        if time.monotonic() > deadline:
            raise DriftwatchError(
                f"not every one of {sent} requests was judged in {SETTLE_S:.0f} s; see driftwatch.log"
            )
        await asyncio.sleep(0.5)


def _samples(text: str) -> dict[tuple[str, str], float]:
    names = {
        "driftwatch_samples_total": ("samples", "outcome"),
        "driftwatch_queue_depth": ("queue", "queue"),
        "driftwatch_shadow_requests_total": ("folded", "segment"),
        "driftwatch_samples_unjudged_total": ("unjudged", "reason"),
    }
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                name, label = names[sample.name]
                key = (name, sample.labels[label])
                found[key] = found.get(key, 0.0) + sample.value
    return found
