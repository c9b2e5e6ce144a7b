"""Pressure, read over HTTP from a server that answers with an engine's own text."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from driftwatch.settings import Governor as Limits
from driftwatch.shadow.pressure import READ_S, Pressure
from tests.serving import serving

RECORDED = (Path(__file__).parents[2] / "data/metrics/draft3.T0.metrics_after.txt").read_text()


class Engine:
    """Serves the text that it holds; counts the readings."""

    def __init__(self) -> None:
        self.text, self.status, self.reads = RECORDED, 200, 0
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.reads += 1
                self.send_response(engine.status)
                self.end_headers()
                self.wfile.write(engine.text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/metrics"

    def served(self, requests: int, slow: int) -> None:
        """So many requests more have finished, some of them slower than any limit."""
        lines = []
        for line in self.text.splitlines():
            if line.startswith("vllm:request_time_per_output_token_seconds_bucket"):
                name, value = line.rsplit(" ", 1)
                more = requests if 'le="+Inf"' in name else requests - slow
                line = f"{name} {float(value) + more}"
            lines.append(line)
        self.text = "\n".join(lines) + "\n"


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    with serving(engine.server):
        yield engine


class Asking:
    """A pressure that is asked when its readings are due."""

    def __init__(self, limits: Limits) -> None:
        self.now = 0.0
        self.client = httpx.Client()
        self.pressure = Pressure(limits, self.client, clock=lambda: self.now)

    def __call__(self) -> str | None:
        self.now += READ_S
        return self.pressure()


def test_queue(engine: Engine) -> None:
    ask = Asking(Limits(engine_metrics=engine.url, max_waiting=3))
    assert ask() is None
    (line,) = (line for line in RECORDED.splitlines() if line.startswith("vllm:num_requests_waiting{"))
    engine.text = RECORDED.replace(line, line.rsplit(" ", 1)[0] + " 4.0")
    assert ask() == "queue"
    engine.text = RECORDED
    assert ask() is None
    ask.client.close()


def test_p99(engine: Engine) -> None:
    ask = Asking(Limits(engine_metrics=engine.url, max_tpot_p99_s=0.5))
    assert ask() is None, "what was served before is no sign of today"
    engine.served(1000, slow=5)
    assert ask() is None
    engine.served(1000, slow=15)
    assert ask() == "latency"
    engine.served(5, slow=0)
    assert ask() == "latency", "a handful says nothing about a p99"
    engine.served(1000, slow=0)
    assert ask() is None
    engine.served(1000, slow=15)
    assert ask() == "latency"
    assert ask() is None, "an idle engine is under no pressure"
    ask.client.close()


def test_an_engine_that_does_not_say(engine: Engine) -> None:
    queue = Asking(Limits(engine_metrics=engine.url, max_waiting=3))
    slow = Asking(Limits(engine_metrics=engine.url, max_tpot_p99_s=0.5))
    engine.status = 503
    assert queue() == slow() == "engine_unknown"
    engine.status, engine.text = 200, "something_else 1\n"
    assert queue() == slow() == "engine_unknown"
    engine.text = RECORDED
    assert queue() is None
    assert slow() is None
    for ask in (queue, slow):
        ask.client.close()


def test_nobody_listens() -> None:
    ask = Asking(Limits(engine_metrics="http://127.0.0.1:9/metrics", max_waiting=3))
    assert ask() == "engine_unknown"
    ask.client.close()


def test_reads_seldom(engine: Engine) -> None:
    ask = Asking(Limits(engine_metrics=engine.url, max_waiting=3))
    ask()
    for _ in range(100):
        ask.pressure()
    assert engine.reads == 1
    ask.client.close()


def test_without_an_engine_to_watch() -> None:
    ask = Asking(Limits())
    assert ask() is None
    ask.client.close()
