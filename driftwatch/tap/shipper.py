"""Sends records to control: from a bounded queue, in batches, for as long as it takes. The request path never waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import aiohttp

from driftwatch.tap.metrics import Metrics

logger = logging.getLogger(__name__)

BATCH_RECORDS = 200
BATCH_BYTES = 8_000_000
PIECE = 64 * 1024
QUEUE_BYTES = 256 * 1024 * 1024
"""Bound of the queue beside its number of records: these may be large."""
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 30.0
AWAY = frozenset({401, 403, 404, 408, 429, 502, 503, 504})
"""Answers that are no verdict on the records: control is busy, changes its token, or is not the one that answered."""
TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)

_Verdict = Literal["stored", "refused", "away"]


@dataclass(frozen=True, slots=True)
class Line:
    """A record as one line of NDJSON, without the line end."""

    segment: str
    data: bytes


class Shipper:
    """The queue to control. Oldest records stay and are sent first; what does not fit is dropped and counted."""

    def __init__(self, control_url: str, *, queue: int, token: str | None, metrics: Metrics) -> None:
        self._url = f"{control_url}/v1/samples"
        self._limit = queue
        self._headers = {"content-type": "application/x-ndjson"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._metrics = metrics
        self._queue: deque[Line] = deque()
        self._bytes = 0
        self._records = BATCH_RECORDS
        self._waiting = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._hurry = asyncio.Event()
        """The process ends: no more long pauses."""
        metrics.watch_queue(lambda: len(self._queue))

    def put(self, line: Line) -> None:
        """Queue a record, or drop it if the queue is full. Never waits."""
        if len(self._queue) >= self._limit or self._bytes + len(line.data) > QUEUE_BYTES:
            self._drop([line], "queue_full")
            return
        self._queue.append(line)
        self._bytes += len(line.data)
        self._empty.clear()
        self._waiting.set()

    async def run(self) -> None:
        """Send until cancelled. A record leaves the queue only when control has answered for it."""
        pause = FIRST_RETRY_S
        async with aiohttp.ClientSession(timeout=TIMEOUT, cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                await self._waiting.wait()
                batch = self._batch()
                verdict = await self._send(session, batch, again=pause > FIRST_RETRY_S)
                if verdict == "away":
                    # Spread, so that many taps do not all come back at once.
                    await self._pause(pause * random.uniform(0.5, 1.0))
                    pause = min(2 * pause, LONGEST_RETRY_S)
                    continue
                pause = FIRST_RETRY_S
                if verdict == "refused" and len(batch) > 1:
                    # One record is wrong, or a few: find them by halves, and lose no other.
                    self._records = len(batch) // 2
                    continue
                self._take(len(batch))
                self._records = min(2 * self._records, BATCH_RECORDS)
                if verdict == "refused":
                    self._drop(batch, "refused")
                    continue
                for segment, count in Counter(line.segment for line in batch).items():
                    self._metrics.sample(segment, "sent", count)

    async def drain(self, timeout_s: float) -> None:
        """Wait until the queue is empty; drop and count what is left after ``timeout_s``."""
        self._hurry.set()
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            left = list(self._queue)
            self._take(len(left))
            self._drop(left, "shutdown")
            logger.warning("%d samples were not sent: control did not take them in %g s", len(left), timeout_s)

    async def _pause(self, seconds: float) -> None:
        if self._hurry.is_set():
            await asyncio.sleep(min(seconds, FIRST_RETRY_S))
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), seconds)

    async def _send(self, session: aiohttp.ClientSession, batch: list[Line], *, again: bool) -> _Verdict:
        body = b"\n".join(line.data for line in batch) + b"\n"
        try:
            headers = {**self._headers, "content-length": str(len(body))}
            async with session.post(self._url, data=pieces(body), headers=headers, allow_redirects=False) as response:
                if response.ok and response.status < 300:
                    if again:
                        logger.info("control is back: sending samples again")
                    return "stored"
                text = (await response.content.read(500)).decode(errors="replace")
                if response.status not in AWAY:
                    if len(batch) == 1:
                        logger.error("control refused a sample: %d %s", response.status, text)
                    return "refused"
                reason = f"{response.status} {text}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
        if not again:
            logger.warning("control does not take samples, holding them meanwhile: %s", reason)
        return "away"

    def _batch(self) -> list[Line]:
        batch: list[Line] = []
        size = 0
        for line in islice(self._queue, self._records):
            size += len(line.data) + 1
            if batch and size > BATCH_BYTES:
                break
            batch.append(line)
        return batch

    def _take(self, count: int) -> None:
        for _ in range(min(count, len(self._queue))):
            self._bytes -= len(self._queue.popleft().data)
        if not self._queue:
            self._waiting.clear()
            self._empty.set()

    def _drop(self, lines: list[Line], reason: Literal["queue_full", "refused", "shutdown"]) -> None:
        self._metrics.drop(reason, len(lines))
        for line in lines:
            self._metrics.sample(line.segment, "dropped")


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    """A body in pieces: one large write would hold up every stream of the relay."""
    for begin in range(0, len(data), PIECE):
        yield data[begin : begin + PIECE]
