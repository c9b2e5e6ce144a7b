"""What the tap costs beside nginx, in the same run: `python -m tests.benchmarks.tap.bench [REPETITIONS]`.

CPU time of the proxy's processes per relayed chunk, time to the first chunk, and throughput without pacing. Upstream,
clients and proxies are processes of their own; repetitions are interleaved, figures are medians of them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
STREAMS, CHUNKS, GAP, SIZE, ROUNDS = 64, 50, 0.02, 180, 3
UNPACED_STREAMS, UNPACED_CHUNKS, UNPACED_ROUNDS = 16, 4000, 2
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
    firsts_ms: list[float] = field(default_factory=list)
    first_p50: list[float] = field(default_factory=list)
    first_p99: list[float] = field(default_factory=list)
    chunks_s: list[float] = field(default_factory=list)

    def pace(self) -> None:
        before = cpu_ns(self.process)
        _, firsts = load(self, STREAMS, ROUNDS, CHUNKS, GAP)
        self.cpu_us.append((cpu_ns(self.process) - before) / (STREAMS * ROUNDS * CHUNKS) / 1000)
        times = sorted(1000 * one for one in firsts)
        self.first_p50.append(statistics.median(times))
        self.first_p99.append(times[int(0.99 * len(times))])

    def rush(self) -> None:
        seconds, _ = load(self, UNPACED_STREAMS, UNPACED_ROUNDS, UNPACED_CHUNKS, 0)
        self.chunks_s.append(UNPACED_STREAMS * UNPACED_ROUNDS * UNPACED_CHUNKS / seconds)


def load(way: Way, streams: int, rounds: int, chunks: int, gap: float) -> tuple[float, list[float]]:
    command = [sys.executable, str(HERE / "load.py"), str(way.port), way.path]
    command += [str(one) for one in (streams, rounds, chunks, gap, SIZE)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found["seconds"], found["firsts"]


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
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
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
        "DRIFTWATCH_SAMPLING__WINDOW_S": "1",
    }
    process = stack.enter_context(
        running(sys.executable, "-m", "driftwatch", "tap", port=port, environment=environment)
    )
    return Way(name, port, path, process)


def measure(repetitions: int) -> list[Way]:
    with ExitStack() as stack:
        origin = free_port()
        stack.enter_context(running(sys.executable, str(HERE / "origin.py"), str(origin), port=origin))
        ways = [Way("direct", origin, RECORDED)]
        if program := shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin"):
            port, folder = free_port(), stack.enter_context(tempfile.TemporaryDirectory())
            config = Path(folder) / "nginx.conf"
            config.write_text(NGINX.format(folder=folder, origin=origin, port=port))
            process = stack.enter_context(running(program, "-p", folder, "-c", str(config), port=port))
            ways.append(Way("nginx", port, RECORDED, process))
        # About 64 requests end in a window of one second.
        ways += [
            tap(stack, "tap, nothing recorded", origin, RELAYED, 1),
            tap(stack, "tap, 5 % sampled", origin, RECORDED, 3),
            tap(stack, "tap, 100 % sampled", origin, RECORDED, 100_000),
            tap(stack, "tap, 5 % sampled, answers rewritten", origin, RECORDED, 3, "vllm"),
        ]
        for _ in range(repetitions):
            for way in ways:
                way.pace()
        for _ in range(repetitions):
            for way in ways:
                way.rush()
    return ways


def table(ways: list[Way]) -> str:
    direct, peer = ways[0], next((way for way in ways if way.name == "nginx"), None)
    rows = ["| | CPU per chunk, µs | x nginx | first chunk p50 / p99, ms | added p50 / p99, ms | unpaced x direct |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    base = statistics.median(peer.cpu_us) if peer else float("nan")
    for way in ways:
        cpu, rate = statistics.median(way.cpu_us), statistics.median(way.chunks_s) / statistics.median(direct.chunks_s)
        p50, p99 = statistics.median(way.first_p50), statistics.median(way.first_p99)
        more50, more99 = p50 - statistics.median(direct.first_p50), p99 - statistics.median(direct.first_p99)
        rows.append(
            f"| {way.name} | {cpu:.1f} | {cpu / base:.2f} | {p50:.2f} / {p99:.2f} | {more50:.2f} / {more99:.2f} |"
            f" {rate:.2f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 3)))
