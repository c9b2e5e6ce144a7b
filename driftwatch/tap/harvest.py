"""Turns the exchanges that the sampler kept into records, off the event loop, and hands them to the shipper."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from driftwatch.tap.metrics import Metrics
from driftwatch.tap.sampler import Kept, Sampler
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
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

    async def _collect(self, window: list[Kept[Exchange]]) -> None:
        self._count_not_chosen(window)
        self._kept.extend(window)
        loop = asyncio.get_running_loop()
        while self._kept:
            kept = self._kept[0]
            try:
                line = await loop.run_in_executor(self._thread, to_line, kept)
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

    def _count_not_chosen(self, window: list[Kept[Exchange]]) -> None:
        """Once for each window of each segment; there may be several, and all that were kept in one say the same."""
        left: dict[str, int] = {}
        for kept in window:
            if left.get(kept.segment, 0) == 0:  # the first of a window
                self._metrics.sample(kept.segment, "not_chosen", kept.seen - kept.kept)
                left[kept.segment] = kept.kept
            left[kept.segment] -= 1


def to_line(kept: Kept[Exchange]) -> Line:
    """Read an exchange in its engine's dialect. Raises Skip."""
    record = dialects.record(kept.item)
    record.weight = kept.weight
    return Line(kept.segment, record.model_dump_json(exclude_none=True).encode())
