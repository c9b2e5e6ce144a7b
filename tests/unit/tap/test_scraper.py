"""The scraper against a server of recorded texts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from driftwatch.settings import EngineKind
from driftwatch.tap.probe import Probe
from driftwatch.tap.scraper import Scraper
from driftwatch.wire.exposition import Scrape, Series

METRICS = Path(__file__).parents[2] / "data" / "metrics"
PREFIX = "driftwatch_live_engine_"


class Bench:
    """A scraper whose engine answers with what the test says, and what it then exports."""

    def __init__(self, kind: EngineKind = "vllm", *, drained: bool = False) -> None:
        self.pages: dict[str, str | int] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.authorised: list[str | None] = []
        self.kind = kind
        self.drained = drained

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, request.headers.get("accept")))
        self.authorised.append(request.headers.get("authorization"))
        page = self.pages.get(request.path, 404)
        return web.Response(status=page) if isinstance(page, int) else web.Response(text=page)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Bench]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.probe = Probe(url, self.kind)
        self.scraper = Scraper(url, self.probe, interval_s=15, drained=self.drained)
        self.registry = CollectorRegistry(auto_describe=False)
        self.scraper.register(self.registry)
        try:
            async with aiohttp.ClientSession() as self.session:
                yield self
        finally:
            await runner.cleanup()

    async def poll(self, page: str | None = None) -> dict[str, float]:
        if page is not None:
            self.pages["/metrics"] = page
        await self.scraper.poll(self.session)
        return self.exported()

    def exported(self) -> dict[str, float]:
        """By name, with the engine and the depth where there are several."""
        found = {}
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                labels = [sample.labels[key] for key in ("engine", "depth") if key in sample.labels]
                found[".".join([sample.name.removeprefix(PREFIX), *labels])] = sample.value
        return found


def page(**engines: tuple[float, float | None]) -> str:
    """vLLM's counter of windows, for each engine with the time it began."""
    lines = []
    for name, (value, created) in engines.items():
        labels = f'{{engine="{name[1:]}",model_name="m"}}'
        lines.append(f"vllm:spec_decode_num_drafts_total{labels} {value}")
        lines += [f"vllm:spec_decode_num_drafts_created{labels} {created}"] if created is not None else []
    return "\n".join(lines) + "\n"


async def test_a_recorded_run() -> None:
    before, after = ((METRICS / f"draft3.T0.metrics_{when}.txt").read_text() for when in ("before", "after"))
    async with Bench().serving() as bench:
        first = await bench.poll(before)
        assert first["windows_total.0"] == 0
        assert await bench.poll(after) == {
            "windows_total.0": 3365,
            "drafted_tokens_total.0": 10095,
            "accepted_tokens_total.0": 4319,
            "accepted_at_depth_total.0.0": 2075,
            "accepted_at_depth_total.0.1": 1396,
            "accepted_at_depth_total.0.2": 848,
            "requests_total.0": 120,
            "output_tokens_total.0": 7680,
            "requests_running.0": 0,
            "requests_waiting.0": 0,
            "kv_cache_usage_ratio.0": 0,
            "up": 1,
        }
        assert bench.asked == [("/metrics", "text/plain;version=0.0.4")] * 2
        known = {"engine": "vllm", "kv_cache_dtype": "auto", "speculative_num_draft_tokens": "3"}
        assert bench.probe.deployment == known


def sglang(**windows: int) -> str:
    lines = [
        f'sglang:spec_verify_calls_total{{model_name="m",tenant="{name}"}} {value}' for name, value in windows.items()
    ]
    return "\n".join(['sglang:num_running_reqs{model_name="m"} 1.0', *lines]) + "\n"


async def test_a_series_that_turns_up_after_the_first_look_began_at_zero() -> None:
    """SGLang has no series before its first increment, and one more for each tenant."""
    async with Bench("sglang").serving() as bench:
        assert "windows_total.0" not in await bench.poll(sglang())
        assert (await bench.poll(sglang(a=7)))["windows_total.0"] == 7
        assert (await bench.poll(sglang(a=8, b=5)))["windows_total.0"] == 13
    async with Bench("sglang").serving() as bench:
        bench.pages["/metrics"] = 503
        await bench.poll()
        assert (await bench.poll(sglang(a=7)))["windows_total.0"] == 0, "this is the first look"


async def test_an_engine_that_wants_a_key_is_asked_with_it_and_the_missing_figures_explained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Bench("vllm").serving() as bench:
        bench.pages["/metrics"] = 401
        for _ in range(2):
            assert await bench.poll() == {"up": 0}
        (warning,) = [one for one in caplog.records if one.levelname == "WARNING"]
        assert "engine.token" in warning.getMessage()
        bench.probe.headers = {"authorization": "Bearer k"}
        await bench.poll(page(e0=(1, None)))
        assert bench.authorised == [None, None, "Bearer k"]


async def test_without_speculation_nothing_is_said_of_it() -> None:
    async with Bench().serving() as bench:
        found = await bench.poll((METRICS / "baseline.T0.metrics_after.txt").read_text())
    assert not any(name.startswith(("windows", "drafted", "accepted", "acceptance")) for name in found)


async def test_each_engine_restarts_for_itself() -> None:
    async with Bench().serving() as bench:
        await bench.poll(page(e0=(100, 1.0), e1=(50, 1.0)))
        await bench.poll(page(e0=(110, 1.0), e1=(60, 1.0)))
        found = await bench.poll(page(e0=(120, 1.0), e1=(5, 2.0)))
        assert (found["windows_total.0"], found["windows_total.1"]) == (20, 15)
        found = await bench.poll(page(e0=(500, 3.0), e1=(6, 2.0)))
        assert (found["windows_total.0"], found["windows_total.1"]) == (520, 16), "already past where it was"


async def test_a_fall_is_a_restart_where_nothing_says_when_it_began() -> None:
    async with Bench().serving() as bench:
        for value in (100, 130, 7, 9):
            found = await bench.poll(page(e0=(value, None)))
    assert found["windows_total.0"] == 39


async def test_an_engine_that_is_away_keeps_its_counters_and_loses_its_gauges() -> None:
    running = 'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
    async with Bench().serving() as bench:
        await bench.poll(page(e0=(1, None)))
        await bench.poll(page(e0=(4, None)) + running)
        bench.pages["/metrics"] = 503
        assert await bench.poll() == {"windows_total.0": 3, "up": 0}


@pytest.mark.parametrize("kind", ["auto", "openai"])
async def test_an_engine_of_unknown_kind_is_left_alone(kind: EngineKind) -> None:
    async with Bench(kind).serving() as bench:
        assert await bench.poll("x 1\n") == {}
        assert bench.asked == []


ITERATIONS = '[{"specDecodingStats": {"numDraftTokens": 12, "numAcceptedTokens": 5, "numRequestsWithDraftTokens": 4}}]'


@pytest.mark.parametrize("drained", [False, True])
async def test_drained_endpoints_are_read_by_the_one_configured_reader_only(drained: bool) -> None:
    async with Bench("trtllm", drained=drained).serving() as bench:
        bench.pages |= {"/prometheus/metrics": "", "/metrics": ITERATIONS, "/perf_metrics": "[]"}
        found = await bench.poll()
        asked = {path for path, _ in bench.asked}
    assert asked == {"/prometheus/metrics", *(["/metrics"] if drained else [])}
    assert found.get("accepted_tokens_total.0") == (5 if drained else None)


async def test_figures_that_prometheus_has_are_not_counted_twice() -> None:
    text = 'trtllm_spec_decode_drafted_tokens_total{model_name="m",token_position="0"} 5.0\n'
    async with Bench("trtllm", drained=True).serving() as bench:
        bench.pages |= {"/prometheus/metrics": text, "/metrics": ITERATIONS}
        await bench.poll()
        assert [path for path, _ in bench.asked] == ["/prometheus/metrics"]


async def test_zero_seconds_poll_nothing() -> None:
    await Scraper("http://127.0.0.1:9", Probe("http://127.0.0.1:9", "vllm"), interval_s=0).run()


def test_a_reason_that_turns_up_later_is_no_restart() -> None:
    scraper = Scraper("http://127.0.0.1:9", Probe("http://127.0.0.1:9", "vllm"), interval_s=0)
    key = ("requests", Series("0", "m"))
    for value in (10.0, 12.0):
        scraper.take(Scrape(counters={key: value}, created={key: 1.0}))  # type: ignore[dict-item]
    registry = CollectorRegistry(auto_describe=False)
    scraper.register(registry)
    assert (
        registry.get_sample_value(f"{PREFIX}requests_total", {"instance": "127.0.0.1:9", "engine": "0", "model": "m"})
        == 2.0
    )


async def test_the_load_is_that_of_one_engine_on_the_mean() -> None:
    def running(engine: int, model: str, value: float) -> str:
        return f'vllm:num_requests_running{{engine="{engine}",model_name="{model}"}} {value}\n'

    async with Bench().serving() as bench:
        assert bench.scraper.running() is None
        await bench.poll(running(0, "m", 3.0) + running(0, "lora", 1.0) + running(1, "m", 8.0))
        assert bench.scraper.running() == 6.0
        bench.pages["/metrics"] = 503
        await bench.poll()
        assert bench.scraper.running() is None
