"""The governor: keeps the shadow a good neighbour on a GPU that others use.

Before each batch it asks for room, after each batch it rests. A batch waits while the engine is under pressure, while
little memory is free, after running out of memory, and for as long as its share of time demands.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from driftwatch.settings import Governor as Limits
from driftwatch.shadow.device import is_out_of_memory

Reason = Literal["share", "headroom", "queue", "latency", "engine_unknown", "out_of_memory"]
REASONS: tuple[Reason, ...] = ("share", "headroom", "queue", "latency", "engine_unknown", "out_of_memory")

LOOK_S = 2.0
"""Seconds between two looks at what a paused batch waits for."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 5.0, 600.0
BUSY_WINDOW_S = 60.0


class Stopped(Exception):
    """The worker was told to stop while a batch waited for room."""


class Governor:
    """Grants turns. ``pressure`` says what speaks against one on the engine's side, ``free_bytes`` what memory is left
    on the device (None on a CPU); both are asked before each batch.
    """

    def __init__(
        self,
        limits: Limits,
        wait: Callable[[float], bool],
        *,
        pressure: Callable[[], Reason | None] = lambda: None,
        free_bytes: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wait`` sleeps for so many seconds, and says whether to stop."""
        self._limits, self._wait, self._pressure, self._clock = limits, wait, pressure, clock
        self.free_bytes = free_bytes
        self._rest_until = self._backoff_until = float("-inf")
        self._backoff_s = 0.0
        self._worked: deque[tuple[float, float]] = deque()
        self.waiting_for: Reason | None = None
        self.seconds_waited: dict[Reason, float] = dict.fromkeys(REASONS, 0.0)
        self.pauses: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self.out_of_memory = 0
        self.last_seen = clock()
        """When a batch ended or a paused one looked again: a worker that is silent for long hangs."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for room, then time what is done inside. Raises Stopped."""
        while (reason := self.obstacle()) is not None:
            self._pause(reason)
        self.waiting_for = None
        began = self._clock()
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._back_off()
            raise
        else:
            self._backoff_s = 0.0
        finally:
            self._account(began, self._clock())

    def idle(self, seconds: float) -> None:
        """There is nothing to do; that is no hang either."""
        self._wait(seconds)
        self.last_seen = self._clock()

    def obstacle(self) -> Reason | None:
        """Why no batch may start now; the dearest to ask for comes last."""
        now = self._clock()
        if now < self._backoff_until:
            return "out_of_memory"
        if now < self._rest_until:
            return "share"
        free, wanted = self.free_bytes(), self._limits.headroom_bytes
        if free is not None and wanted is not None and free < wanted:
            return "headroom"
        return self._pressure()

    @property
    def busy_ratio(self) -> float:
        """Share of the last minute spent on batches."""
        now = self._clock()
        since = now - BUSY_WINDOW_S
        return sum(max(min(end, now) - max(begin, since), 0.0) for begin, end in self._worked) / BUSY_WINDOW_S

    def _pause(self, reason: Reason) -> None:
        if self.waiting_for != reason:
            self.waiting_for = reason
            self.pauses[reason] += 1
        began = self._clock()
        until = {"share": self._rest_until, "out_of_memory": self._backoff_until}.get(reason, began + LOOK_S)
        stopped = self._wait(min(until - began, LOOK_S))
        self.last_seen = self._clock()
        self.seconds_waited[reason] += self.last_seen - began
        if stopped:
            raise Stopped

    def _back_off(self) -> None:
        self.out_of_memory += 1
        self._backoff_s = min(max(2 * self._backoff_s, FIRST_BACKOFF_S), LONGEST_BACKOFF_S)
        self._backoff_until = self._clock() + self._backoff_s

    def _account(self, began: float, ended: float) -> None:
        share = self._limits.busy_share
        self._rest_until = ended + (ended - began) * (1.0 - share) / share
        self._worked.append((began, ended))
        while self._worked and self._worked[0][1] < ended - BUSY_WINDOW_S:
            self._worked.popleft()
        self.last_seen = ended
