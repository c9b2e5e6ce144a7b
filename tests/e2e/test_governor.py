"""The shadow as a neighbour: real processes, an engine whose queue fills and empties."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.machine import Machine, free_port, prompts, until
from tests.serving import serving


class Queue:
    """An engine's metrics with so many requests waiting."""

    def __init__(self, port: int) -> None:
        self.waiting = 9
        queue = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(f'vllm:num_requests_waiting{{engine="0"}} {queue.waiting}.0\n'.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue(free_port())
    with serving(queue.server):
        yield queue


def govern(machine: Machine, **limits: object) -> None:
    settings = yaml.safe_load(machine.config.read_text())
    settings["shadow"]["governor"] = limits
    machine.config.write_text(yaml.safe_dump(settings))


def post(machine: Machine, records: list[dict[str, object]]) -> None:
    body = "\n".join(json.dumps(record) for record in records)
    answer = httpx.post(f"{machine.control}/v1/samples", content=body, timeout=30)
    assert answer.status_code == 201, answer.text


def test_waits_while_the_engines_queue_is_long(machine: Machine, queue: Queue) -> None:
    url = f"http://127.0.0.1:{queue.server.server_address[1]}/metrics"
    govern(machine, engine_metrics=url, max_waiting=3)
    machine.start_control()
    post(machine, prompts()[:8])
    machine.start("shadow")
    machine.wait_for(f"{machine.shadow}/readyz")
    until(lambda: 'paused{reason="queue"} 1.0' in httpx.get(f"{machine.shadow}/metrics").text)
    assert machine.judged() == 0
    assert httpx.get(f"{machine.shadow}/healthz").status_code == 200, "a pause is no fault"
    queue.waiting = 0
    until(lambda: machine.judged() == 8)
    found = machine.metrics(machine.shadow)
    assert found["driftwatch_shadow_pauses_total"] == 1
    assert found["driftwatch_shadow_paused"] == 0
    assert found["driftwatch_shadow_paused_seconds_total"] > 0


def test_a_paused_worker_gives_its_work_back_when_told_to_stop(machine: Machine, queue: Queue, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{queue.server.server_address[1]}/metrics"
    govern(machine, engine_metrics=url, max_waiting=3)
    machine.start_control()
    post(machine, prompts()[:8])
    machine.start("shadow")
    machine.wait_for(f"{machine.shadow}/readyz")
    until(lambda: 'paused{reason="queue"} 1.0' in httpx.get(f"{machine.shadow}/metrics").text)
    process = machine.processes.pop("shadow")
    process.terminate()
    assert process.wait(30) == 0
    govern(machine)
    machine.start("shadow")
    until(lambda: machine.judged() == 8)


def test_a_second_worker_on_the_same_port_works_without_metrics(machine: Machine) -> None:
    machine.start_control()
    machine.start("shadow")
    machine.wait_for(f"{machine.shadow}/readyz")
    machine.start("second", *machine.processes["shadow"].args)  # type: ignore[misc]
    until(lambda: "this worker serves no metrics" in machine.log("second"))
    machine.kill("shadow")
    post(machine, prompts()[:8])
    until(lambda: machine.judged() == 8)
