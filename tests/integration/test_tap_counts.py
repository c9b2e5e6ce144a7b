"""After a known script of traffic the tap's metrics are exactly the known counts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import aiohttp
from aiohttp import web

from .test_tap import CHAT, Bench, Control, bench, raw

LARGE = 60_000
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":5}}\n\n'


async def engine(request: web.Request) -> web.StreamResponse:
    """The body's ``want`` says what to do."""
    if request.method == "HEAD":
        return web.Response()
    want = json.loads(await request.read())["want"]
    if want.isdecimal():
        return web.json_response({"error": "x"}, status=int(want))
    if want in ("good", "large", "empty", "n"):
        text = {"large": "x" * LARGE, "empty": ""}.get(want, "hello")
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        return web.json_response({"choices": [{"index": i, **choice} for i in range(2 if want == "n" else 1)]})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(EVENT)
    assert request.transport is not None
    if want == "break":
        request.transport.abort()
    if want == "wait":
        await asyncio.sleep(60)
    if want == "fail":
        await response.write(b'data: {"error": {"message": "m"}}\n\n')
    await response.write(USAGE + b"data: [DONE]\n\n")
    return response


async def send(at: Bench, want: str, tenant: str | None = "a", path: str = CHAT, **more: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "want": want, **more}
    headers = {"x-tenant": tenant} if tenant else {}
    try:
        async with at.client.post(at.url + path, json=body, headers=headers) as answer:
            if want == "wait":
                await answer.content.readany()
                return  # in the middle: the connection is closed
            await answer.read()
    except aiohttp.ClientPayloadError:
        assert want == "break"


SCRIPT = Counter(
    {
        ("good", "a"): 7,
        ("stream", "a"): 4,
        ("good", None): 2,
        ("400", "a"): 3,
        ("404", None): 1,
        ("500", "a"): 2,
        ("503", "b"): 1,
        ("break", "a"): 2,
        ("fail", "b"): 1,
        ("wait", "a"): 3,
        ("large", "b"): 2,
        ("empty", "b"): 1,
        ("n", "b"): 1,
    }
)


class Picky(Control):
    """Takes samples of no tenant but ``a``."""

    async def answer(self, request: web.Request) -> web.Response:
        if b'"tenant":"none"' in await request.read():
            return web.json_response({"error": "x"}, status=422)
        return await super().answer(request)


def counts(metrics: bytes | str) -> dict[str, float]:
    lines = (metrics.decode() if isinstance(metrics, bytes) else metrics).splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith("driftwatch_"))
    return {name: float(value) for name, _, value in found}


async def test_a_known_script_gives_exactly_the_known_counts() -> None:
    sampling = {"per_window": 100, "window_s": 3600}
    async with bench(control=Picky(), tap={"capture_bytes": 50_000}, sampling=sampling) as at:
        at.engine.handler = engine
        for (want, tenant), count in SCRIPT.items():
            for _ in range(count):
                await send(at, want, tenant)
        await send(at, "good", path="/v1/embeddings")
        await send(at, "good", tenant="b", n=2)
        async with at.client.get(at.url + "/v1/models") as answer:
            assert answer.status == 404
        async with at.client.head(at.url + CHAT) as answer:
            await answer.read()
        assert (await raw(at.url, b"GET /a HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-tenant: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        assert (await raw(at.url, head + b"zz\r\n")).startswith(b"HTTP/1.1 400 ")
        port = at.tap.ports[0]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"5\r\nab")  # and leaves
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
        wanted = {
            ("tenant=a", "ok"): 11,
            ("tenant=a", "client_error"): 4,
            ("tenant=a", "engine_error"): 4,
            ("tenant=a", "aborted"): 4,
            ("tenant=none", "ok"): 2,
            ("tenant=none", "client_error"): 1,
            ("tenant=b", "engine_error"): 2,
            ("tenant=b", "ok"): 5,
            ("unrecorded", "ok"): 2,
            ("unrecorded", "client_error"): 2,
        }
        async with asyncio.timeout(10):
            while at.metric("requests_total", segment="tenant=a", outcome="aborted") < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with at.client.get(at.admin + "/metrics") as answer:
            found = counts(await answer.read())
        assert {name: value for name, value in found.items() if name.startswith("driftwatch_requests_total")} == {
            f'driftwatch_requests_total{{outcome="{outcome}",segment="{segment}"}}': float(count)
            for (segment, outcome), count in wanted.items()
        }
        assert found['driftwatch_time_to_first_token_seconds_count{segment="tenant=a"}'] == 4
        assert found['driftwatch_time_per_output_token_seconds_count{segment="tenant=a"}'] == 4
        assert found['driftwatch_end_to_end_seconds_count{segment="tenant=a"}'] == 11
        assert found['driftwatch_end_to_end_seconds_count{segment="tenant=b"}'] == 5
        at.tap.stop()
        async with asyncio.timeout(20):
            while at.metric("samples_total", segment="tenant=a", outcome="sent") < 11:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert len(at.control.records) == 11
    assert at.metric("samples_total", segment="tenant=none", outcome="dropped") == 2
    assert at.metric("samples_total", segment="tenant=b", outcome="skipped") == 3
    assert at.metric("samples_total", segment="tenant=b", outcome="not_chosen") == 0
    dropped = {"refused": 2, "too_large": 2, "no_output": 1, "several_choices": 2}
    text = [one for family in at.tap.metrics.registry.collect() for one in family.samples]
    reasons = {one.labels["reason"]: one.value for one in text if one.name == "driftwatch_dropped_total"}
    assert {reason: value for reason, value in reasons.items() if value} == dropped
