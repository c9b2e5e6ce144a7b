"""Real processes of driftwatch on this machine, and what a test does to them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

DATA = Path(__file__).parents[1] / "data"
CHAIN = DATA / "models" / "chain"
TRACE = DATA / "traces" / "draft3.T0.jsonl"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def until(condition: Callable[[], Any], seconds: float = 90.0, every: float = 0.05) -> Any:
    """The condition's first true value; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(every)


class Machine:
    """Settings, ports and processes of one test."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = {name: free_port() for name in ("engine", "tap", "admin", "control", "shadow")}
        self.engine, self.tap, self.admin, self.control, self.shadow = (
            f"http://127.0.0.1:{port}" for port in self.ports.values()
        )
        settings: dict[str, Any] = {
            "engine": {"url": self.engine},
            "tap": {
                "listen": f"127.0.0.1:{self.ports['tap']}",
                "admin": f"127.0.0.1:{self.ports['admin']}",
                "control_url": self.control,
            },
            "control": {"listen": f"127.0.0.1:{self.ports['control']}", "tick_s": 0.3},
            "store": {"url": f"sqlite:///{folder / 'driftwatch.db'}"},
            "models": [{"name": "*", "drafts": [{"name": "incumbent", "path": str(CHAIN)}], "gamma": 3}],
            "shadow": {
                "device": "cpu",
                "threads": 1,
                "lease_s": 2,
                "poll_s": 0.1,
                "listen": f"127.0.0.1:{self.ports['shadow']}",
            },
            "sampling": {"per_window": 1000, "window_s": 0.3},
            "segments": [{"label": "tenant", "header": "x-tenant"}],
        }
        self.config = folder / "settings.yaml"
        self.config.write_text(yaml.safe_dump(settings | sections))

    def start(self, name: str, *command: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start ``driftwatch NAME``, or another command under that name; its output goes to NAME.log."""
        arguments = command or (sys.executable, "-m", "driftwatch", name, "--config", str(self.config))
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*prefix, *arguments],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.processes[name] = process
        return process

    def start_engine(self, trace: Path = TRACE, *slow_s: float) -> None:
        """``slow_s``: seconds before the first chunk of an answer, and before each further one."""
        program = str(Path(__file__).parent / "engine.py")
        self.start("engine", sys.executable, program, str(self.ports["engine"]), str(trace), *map(str, slow_s))
        self.wait_for(f"{self.engine}/version")

    def start_tap(self) -> None:
        self.start("tap")
        self.wait_for(f"{self.admin}/readyz")
        self.wait_for_engine("tap")

    def wait_for_engine(self, process: str) -> None:
        """The tap asks the engine for its kind in the background."""
        until(lambda: "the engine is vllm" in self.log(process))

    def start_control(self, prefix: tuple[str, ...] = ()) -> None:
        self.start("control", prefix=prefix)
        self.wait_for(f"{self.control}/readyz")

    def wait_for(self, url: str) -> None:
        until(lambda: self._answers(url))

    def _answers(self, url: str) -> bool:
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} ended: {self.log(name)[-2000:]}"
        try:
            return httpx.get(url, timeout=2, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(how)
        if how != signal.SIGSTOP:
            self.processes.pop(name).wait(60)

    def stop(self) -> None:
        for process in self.processes.values():
            # serve is asked, for the sake of its children; they end with it
            process.terminate() if "serve" in process.args else process.kill()  # type: ignore[operator]
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def metrics(self, url: str | None = None) -> dict[str, float]:
        """Values by metric name, summed over all labels."""
        text = httpx.get(f"{url or self.control}/metrics", timeout=30, trust_env=False).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def judged(self) -> int:
        """Samples that were replayed, skipped or failed."""
        text = httpx.get(f"{self.control}/metrics", timeout=30, trust_env=False).text
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        ended = [s.value for s in samples if s.name == "driftwatch_samples_total" and s.labels["outcome"] != "stored"]
        return int(sum(ended))


def prompts(trace: Path = TRACE) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace.read_text().splitlines()]


def completion(record: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The request that gave this record."""
    return {"model": "m", "prompt": record["prompt_token_ids"], "max_tokens": 64, "temperature": 0} | fields
