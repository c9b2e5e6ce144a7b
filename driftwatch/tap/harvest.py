"""Turns the exchanges that the sampler kept into records, off the event loop, and hands them to the shipper."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from driftwatch.records import EngineFigures
from driftwatch.tap.metrics import Metrics
from driftwatch.tap.sampler import Kept, Sampler, Window
from driftwatch.tap.shipper import Line, Shipper
from driftwatch.wire import dialects
from driftwatch.wire.exchange import Exchange, Skip

logger = logging.getLogger(__name__)


class Harvest:
    """Collects each window when it has ended. One thread parses: an answer of megabytes would hold up every stream."""

    def __init__(
        self,
        sampler: Sampler[Exchange],
        shipper: Shipper,
        metrics: Metrics,
        *,
        running: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``running``: requests that the engine decodes, as last seen; stamped on what a window kept as it ends."""
        self._running = running
        self._sampler = sampler
        self._shipper = shipper
        self._metrics = metrics
        self._clock = clock
        self._kept: deque[Kept[Exchange]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="harvest")

    async def run(self) -> None:
        """Collect windows until cancelled."""
        while True:
            await asyncio.sleep(self._sampler.ends_in(self._clock()))
            await self._collect(self._sampler.close(self._clock()))

    async def flush(self) -> None:
        """Collect the open windows too, and what a cancelled run had not finished."""
        await self._collect(self._sampler.flush())

    async def _collect(self, windows: list[Window[Exchange]]) -> None:
        for window in windows:
            allowed = [kept for kept in window.kept if not _forbidden(kept)]
            left_out = window.not_chosen + len(window.kept) - len(allowed)
            self._metrics.sample(window.segment, "not_chosen", left_out)
            self._kept.extend(allowed)
        loop, running = asyncio.get_running_loop(), self._running()
        while self._kept:
            kept = self._kept[0]
            try:
                line = await loop.run_in_executor(self._thread, to_line, kept, running)
            except Skip as skip:
                self._metrics.drop(skip.reason)
                self._metrics.sample(kept.segment, "skipped")
            except Exception:
                logger.exception("an exchange could not be read")
                self._metrics.drop("recorder_error")
                self._metrics.sample(kept.segment, "skipped")
            else:
                self._shipper.put(line)
            self._kept.popleft()


def _forbidden(kept: Kept[Exchange]) -> bool:
    """Training data from a client that forbade training."""
    return kept.purpose == "mining" and kept.item.no_train


def to_line(kept: Kept[Exchange], running: float | None = None) -> Line:
    """Read an exchange in its engine's dialect. Raises Skip."""
    record = dialects.record(kept.item)
    record.weight, record.purpose = kept.weight, kept.purpose
    record.no_train = kept.item.no_train or None
    if running is not None:
        record.engine = (record.engine or EngineFigures()).model_copy(update={"running": running})
    return Line(kept.segment, record.model_dump_json(exclude_none=True).encode())
