"""What the tap costs beside nginx, in the same run: `python -m tests.benchmarks.tap.bench [REPETITIONS] [LITELLM]`.

CPU time of the proxy's processes per relayed chunk, time to the first chunk, and throughput without pacing. Upstream,
clients and proxies are processes of their own. Each measurement begins with traffic that is not measured, since the
tap finds out in its first windows how much it can leave alone. Repetitions are interleaved, each in an order of its
own; figures are medians of them. The p99 of the first chunk is that of all repetitions together, and its difference
to nginx's has an interval: the repetitions are drawn again with replacement, the same ones for both. LITELLM is the
path of a `litellm` program, whose proxy is then measured too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
STREAMS, CHUNKS, GAP, SIZE = 64, 50, 0.02, 180
UNPACED_STREAMS, UNPACED_CHUNKS = 16, 250
WINDOW_S, WARM_S, MEASURED_S = 2.0, 5.0, 4.0
RECORDED, RELAYED = "/v1/completions", "/v1/embeddings"

NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 1000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream engine {{ server 127.0.0.1:{origin}; keepalive 128; keepalive_requests 1000000; }}
  server {{ listen 127.0.0.1:{port} backlog=2048;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
                  proxy_set_header Host $http_host; proxy_buffering off; }} }}
}}
"""


@dataclass
class Way:
    """A way from the clients to the upstream, and what was measured on it."""

    name: str
    port: int
    path: str
    process: subprocess.Popen[bytes] | None = None
    cpu_us: list[float] = field(default_factory=list)
    firsts_ms: list[list[float]] = field(default_factory=list)
    """Of each repetition: the time to each first chunk."""
    chunks_s: list[float] = field(default_factory=list)
    rushed_us: list[float] = field(default_factory=list)
    """CPU time per chunk without pacing."""

    def pace(self) -> None:
        with load(self, STREAMS, CHUNKS, GAP) as found:
            before = cpu_ns(self.process)
            chunks, _, firsts = found()
            self.cpu_us.append((cpu_ns(self.process) - before) / chunks / 1000)
        self.firsts_ms.append([1000 * one for one in firsts])

    def first(self, percent: float) -> float:
        return float(np.percentile(np.concatenate(self.firsts_ms), percent))

    def more_than(self, other: Way, percent: float = 99, draws: int = 2000) -> tuple[float, float, float]:
        """How much later first chunks come than another way's, at a percentile, with a 95 % interval. In ms."""
        generator = np.random.default_rng(0)
        found = []
        for drawn in generator.integers(0, len(self.firsts_ms), (draws, len(self.firsts_ms))):
            ours, theirs = (np.concatenate([way.firsts_ms[i] for i in drawn]) for way in (self, other))
            found.append(np.percentile(ours, percent) - np.percentile(theirs, percent))
        lower, upper = np.percentile(found, [2.5, 97.5])
        return self.first(percent) - other.first(percent), float(lower), float(upper)

    def rush(self) -> None:
        with load(self, UNPACED_STREAMS, UNPACED_CHUNKS, 0) as found:
            before = cpu_ns(self.process)
            chunks, seconds, _ = found()
            self.rushed_us.append((cpu_ns(self.process) - before) / chunks / 1000)
            self.chunks_s.append(chunks / seconds)


@contextmanager
def load(way: Way, streams: int, chunks: int, gap: float) -> Iterator[Callable[[], tuple[int, float, list[float]]]]:
    """Traffic, warm already. What is yielded waits for the chunks, seconds and first chunks of what is measured."""
    command = [sys.executable, str(HERE / "load.py"), str(way.port), way.path]
    command += [str(one) for one in (streams, chunks, gap, SIZE, WARM_S, MEASURED_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout
        assert json.loads(lines.readline()) == "warm"

        def found() -> tuple[int, float, list[float]]:
            said = json.loads(lines.readline())
            return said["chunks"], said["seconds"], said["firsts"]

        yield found
    assert process.returncode == 0, "the clients failed"


def cpu_ns(process: subprocess.Popen[bytes] | None) -> int:
    """CPU time of a process, its threads and its children so far."""
    if process is None:
        return 0
    total, pids = 0, [process.pid]
    while pids:
        for task in Path(f"/proc/{pids.pop()}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
            pids += map(int, (task / "children").read_text().split())
    return total


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running(*command: str, port: int, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, f"{command} ended"
                assert time.monotonic() < deadline, f"{command} does not listen"
                time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(20)


def tap(stack: ExitStack, name: str, origin: int, path: str, per_window: int, kind: str = "openai") -> Way:
    port, admin = free_port(), free_port()
    environment = os.environ | {
        "DRIFTWATCH_ENGINE__URL": f"http://127.0.0.1:{origin}",
        "DRIFTWATCH_ENGINE__KIND": kind,
        "DRIFTWATCH_TAP__LISTEN": f"127.0.0.1:{port}",
        "DRIFTWATCH_TAP__ADMIN": f"127.0.0.1:{admin}",
        "DRIFTWATCH_TAP__CONTROL_URL": f"http://127.0.0.1:{origin}",
        "DRIFTWATCH_SAMPLING__PER_WINDOW": str(per_window),
        "DRIFTWATCH_SAMPLING__WINDOW_S": str(WINDOW_S),
    }
    process = stack.enter_context(
        running(sys.executable, "-m", "driftwatch", "tap", port=port, environment=environment)
    )
    return Way(name, port, path, process)


LITELLM_NAME = "LiteLLM's proxy"
LITELLM = """
model_list:
  - model_name: m
    litellm_params: {{model: text-completion-openai/m, api_base: "http://127.0.0.1:{origin}/v1", api_key: none}}
"""


def litellm(stack: ExitStack, program: str, origin: int) -> Way:
    port, folder = free_port(), stack.enter_context(tempfile.TemporaryDirectory())
    config = Path(folder) / "litellm.yaml"
    config.write_text(LITELLM.format(origin=origin))
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    environment["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    return Way(LITELLM_NAME, port, RECORDED, stack.enter_context(running(*command, port=port, environment=environment)))


def measure(repetitions: int, program: str | None = None) -> list[Way]:
    with ExitStack() as stack:
        origin = free_port()
        stack.enter_context(running(sys.executable, str(HERE / "origin.py"), str(origin), port=origin))
        ways = [Way("direct", origin, RECORDED)]
        if nginx := shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin"):
            port, folder = free_port(), stack.enter_context(tempfile.TemporaryDirectory())
            config = Path(folder) / "nginx.conf"
            config.write_text(NGINX.format(folder=folder, origin=origin, port=port))
            process = stack.enter_context(running(nginx, "-p", folder, "-c", str(config), port=port))
            ways.append(Way("nginx", port, RECORDED, process))
        # About 128 requests end in a window.
        few, all_ = 6, 100_000
        ways += [
            tap(stack, "tap, nothing recorded", origin, RELAYED, 1),
            tap(stack, "tap, 5 % sampled", origin, RECORDED, few),
            tap(stack, "tap, 5 % sampled, answers rewritten", origin, RECORDED, few, "vllm"),
            tap(stack, "tap, 100 % sampled", origin, RECORDED, all_),
            tap(stack, "tap, 100 % sampled, answers rewritten", origin, RECORDED, all_, "vllm"),
        ]
        if program:
            ways.append(litellm(stack, program, origin))
        order = random.Random(0)
        for _ in range(repetitions):
            for way in order.sample(ways, len(ways)):
                way.pace()
        rushing = [way for way in ways if way.name != LITELLM_NAME]  # which would take minutes
        for _ in range(repetitions):
            for way in order.sample(rushing, len(rushing)):
                way.rush()
    return ways


def table(ways: list[Way]) -> str:
    direct, peer = ways[0], next((way for way in ways if way.name == "nginx"), None)
    rows = [
        "| | CPU per chunk, µs | x nginx | first chunk p50 / p99, ms | p99 less nginx's, ms |"
        " unpaced: chunks a second | x direct | CPU per chunk, µs |"
    ]
    rows.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    base = statistics.median(peer.cpu_us) if peer else float("nan")
    for way in ways:
        cpu = statistics.median(way.cpu_us)
        unpaced = ""
        if way.chunks_s:
            fast = statistics.median(way.chunks_s)
            ratio = fast / statistics.median(direct.chunks_s)
            unpaced = f"{fast:,.0f} | {ratio:.2f} | {statistics.median(way.rushed_us):.1f}"
        more = "{:.2f} [{:.2f}, {:.2f}]".format(*way.more_than(peer)) if peer and way is not peer else ""
        rows.append(
            f"| {way.name} | {cpu:.1f} | {cpu / base:.2f} | {way.first(50):.2f} / {way.first(99):.2f} | {more} |"
            f" {unpaced} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 3, sys.argv[2] if len(sys.argv) > 2 else None)))
