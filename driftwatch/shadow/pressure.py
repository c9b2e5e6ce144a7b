"""Is the engine under pressure? Its own metrics say: requests that wait, and how long tokens take."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from driftwatch.settings import Governor as Limits
from driftwatch.shadow.governor import Reason
from driftwatch.wire import exposition
from driftwatch.wire.load import Buckets, requests_waiting, share_over, time_per_output_token

READ_S = 5.0
"""Seconds that one reading holds for."""
TIMEOUT_S = 2.0
SLOW_SHARE = 0.01
"""p99 is over a limit when more than this share of requests is."""
FEW_REQUESTS = 20
"""So few requests say nothing about a p99: their verdict waits for more."""


class Pressure:
    """Reads ``engine_metrics`` when asked, at most every few seconds. An engine that does not answer, or does not say
    what is asked for, may be busy with worse than us: that counts as pressure.
    """

    def __init__(self, limits: Limits, client: httpx.Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._client, self._clock = limits, client, clock
        self._read_at = float("-inf")
        self._reason: Reason | None = None
        self._slow = False
        self._earlier: Buckets | None = None

    def __call__(self) -> Reason | None:
        if self._limits.engine_metrics is None:
            return None
        now = self._clock()
        if now - self._read_at >= READ_S:
            self._read_at, self._reason = now, self._read(self._limits.engine_metrics)
        return self._reason

    def _read(self, url: str) -> Reason | None:
        try:
            answer = self._client.get(url, headers={"accept": exposition.ACCEPT}, timeout=TIMEOUT_S)
            answer.raise_for_status()
        except httpx.HTTPError:
            return "engine_unknown"
        if (most := self._limits.max_waiting) is not None:
            waiting = requests_waiting(answer.text)
            if waiting is None:
                return "engine_unknown"
            if waiting > most:
                return "queue"
        if (limit_s := self._limits.max_tpot_p99_s) is not None:
            return self._latency(limit_s, time_per_output_token(answer.text))
        return None

    def _latency(self, limit_s: float, later: Buckets) -> Reason | None:
        if not later:
            return "engine_unknown"
        if self._earlier is None:  # all that was served before us is no sign of today's load
            self._earlier = later
        found = share_over(limit_s, self._earlier, later)
        if found is None:
            self._slow = False  # idle
        elif found[1] >= FEW_REQUESTS:
            self._slow, self._earlier = found[0] > SLOW_SHARE, later
        return "latency" if self._slow else None
