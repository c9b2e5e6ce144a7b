"""The whole chain for real: traffic, tap, shadow, metrics, scrape, recording rule, alert, Alertmanager, receiver.

One stack for all; each test is a fault in real processes, waits for its alerts at the receiver, mends it, and waits for
their end. Windows are shortened (``monitoring``), nothing else is.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import yaml

from driftwatch.store import work
from driftwatch.store.connection import Store
from tests.e2e.machine import CHAIN, DATA, TRACE, Machine, completion, free_port, prompts, until
from tests.e2e.monitoring import Prometheus, Receiver
from tests.e2e.test_commands import run
from tests.e2e.test_governor import Queue
from tests.e2e.traffic import Traffic

TOKEN = "control's own token"
DASHBOARDS = Path(__file__).parents[2] / "dashboards"
PATIENCE_S = 60.0
CODE, PROSE = ([one for one in prompts() if one["labels"]["domain"] == domain] for domain in "AB")
"""What the draft was trained on, and what it was not."""

COSTS = [{"batch": 1, "context": tokens, "step_ms": 20, "c": 0.2, "v": {1: 1.2, 3: 1.5}} for tokens in (0, 512)]
"""At gamma 3 a window costs as much as 2.1 plain steps."""
HARDEST = sorted(PROSE, key=lambda one: -one["engine"]["windows"])[:18]
EASIEST = sorted(CODE, key=lambda one: one["engine"]["windows"])[:18]


class Stack:
    """Everything, running under traffic."""

    def __init__(self, folder: Path, queue: Queue, receiver: Receiver) -> None:
        self.queue, self.receiver = queue, receiver
        self.machine = machine = Machine(
            folder,
            models=[
                {
                    "name": "*",
                    "drafts": [
                        {"name": "incumbent", "path": str(CHAIN)},
                        {"name": "split", "path": str(CHAIN), "sketch": str(folder / "chain.npz")},
                    ],
                    "gamma": 3,
                    "profile": str(folder / "profile.yaml"),
                }
            ],
            detect={
                "baseline": {"min_requests": 30, "min_hours": 0},
                "tolerance": 0.15,
                "requests_between_false_alarms": 1000,
            },
            value={"gpu_hour_price": 2.0},
            retrain={"export_dir": str(folder / "exports")},
            webhooks=[{"name": "pipeline", "url": f"{receiver.url}/hook"}],
        )
        (folder / "profile.yaml").write_text(yaml.safe_dump({"batches": COSTS}))
        settings = yaml.safe_load(machine.config.read_text())
        settings["control"]["token"] = TOKEN
        settings["tap"]["queue"] = 20
        url = f"http://127.0.0.1:{queue.server.server_port}/metrics"
        settings["shadow"]["governor"] = {"engine_metrics": url, "max_waiting": 3}
        machine.config.write_text(yaml.safe_dump(settings))
        self.other = folder / "other.yaml"
        settings["control"]["token"] = "another token"
        self.other.write_text(yaml.safe_dump(settings))
        self.traffic = Traffic(machine, CODE)

    def start(self) -> None:
        prompts = [record["prompt_token_ids"] for record in CODE + PROSE]
        pieces = [ids[:length] for ids in prompts for length in (16, 24, 32)]
        rows = [{"input_ids": [*ids, 0], "loss_mask": [0] * len(ids) + [1]} for ids in pieces]
        (self.machine.folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data: list[str | Path] = ["--data", "train.jsonl", "--draft", CHAIN, "--target", DATA / "models" / "target"]
        done = run("sketch", "build", *data, "--out", "chain.npz", cwd=self.machine.folder)
        assert done.returncode == 0, done.stderr
        self.machine.start("shadow")
        self.machine.start_engine()
        self.machine.start_control()
        self.machine.start_tap()
        self.machine.wait_for(f"{self.machine.shadow}/readyz")
        self.prometheus = Prometheus(self.machine, self.receiver)

    def control(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {TOKEN}"}
        return httpx.Client(base_url=self.machine.control, headers=headers, timeout=30, trust_env=False)

    def send(self, records: list[dict[str, Any]], tenant: str) -> None:
        """Besides what flows anyway."""
        with httpx.Client(base_url=self.machine.tap, timeout=60, trust_env=False) as client:
            for record in records:
                body = completion(record, stream=True)
                assert client.post("/v1/completions", json=body, headers={"x-tenant": tenant}).is_success

    def fires(self, name: str, **labels: str) -> dict[str, Any]:
        """The alert as the receiver gets it, whole and at the right place."""
        alert: dict[str, Any]
        (alert, *_) = until(lambda: self.receiver.firing(name, **labels), PATIENCE_S, 0.2)
        assert alert["path"] == {"page": "/pages", "ticket": "/tickets"}[alert["labels"]["severity"]]
        assert alert["annotations"]["runbook"] == f"deploy/README.md#{name.lower()}"
        texts = " ".join(alert["annotations"].values())
        assert not re.search(r"\{\{|<no value>|<error|NaN|\(\)", texts), texts
        return alert

    def clears(self, name: str, **labels: str) -> None:
        told = self.receiver.told
        until(lambda: told(name, **labels) and not self.receiver.firing(name, **labels), PATIENCE_S, 0.2)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    queue, receiver = Queue(free_port()), Receiver()
    queue.waiting = 0
    thread = Thread(target=queue.server.serve_forever)
    thread.start()
    one = Stack(tmp_path_factory.mktemp("monitoring"), queue, receiver)
    try:
        one.start()
        with contextlib.closing(one.prometheus), one.traffic.running():
            yield one
    finally:
        one.machine.stop()
        receiver.close()
        queue.server.shutdown()
        thread.join()
        queue.server.server_close()


def test_drift_and_a_webhook_that_nobody_takes(stack: Stack) -> None:
    """One tenant's code turns into prose. The endpoint says 410: the event is a dead letter until it is sent again."""
    stack.receiver.hook_status = 410
    until(lambda: stack.prometheus.query('driftwatch_baseline_state{draft="incumbent",state="watching"} == 1'))
    stack.traffic.records = PROSE
    stack.send(PROSE, "a")
    alert = stack.fires("DriftwatchDrift", draft="incumbent", segment="tenant=a", channel="shadow", kind="drift")
    assert alert["annotations"]["summary"].startswith("drift in tenant=a (incumbent, shadow): cause ")
    stack.fires("DriftwatchDrift", draft="incumbent", segment="tenant=a", channel="live")
    stack.fires("DriftwatchWebhookDeadLetters")
    dashboards(stack)
    stack.receiver.hook_status = 204
    with stack.control() as control:
        dead = [one for one in control.get("/v1/deliveries").json()["deliveries"] if one["state"] == "dead"]
        assert dead
        for event in {one["id"] for one in dead}:
            assert control.post(f"/v1/deliveries/{event}/redrive").is_success
    stack.traffic.records = CODE
    stack.send(CODE * 4, "a")
    stack.clears("DriftwatchWebhookDeadLetters")
    stack.clears("DriftwatchDrift", draft="incumbent", segment="tenant=a", kind="drift")


def dashboards(stack: Stack) -> None:
    """Every query of every panel, annotation and variable, as Grafana sends it: none an error, none empty."""
    short = {"prompt_token_ids": CODE[0]["prompt_token_ids"], "output_token_ids": [1], "labels": {"tenant": "a"}}
    left: list[str] = []

    def all_speak() -> bool:
        with stack.control() as control:  # one token: nothing to judge in it
            assert control.post("/v1/samples", json=short | {"id": f"short {time.time()}"}).is_success
        left[:] = silent(stack.prometheus)
        return not left

    with contextlib.suppress(AssertionError):
        until(all_speak, PATIENCE_S, 1)
    assert left == []


def silent(prometheus: Prometheus) -> Iterator[str]:
    """Queries of the committed dashboards that give nothing."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(path.read_text())
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
                assert found
                if not prometheus.label_values(*found.groups()):
                    yield f"{path.stem}: ${variable['name']}"
        targets = [(panel["title"], one) for panel in dashboard["panels"] for one in panel.get("targets", [])]
        for title, target in [*targets, *(("annotation", one) for one in dashboard["annotations"]["list"])]:
            query = target["expr"].replace("$__rate_interval", "10s")
            query = re.sub(r"\$(model|draft|segment|split)\b", ".*", query)
            if not prometheus.query(query):
                yield f"{path.stem}: {title}: {query}"


def test_a_tenant_that_does_not_pay_then_pays_for_some(stack: Stack) -> None:
    """Hard requests alone; then easy ones beside them: half gain, the tail loses; then a roll-out, judged anew."""
    mine = {"draft": "incumbent", "segment": "tenant=b"}
    stack.send(HARDEST * 2, "b")
    for channel in ("shadow", "live"):
        stack.fires("DriftwatchBelowBreakEven", channel=channel, **mine)
        stack.fires("DriftwatchSlowerRequests", channel=channel, **mine)
    stack.send(EASIEST * 6, "b")
    stack.fires("DriftwatchTailWorse", channel="shadow", **mine)
    stack.clears("DriftwatchBelowBreakEven", **mine)
    served = {key: EASIEST[0][key] for key in ("prompt_token_ids", "output_token_ids", "temperature", "engine")}
    rolled_out = {"model": "m", "labels": {"tenant": "b"}, "deployment": {"engine": "vllm", "version": "0.33.0"}}
    with stack.control() as control:
        for i in range(2):
            assert control.post("/v1/samples", json=served | rolled_out | {"id": f"new {i}"}).is_success
    stack.clears("DriftwatchSlowerRequests", **mine)
    stack.clears("DriftwatchTailWorse", **mine)


def test_an_engine_that_has_no_room_for_the_shadow(stack: Stack) -> None:
    stack.queue.waiting = 9
    alert = stack.fires("DriftwatchShadowPaused")
    assert alert["labels"]["reason"] == "queue"
    stack.fires("DriftwatchShadowLag")
    stack.queue.waiting = 0
    stack.clears("DriftwatchShadowPaused")
    stack.clears("DriftwatchShadowLag")


def test_a_shadow_that_dies(stack: Stack) -> None:
    """Samples wait. One has been in the hands of workers that died, over and over: it is given up."""
    stack.traffic.flows.clear()
    until(lambda: stack.machine.metrics()["driftwatch_shadow_lag_seconds"] == 0)
    stack.machine.kill("shadow")
    with stack.control() as control:
        assert control.post("/v1/samples", json=CODE[0] | {"id": "fatal"}).is_success
    store = Store(f"sqlite:///{stack.machine.folder / 'driftwatch.db'}")
    taken = True
    while taken:
        with store.write() as session:
            taken = bool(work.lease(session, "a worker that dies", now=time.time(), lease_s=0, limit=9))
    assert stack.fires("DriftwatchSamplesFail")["labels"]["reason"] == "worker_died"
    stack.traffic.flows.set()
    stack.fires("DriftwatchShadowLag")
    stack.machine.start("shadow")
    stack.clears("DriftwatchShadowLag")
    stack.clears("DriftwatchSamplesFail")


def test_no_control(stack: Stack) -> None:
    """One page; that no sample is stored then goes without saying."""
    stack.machine.kill("control")
    stack.fires("DriftwatchNoLeader")
    until(lambda: stack.prometheus.firing("DriftwatchNoSamples"))
    time.sleep(4)
    assert not stack.receiver.firing("DriftwatchNoSamples"), "inhibited"
    stack.machine.start_control()
    stack.clears("DriftwatchNoLeader")


def test_a_control_with_another_token(stack: Stack) -> None:
    stack.machine.kill("control")
    stack.machine.start("control", sys.executable, "-m", "driftwatch", "control", "--config", str(stack.other))
    stack.fires("DriftwatchNoSamples")
    assert stack.fires("DriftwatchSamplesDropped")["labels"]["reason"] == "queue_full"
    stack.machine.kill("control", signal.SIGTERM)
    stack.machine.start_control()
    stack.clears("DriftwatchNoSamples")
    stack.clears("DriftwatchSamplesDropped")


def test_a_slow_engine(stack: Stack) -> None:
    """1.2 s to the first token, then 54 ms a token. What burns fast is not told as burning slowly too."""
    stack.machine.kill("engine")
    stack.machine.start_engine(TRACE, 1.2, 0.225)
    for name in ("DriftwatchTtftSlo", "DriftwatchTpotSlo"):
        assert re.match(
            r"tenant=a: [\d.]+% of requests over ", stack.fires(f"{name}FastBurn")["annotations"]["summary"]
        )
        until(lambda name=name: stack.prometheus.firing(f"{name}SlowBurn"))  # type: ignore[misc]
    stack.machine.kill("engine")
    stack.machine.start_engine()
    for name in ("DriftwatchTtftSloFastBurn", "DriftwatchTpotSloFastBurn"):
        stack.clears(name)
    for name in ("DriftwatchTtftSloSlowBurn", "DriftwatchTpotSloSlowBurn"):
        until(lambda name=name: not stack.prometheus.firing(name))  # type: ignore[misc]


def test_a_tap_that_is_slow_then_dead(stack: Stack) -> None:
    """Bodies of almost a megabyte are read and written anew; then the process is killed."""
    stack.traffic.extra = {"metadata": list(range(120_000))}
    stack.fires("DriftwatchTapSlow")
    stack.traffic.extra = {}
    stack.traffic.flows.clear()
    stack.clears("DriftwatchTapSlow")
    stack.machine.kill("tap")
    assert stack.fires("DriftwatchTapDown")["labels"]["job"] == "inference/driftwatch-tap"
    stack.machine.start_tap()
    stack.clears("DriftwatchTapDown")
    stack.traffic.flows.set()
