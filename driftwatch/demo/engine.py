"""Real processes of the demo: the engine, and driftwatch itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from driftwatch.errors import DriftwatchError

STARTUP_S = 300.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def engine_command(model: Path, port: int) -> list[str]:
    """``transformers serve`` with continuous batching: an OpenAI-compatible server that runs on a CPU."""
    script = Path(sys.executable).parent / "transformers"
    if not script.exists():
        raise DriftwatchError("the demo needs `transformers serve`: pip install 'driftwatch-sidecar[demo]'")
    options = "--device cpu --dtype bfloat16 --continuous-batching --cb-num-blocks 256 --cb-max-batch-tokens 512"
    return [str(script), "serve", str(model), "--port", str(port), *options.split()]


@contextmanager
def running(
    name: str, command: list[str], *, log: Path, ready: list[str], cwd: Path, **environment: str
) -> Iterator[int]:
    """A process, from when each of its ``ready`` URLs answers until the end of the block; yields its process id.

    Raises DriftwatchError with the end of its log if it dies or does not get ready.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
        )
    try:
        _wait(name, process, ready, log)
        yield process.pid
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):  # what it started and left behind
            os.killpg(process.pid, signal.SIGKILL)


def _wait(name: str, process: subprocess.Popen[bytes], ready: list[str], log: Path) -> None:
    deadline = time.monotonic() + STARTUP_S
    for url in ready:
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace").strip().splitlines()[-3:]
                raise DriftwatchError(f"{name} did not start, its log {log} ends with: {' | '.join(tail)}")
            time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False
