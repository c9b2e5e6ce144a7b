"""Polls the engine's own metrics and exports them, normalised, as ``driftwatch_live_engine_*``.

Counters count from the tap's first look on: by how much the engine's rose. A series that is not there at that look
began later, at zero (SGLang has none before its first increment). An engine that restarts begins at zero again, which
shows as a fall, or as a later ``_created`` time; each engine of a server for itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import get_args
from urllib.parse import urlsplit

import aiohttp
import orjson
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from driftwatch.tap.probe import Probe
from driftwatch.wire import exposition
from driftwatch.wire.exposition import Counter, Gauge, Scrape, Series

logger = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=10)
UNKNOWN_S = 1.0
"""Between two looks while the probe has not found out what the engine is."""
LARGEST = 16 * 1024 * 1024

LABELS = ("instance", "engine", "model")
COUNTERS: Mapping[Counter, str] = {
    "windows": "Steps with at least one proposal.",
    "drafted_tokens": "Proposals made.",
    "accepted_tokens": "Proposals accepted, bonus tokens left out.",
    "accepted_at_depth": "Windows in which this depth was accepted.",
    "requests": "Requests finished.",
    "output_tokens": "Tokens generated.",
}
GAUGES: Mapping[Gauge, str] = {
    "acceptance_length": "Tokens per window, bonus included, over the engine's own last interval.",
    "requests_running": "Requests being decoded.",
    "requests_waiting": "Requests waiting for the engine.",
    "kv_cache_usage_ratio": "Share of the KV cache in use.",
}
assert set(COUNTERS) == set(get_args(Counter))
assert set(GAUGES) == set(get_args(Gauge))


class Scraper(Collector):
    """The state of one engine server's metrics. ``interval_s`` 0 polls nothing.

    ``drained``: this tap is the one reader of TensorRT-LLM's ``/metrics``, whose entries are gone once read.
    """

    def __init__(self, url: str, probe: Probe, *, interval_s: float, drained: bool = False) -> None:
        self._url = url
        self._probe = probe
        self._interval_s = interval_s
        self._drained = drained
        self._instance = urlsplit(url).netloc
        self._last: dict[tuple[Counter, Series], float] = {}
        self._created: dict[tuple[Counter, Series], float] = {}
        self._totals: dict[tuple[Counter, Series], float] = {}
        self._gauges: dict[tuple[Gauge, Series], float] = {}
        self._up: bool | None = None
        self._looked = False
        """There was a reading of this kind of engine before."""

    def register(self, registry: CollectorRegistry) -> None:
        """Export what is known at each look at the tap's own metrics."""
        registry.register(self)

    async def run(self) -> None:
        """Poll until cancelled."""
        if not self._interval_s:
            return
        async with aiohttp.ClientSession(timeout=TIMEOUT, cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                await self.poll(session)
                unknown = self._probe.kind == "auto"
                await asyncio.sleep(min(UNKNOWN_S, self._interval_s) if unknown else self._interval_s)

    def running(self) -> float | None:
        """Requests being decoded at the last look, on the mean of the server's engines; None where it does not say."""
        engines: dict[str, float] = {}
        for (name, series), value in self._gauges.items():
            if name == "requests_running":
                engines[series.engine] = engines.get(series.engine, 0.0) + value
        return sum(engines.values()) / len(engines) if engines else None

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """Read the engine's metrics once, if its kind has any."""
        kind = self._probe.kind
        path = exposition.PATHS.get(kind)
        if path is None:
            return
        text = await self._get(session, path)
        found = Scrape()
        if text is not None:
            # Half a megabyte of text would hold up every stream for milliseconds.
            found = await asyncio.to_thread(exposition.read, kind, text.decode(errors="replace"))
            self._probe.learn(found.facts)
        elif self._up is not False:
            logger.info("no metrics at %s%s", self._url, path)
        self._up = text is not None
        if text is not None:
            self.take(found)
        self._gauges = found.gauges
        if kind == "trtllm" and self._drained and not any(name == "drafted_tokens" for name, _ in found.counters):
            await self._drain(session)

    def take(self, found: Scrape) -> None:
        """Take a reading's counters, by how much they rose."""
        for key, value in found.counters.items():
            created = found.created.get(key)
            before = self._last.get(key)
            if before is None:
                before = 0.0 if self._looked else value
            restarted = value < before or _later(created, self._created.get(key))
            start = 0.0 if restarted else before
            self._totals[key] = self._totals.get(key, 0.0) + value - start
            self._last[key] = value
            if created is not None:
                self._created[key] = created
        self._looked = True

    async def _drain(self, session: aiohttp.ClientSession) -> None:
        data = await self._get(session, exposition.DRAINED)
        try:
            risen = exposition.read_iterations(orjson.loads(data)) if data else {}
        except orjson.JSONDecodeError:
            return
        for key, value in risen.items():
            self._totals[key] = self._totals.get(key, 0.0) + value

    async def _get(self, session: aiohttp.ClientSession, path: str) -> bytes | None:
        headers = {"accept": exposition.ACCEPT, **self._probe.headers}
        try:
            async with session.get(self._url + path, headers=headers, allow_redirects=False) as response:
                if response.status in (401, 403) and self._up is not False:
                    logger.warning(
                        "the engine wants an API key for %s%s: its own figures are missing; set engine.token or"
                        " engine.token_file",
                        self._url,
                        path,
                    )
                if response.status != 200 or (response.content_length or 0) > LARGEST:
                    return None
                data = bytearray()
                async for piece in response.content.iter_any():
                    data += piece
                    if len(data) > LARGEST:
                        return None
                return bytes(data)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        totals, gauges = self._totals.copy(), self._gauges  # read in a thread, while the next look may add to them
        for counter, text in COUNTERS.items():
            labels = (*LABELS, "depth") if counter == "accepted_at_depth" else LABELS
            total = CounterMetricFamily(f"driftwatch_live_engine_{counter}", text, labels=labels)
            yield from self._filled(total, ((s, v) for (name, s), v in totals.items() if name == counter))
        for gauge, text in GAUGES.items():
            value = GaugeMetricFamily(f"driftwatch_live_engine_{gauge}", text, labels=LABELS)
            yield from self._filled(value, ((s, v) for (name, s), v in gauges.items() if name == gauge))
        if self._up is not None:
            up = GaugeMetricFamily(
                "driftwatch_live_engine_up", "Whether the last look succeeded.", labels=("instance",)
            )
            up.add_metric((self._instance,), float(self._up))
            yield up

    def _filled(
        self, family: CounterMetricFamily | GaugeMetricFamily, values: Iterator[tuple[Series, float]]
    ) -> Iterator[Metric]:
        """The family, unless nothing is known of it: absence is not zero."""
        known = False
        for series, value in sorted(values):
            depth = (series.depth,) if series.depth else ()
            family.add_metric((self._instance, series.engine, series.model, *depth), value)
            known = True
        if known:
            yield family


def _later(created: float | None, before: float | None) -> bool:
    return created is not None and before is not None and created > before
