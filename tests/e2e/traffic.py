"""Requests through the tap, all the time, in the background."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import httpx

from tests.e2e.machine import Machine, completion

PAUSE_S = 0.3
"""Of each client between two requests."""


class Traffic:
    """Some clients, each sending one streamed request after another; what they send can be changed at any time."""

    def __init__(
        self, machine: Machine, records: Sequence[dict[str, Any]], clients: int = 4, pause_s: float = 0.3
    ) -> None:
        self.records = records
        self.tenant = "a"
        self.extra: dict[str, Any] = {}
        self.answered = 0
        self.flows = Event()
        self.flows.set()
        self._machine = machine
        self._over = Event()
        self._threads = [Thread(target=self._send, args=(i, clients)) for i in range(clients)]

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            self.flows.set()
            for thread in self._threads:
                thread.join()

    def _send(self, first: int, step: int) -> None:
        with httpx.Client(base_url=self._machine.tap, timeout=60, trust_env=False) as client:
            at = first
            while not self._over.wait(PAUSE_S):
                self.flows.wait()
                body = completion(self.records[at % len(self.records)], stream=True) | self.extra
                at += step
                try:
                    answer = client.post("/v1/completions", json=body, headers={"x-tenant": self.tenant})
                    self.answered += answer.is_success
                except httpx.HTTPError:
                    pass  # a test has killed the tap or the engine
