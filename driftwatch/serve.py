"""``driftwatch serve``: tap, control and shadow as three processes of one machine, each restarted when it dies.

The tap is in the request path, so nothing that happens to the other two touches it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from driftwatch.settings import Settings
from driftwatch.store import migrate
from driftwatch.store.connection import Store

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
HEALTHY_S = 60.0
"""A process that ran for so long starts over with a short pause."""
GRACE_S = 10.0
PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """One supervised process."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    pause_s: float = 0.0
    start_at: float = 0.0

    def start(self) -> None:
        # One process serves one registry; prometheus_client would read another meaning into this variable.
        environment = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
        self.process = subprocess.Popen(
            self.command,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509  (no threads here)
        )
        self.started_at = time.monotonic()
        log.info("%s runs as process %d", self.name, self.process.pid)

    def check(self) -> None:
        """Restart it if it is gone, sooner after a long life than after a short one."""
        now = time.monotonic()
        if self.process is not None and (code := self.process.poll()) is not None:
            if now - self.started_at > HEALTHY_S:
                self.pause_s = 0.0
            log.error("%s ended with %s; starting it again in %.0f s", self.name, code, self.pause_s)
            self.process, self.start_at = None, now + self.pause_s
            self.pause_s = min(max(2 * self.pause_s, 1.0), LONGEST_PAUSE_S)
        if self.process is None and now >= self.start_at:
            self.start()

    def stop(self, grace_s: float) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            log.warning("%s did not stop in %.0f s: killed", self.name, grace_s)
            self.process.kill()
            self.process.wait()


def supervise(settings: Settings, config: Path | None) -> None:
    """Migrate the store, then run the three processes until SIGTERM or SIGINT.

    Raises DriftwatchError if the store cannot be migrated.
    """
    store = Store(settings.store.url)
    migrate.prepare(store)
    store.close()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    options = [] if config is None else ["--config", str(config)]
    children = [Child(name, [sys.executable, "-m", "driftwatch", name, *options]) for name in _processes(settings)]
    try:
        while not stop.is_set():
            for child in children:
                child.check()
            stop.wait(0.5)
    finally:
        # The tap first: it drains, and what it drained still reaches control.
        for child in children:
            child.stop(settings.tap.drain_s + GRACE_S if child.name == "tap" else GRACE_S)


def _processes(settings: Settings) -> list[str]:
    """Without a draft to judge there is no shadow."""
    drafts = any(draft.path for model in settings.models for draft in model.drafts)
    return ["tap", "control", *(["shadow"] if drafts else [])]


def _end_with_parent() -> None:
    """Between fork and exec: a supervisor that was killed leaves no process behind to hold the ports (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
