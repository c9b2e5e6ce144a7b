"""Prompts sent to real HTTP servers that keep time: what is asked of them, what the clocks say, what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from driftwatch.errors import DriftwatchError
from driftwatch.evaluate.engine import Limits, Prompt, failures, measure
from driftwatch.records import Record


@dataclass
class Served:
    """An OpenAI-compatible server that streams ``per_chunk`` tokens every ``pause_s``; it notes what it was asked."""

    per_chunk: int = 1
    pause_s: float = 0.002
    usage: bool = True
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    url: str = ""

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.Response(status=self.status, text="too\nmany requests")
        self.running += 1
        self.most = max(self.most, self.running)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        if chat:
            await self._send(response, {"choices": [{"delta": {"role": "assistant"}}]})
        for first in range(0, body["max_tokens"], self.per_chunk):
            if first or not chat:
                await asyncio.sleep(self.pause_s)
            part = {"delta": {"content": "x"}} if chat else {"text": "x"}
            await self._send(response, {"choices": [part]})
        if self.usage:
            await self._send(response, {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        await response.write(b"data: [DONE]\n\n")
        self.running -= 1
        return response

    async def _send(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


@pytest.fixture
def serve() -> Iterator[Callable[[Served], Served]]:
    """Starts servers on a loop of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runners: list[web.AppRunner] = []

    async def start(engine: Served) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", engine.models)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, engine.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    def begin(engine: Served) -> Served:
        asyncio.run_coroutine_threadsafe(start(engine), loop).result(10)
        return engine

    yield begin
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def prompts(count: int, tokens: int = 9, **fields: Any) -> list[Prompt]:
    given = fields or {"prompt_token_ids": [1, 2], "output_token_ids": [3], "temperature": 0.5, "top_p": 0.9}
    return [Prompt(i, Record(id=str(i), **given), tokens) for i in range(count)]


def test_clocks_count_the_engines_tokens_and_not_its_chunks(serve: Callable[[Served], Served]) -> None:
    plain, fast = serve(Served()), serve(Served(per_chunk=4))
    found = measure([plain.url, fast.url + "/"], prompts(6), Limits(6, 2))
    assert [[one.place for one in sorted(part, key=lambda t: t.place)] for part in found] == [list(range(6))] * 2
    for part in found:
        for one in part:
            assert one.clock is not None
            assert one.clock.tokens == 8
            assert one.clock.ttft_s > 0.0
            assert one.clock.decode_s > 0.0


def test_what_is_asked_is_the_recorded_request(serve: Callable[[Served], Served]) -> None:
    engine = serve(Served())
    measure([engine.url], prompts(1), Limits(1, 1))
    warm_up, body = engine.bodies
    assert warm_up == body
    assert body == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    measure([engine.url], prompts(1, messages=[{"role": "user", "content": "hi"}], output="o"), Limits(1, 1))
    assert engine.bodies[-1]["messages"] == [{"role": "user", "content": "hi"}]


def test_no_more_than_so_many_at_once(serve: Callable[[Served], Served]) -> None:
    engine = serve(Served())
    measure([engine.url], prompts(20), Limits(20, 3))
    assert engine.most <= 3
    assert len(engine.bodies) == 21


def test_a_rate_spreads_the_starts(serve: Callable[[Served], Served]) -> None:
    """Five starts at 50 a second take a tenth of a second at the least, however fast the answers."""
    engine = serve(Served(pause_s=0.0002))
    began = time.perf_counter()
    measure([engine.url], prompts(5, tokens=3), Limits(5, 8, rate=50.0))
    assert time.perf_counter() - began >= 5 / 50
    assert len(engine.bodies) == 6


def test_what_has_no_clock_is_counted(serve: Callable[[Served], Served]) -> None:
    (found,) = measure([serve(Served()).url], [*prompts(1), Prompt(1, prompts(1)[0].record, 1)], Limits(2, 1))
    assert failures(found) == {"too_short": 1}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Served(usage=False), "the first request failed: the stream gave no usage"),
        (Served(status=429), "the first request failed: 429 too many requests"),
    ],
)
def test_a_wrong_engine_is_one_line(serve: Callable[[Served], Served], engine: Served, message: str) -> None:
    with pytest.raises(DriftwatchError, match=message) as caught:
        measure([serve(engine).url], prompts(2), Limits(2, 1))
    assert "\n" not in str(caught.value)


def test_nobody_there() -> None:
    with pytest.raises(DriftwatchError, match=r"engine http://127.0.0.1:9: /v1/models: .*is it an OpenAI"):
        measure(["http://127.0.0.1:9"], prompts(1), Limits(1, 1))


def test_the_prefix_cache_is_cold_for_what_is_timed(serve: Callable[[Served], Served]) -> None:
    """One prompt is asked to warm up and not counted: no timed one was seen by the engine before."""
    engine = serve(Served())
    *timed, warm = [Prompt(i, Record(id=str(i), prompt_token_ids=[i], output_token_ids=[3]), 4) for i in range(1, 5)]
    (found,) = measure([engine.url], timed, Limits(3, 1), warm=warm)
    assert [body["prompt"] for body in engine.bodies] == [[4], [1], [2], [3]]
    assert len(found) == 3
