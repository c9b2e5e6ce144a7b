"""A real tap in front of a real server: what clients get through it, what the engine notices, and what control is sent.

The engine here answers with bytes that tests give it, among them recorded ones of a real vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from driftwatch.errors import DriftwatchError
from driftwatch.settings import Settings
from driftwatch.tap.app import Tap, run

EXCHANGES = Path(__file__).parents[1] / "data" / "wire" / "exchanges.jsonl"
CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Engine:
    """An upstream server with one handler for everything; ``/version`` answers only if it is a vLLM."""

    def __init__(self) -> None:
        self.handler: Handler = self.echo
        self.version: str | None = None
        self.requests: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.stopped = asyncio.Event()
        """Set when a handler was cancelled: the client of this server has gone."""
        self.url = ""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/version", "/v1/models", "/server_info", "/get_server_info") and request.method == "GET":
            if request.path == "/version" and self.version:
                return web.json_response({"version": self.version})
            if request.path == "/v1/models" and self.version:
                return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})
            return web.Response(status=404)
        self.requests.append(request)
        try:
            return await self.handler(request)
        except asyncio.CancelledError:
            self.stopped.set()
            raise

    async def echo(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        return web.Response(body=self.bodies[-1], content_type=request.content_type)

    def replays(self, pieces: list[bytes], content_type: str = "text/event-stream; charset=utf-8") -> None:
        """Answer with these pieces: as a stream, or with a length if it is JSON."""

        async def handler(request: web.Request) -> web.StreamResponse:
            self.bodies.append(await request.read())
            response = web.StreamResponse(headers={"content-type": content_type})
            if content_type == "application/json":
                response.content_length = sum(map(len, pieces))
            await response.prepare(request)
            for piece in pieces:
                await response.write(piece)
            await response.write_eof()
            return response

        self.handler = handler

    @contextlib.asynccontextmanager
    async def on(self, port: int = 0) -> AsyncIterator[None]:
        server = web.Application(client_max_size=1 << 30)
        server.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(server, handler_cancellation=True, shutdown_timeout=0.1, auto_decompress=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield
        finally:
            await runner.cleanup()


class Control:
    """Takes samples."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.records += [json.loads(line) for line in (await request.read()).splitlines()]
        return web.json_response({"stored": 1, "duplicates": 0}, status=201)

    async def budgets(self, request: web.Request) -> web.Response:
        return web.Response(status=304)  # what the settings say holds

    @contextlib.asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        server = web.Application(client_max_size=20_000_000)
        server.router.add_post("/v1/samples", self.answer)
        server.router.add_get("/v1/sampling", self.budgets)
        runner = web.AppRunner(server)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield
        finally:
            await runner.cleanup()


class Bench:
    """Engine, control and a tap between, with a client for the tap and one for the engine itself."""

    def __init__(self, engine: Engine, control: Control, tap: Tap, client: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.control = control
        self.tap = tap
        self.client = client
        self.url, self.admin = (f"http://127.0.0.1:{port}" for port in tap.ports)

    async def both(self, method: str, path: str, **options: Any) -> tuple[Any, Any]:
        """The same request to the engine and through the tap: all of each answer."""
        return await self.ask(self.engine.url, method, path, **options), await self.ask(
            self.url, method, path, **options
        )

    async def ask(self, url: str, method: str, path: str, **options: Any) -> Any:
        async with self.client.request(method, url + path, allow_redirects=False, **options) as response:
            lines = [(name.lower(), value) for name, value in response.raw_headers]
            kept = sorted(line for line in lines if line[0] not in (b"date", b"connection"))
            return response.status, kept, await response.read()

    def metric(self, name: str, **labels: str) -> float:
        return self.tap.metrics.registry.get_sample_value(f"driftwatch_{name}", labels) or 0.0

    async def until_probed(self) -> None:
        """Wait until the tap knows its engine: it then asks for token ids."""
        probe = {**BODY, "probe": True}
        async with asyncio.timeout(10):
            while True:
                async with self.client.post(self.url + CHAT, json=probe) as response:
                    await response.read()
                if b"return_token_ids" in self.engine.bodies[-1]:
                    return
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def bench(
    *, on: bool = True, vllm: bool = False, control: Control | None = None, **sections: dict[str, Any]
) -> AsyncIterator[Bench]:
    engine, control = Engine(), control or Control()
    engine.version = "0.32.0" if vllm else None
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(control.on())
        if on:
            await stack.enter_async_context(engine.on())
        else:
            engine.url = f"http://127.0.0.1:{free_port()}"
        settings = Settings(
            engine={"url": engine.url, **sections.pop("engine", {})},
            tap={
                "listen": "127.0.0.1:0",
                "admin": "127.0.0.1:0",
                "control_url": control.url,
                "drain_s": 5,
                "notice_s": 0,
                **sections.pop("tap", {}),
            },
            segments=[{"label": "tenant", "header": "x-tenant"}],
            **sections,  # type: ignore[arg-type]
        )
        tap = Tap(settings)
        client = await stack.enter_async_context(
            aiohttp.ClientSession(
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=0),
                read_bufsize=1 << 20,
            )
        )
        serving = asyncio.create_task(tap.serve())
        try:
            async with asyncio.timeout(10):
                while not tap.ready:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            yield Bench(engine, control, tap, client)
        finally:
            tap.stop()
            await serving


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def recorded(kind: str) -> tuple[str, bytes, list[bytes]]:
    """Path, request body and the pieces of the answer's body of a recorded exchange."""
    row = next(row for row in map(json.loads, EXCHANGES.read_text().splitlines()) if row["kind"] == kind)
    request = base64.b64decode(row["request_b64"]).partition(b"\r\n\r\n")[2]
    raw = b"".join(base64.b64decode(data) for _, data in row["response_chunks"])
    head, _, rest = raw.partition(b"\r\n\r\n")
    if b"chunked" not in head:
        return row["path"], request, [rest]
    pieces = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        pieces.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return row["path"], request, [piece for piece in pieces if piece]


def events(body: bytes) -> list[Any]:
    items = [block.removeprefix(b"data: ") for block in body.split(b"\n\n") if block]
    return [json.loads(item) if item != b"[DONE]" else "[DONE]" for item in items]


# --- bytes and headers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "n2", "stop", "no_usage_requested", "extra_stream_completion"])
async def test_recorded_streams_come_through_byte_for_byte(kind: str) -> None:
    path, request, pieces = recorded(kind)
    async with bench() as b:
        b.engine.replays(pieces)
        direct, through = await b.both("POST", path, data=request)
        assert direct == through
        assert through[2] == b"".join(pieces)
        assert b.engine.bodies == [request, request]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_chunks_come_as_they_are_sent(path: str) -> None:
    """The engine sends each chunk only when the client has the one before."""
    received = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(5):
            received.clear()
            await response.write(b"data: %d\n\n" % number)
            await asyncio.wait_for(received.wait(), 5)
        return response

    async with bench() as b:
        b.engine.handler = handler
        async with b.client.post(b.url + path, json=BODY) as response:
            for number in range(5):
                assert await response.content.readany() == b"data: %d\n\n" % number
                received.set()


@pytest.mark.parametrize(
    ("method", "status", "headers", "body"),
    [
        ("POST", 400, {"content-type": "application/json"}, b'{"error": {"message": "bad"}}'),
        ("POST", 500, {"retry-after": "3"}, b"oops"),
        ("GET", 200, {"x-multi": "a", "etag": '"1"'}, b"\x00\xff" * 1000),
        ("GET", 204, {}, b""),
        ("GET", 302, {"location": "/elsewhere?x=1"}, b"moved"),
        ("GET", 307, {"location": "http://127.0.0.1:9/"}, b""),
        ("GET", 304, {"etag": '"1"'}, b""),
        ("HEAD", 200, {"content-length": "5"}, b""),
        ("DELETE", 200, {}, b"gone"),
        ("PUT", 201, {}, b"made"),
        ("OPTIONS", 200, {"allow": "GET"}, b""),
        ("PATCH", 299, {}, b"odd"),
    ],
)
async def test_answers_come_through_as_they_are(method: str, status: int, headers: dict[str, str], body: bytes) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers=headers, body=body or None)

    async with bench() as b:
        b.engine.handler = handler
        for path in ("/some/path", CHAT):
            direct, through = await b.both(method, path, data=b"x" if method in ("POST", "PUT") else None)
            assert through == direct


@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_compressed_answers_stay_compressed(encoding: str) -> None:
    body = gzip.compress(b"x" * 1000)

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.headers["accept-encoding"] == encoding
        return web.Response(headers={"content-encoding": encoding}, body=body)

    async with bench() as b:
        b.engine.handler = handler
        direct, through = await b.both("POST", CHAT, json=BODY, headers={"accept-encoding": encoding})
        assert through == direct
        assert through[2] == body


async def raw(url: str, request: bytes) -> bytes:
    """Send bytes, read until the other side closes."""
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_the_engine_sees_the_request_as_the_client_sent_it() -> None:
    """Path and query not decoded, headers neither added nor lost, hop-by-hop ones dropped."""
    async with bench() as b:
        b.engine.handler = b.engine.echo
        request = (
            b"POST /a%2Fb/../c%20d//%E2%82%AC?q=%2B+%26&x=&y HTTP/1.1\r\nHost: models.example\r\n"
            b"X-One: 1\r\nX-One: 2\r\nAuthorization: Bearer k\r\nCookie: a=b; c=d\r\nX-Utf8: \xe2\x82\xac\r\n"
            b"Connection: close, X-Hop\r\nX-Hop: 1\r\nTE: trailers\r\nKeep-Alive: 1\r\nContent-Length: 3\r\n\r\nabc"
        )
        assert (await raw(b.url, request)).endswith(b"\r\n\r\nabc")
        (seen,) = b.engine.requests
        assert seen.raw_path == "/a%2Fb/../c%20d//%E2%82%AC?q=%2B+%26&x=&y"
        assert sorted((name.lower(), value) for name, value in seen.raw_headers) == [
            (b"authorization", b"Bearer k"),
            (b"content-length", b"3"),
            (b"cookie", b"a=b; c=d"),
            (b"host", b"models.example"),
            (b"x-one", b"1"),
            (b"x-one", b"2"),
            (b"x-utf8", b"\xe2\x82\xac"),
        ]


async def test_the_client_gets_no_hop_by_hop_headers_and_repeated_ones_in_order() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nServer: own\r\nDate: today\r\nX-Latin: \xe9\r\n"
            b"Connection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nContent-Length: 2\r\n\r\nok"
        )
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, bench(on=False, engine={"url": url}) as b:
        answer = await raw(b.url, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer.split(b"\r\n") == [
            b"HTTP/1.1 200 OK",
            b"Set-Cookie: a=1",
            b"Set-Cookie: b=2",
            b"Server: own",
            b"Date: today",
            b"X-Latin: \xe9",
            b"Content-Length: 2",
            b"Connection: close",
            b"",
            b"ok",
        ]


async def test_chunked_and_expected_bodies_arrive() -> None:
    async with bench() as b:
        for path in (b"/upload", CHAT.encode()):
            head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\n"
            chunked = head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
            answer = await raw(b.url, chunked)
            assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
            assert answer.endswith(b"abcde")
        assert b.engine.bodies == [b"abcde", b"abcde"]


async def test_one_clients_cookies_are_not_sent_with_the_others_requests() -> None:
    seen: list[str | None] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("cookie"))
        response = web.Response(text="x")
        response.set_cookie("session", request.query["user"])
        return response

    # By name: a client library's jar would not keep cookies of a bare address.
    engine, port = Engine(), free_port()
    engine.handler = handler
    async with engine.on(port), bench(on=False, engine={"url": f"http://localhost:{port}"}) as b:
        for user in ("ann", "bob"):
            _, headers, _ = await b.ask(b.url, "GET", f"/?user={user}")
            assert (b"set-cookie", b"session=%s; Path=/" % user.encode()) in headers
        await b.ask(b.url, "GET", "/?user=bob", headers={"cookie": "session=bob"})
        assert seen == [None, None, "session=bob"]


async def test_an_answer_without_body_may_state_a_length() -> None:
    """304 does so, and the connection goes on."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 304 Not Modified\r\nETag: 1\r\nContent-Length: 700\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, bench(on=False, engine={"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}) as b:
        one = b"GET / HTTP/1.1\r\nHost: x\r\n"
        answer = await raw(b.url, one + b"\r\n" + one + b"Connection: close\r\n\r\n")
        first = b"HTTP/1.1 304 Not Modified\r\nETag: 1\r\nContent-Length: 700\r\n"
        assert answer == first + b"\r\n" + first + b"Connection: close\r\n\r\n"


@pytest.mark.parametrize("path", ["/upload", CHAT])
async def test_a_body_of_100_mb_streams_through_in_bounded_memory(path: str) -> None:
    """Neither side of the tap keeps it: the process that holds client, tap and engine hardly grows."""
    size, piece = 100_000_000, b"x" * 100_000
    total = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal total
        async for data in request.content.iter_any():
            total += len(data)
        return web.Response(text=str(total))

    async def body() -> AsyncIterator[bytes]:
        for _ in range(size // len(piece)):
            yield piece

    async with bench() as b:
        b.engine.handler = handler
        before = _rss()
        highest = before

        async def watch() -> None:
            nonlocal highest
            while True:
                highest = max(highest, _rss())
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        status, _, text = await b.ask(b.url, "POST", path, data=body(), headers={"content-length": str(size)})
        watching.cancel()
        assert (status, text) == (200, b"%d" % size)
        assert highest - before < 40_000_000
        if path == CHAT:
            assert b.metric("dropped_total", reason="too_large") == 1


def _rss() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_fifty_streams_at_once_do_not_mix() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        name = json.loads(await request.read())["name"]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(20):
            await response.write(b"data: %s %d\n\n" % (name.encode(), number))
            await asyncio.sleep(0.005)
        return response

    async def one(b: Bench, name: str) -> bool:
        expected = "".join(f"data: {name} {number}\n\n" for number in range(20)).encode()
        return bool((await b.ask(b.url, "POST", CHAT, json={"name": name}))[2] == expected)

    async with bench() as b:
        b.engine.handler = handler
        assert all(await asyncio.gather(*(one(b, f"client-{number}") for number in range(50))))
        assert b.metric("requests_total", segment="tenant=none", outcome="ok") == 50


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/upload"])
@pytest.mark.parametrize("moment", ["before headers", "mid-stream"])
async def test_the_engine_notices_within_a_second_that_a_client_left(path: str, moment: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        if moment == "before headers":
            await asyncio.sleep(60)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await asyncio.sleep(60)
        return response

    async with bench() as b:
        b.engine.handler = handler
        port = int(b.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}" % path.encode())
        if moment == "mid-stream":
            await asyncio.wait_for(reader.readuntil(b"data: 1\n\n"), 5)
        else:
            async with asyncio.timeout(5):
                while not b.engine.requests:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        writer.transport.abort()
        await asyncio.wait_for(b.engine.stopped.wait(), 1)
        segment = "tenant=none" if path == CHAT else "unrecorded"
        async with asyncio.timeout(5):
            while not b.metric("requests_total", segment=segment, outcome="aborted"):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_a_client_that_leaves_in_its_own_body_is_counted_as_aborted() -> None:
    async with bench() as b:
        port = int(b.url.rpartition(":")[2])
        for path in (CHAT, "/upload"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 200\r\n\r\nabc" % path.encode())
            await asyncio.sleep(0.05)
            writer.transport.abort()
        async with asyncio.timeout(5):
            for segment in ("tenant=none", "unrecorded"):
                while not b.metric("requests_total", segment=segment, outcome="aborted"):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)


@pytest.mark.parametrize("length", [None, 1000])
async def test_an_answer_that_breaks_off_breaks_off(length: int | None) -> None:
    """A client must not take half an answer for a whole one."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        response.content_length = length
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with bench() as b:
        b.engine.handler = handler
        async with b.client.post(b.url + CHAT, json=BODY) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        assert b.metric("requests_total", segment="tenant=none", outcome="engine_error") == 1


@pytest.mark.parametrize(("path", "segment"), [(CHAT, "tenant=a"), ("/v1/models/x", "unrecorded")])
async def test_an_engine_that_cannot_be_reached_is_a_502(path: str, segment: str) -> None:
    async with bench(on=False) as b:
        status, _, body = await b.ask(b.url, "POST", path, json=BODY, headers={"x-tenant": "a"})
        assert status == 502
        error = json.loads(body)["error"]
        assert set(error) == {"code", "message", "hint"}
        assert error["code"] == "engine_unreachable"
        assert b.metric("requests_total", segment=segment, outcome="unreachable") == 1


async def test_an_engine_that_hangs_up_is_a_502() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server, bench(on=False, engine={"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}) as b:
        status, _, body = await b.ask(b.url, "POST", CHAT, json=BODY)
        assert (status, json.loads(body)["error"]["code"]) == (502, "engine_broke_off")


async def test_a_request_over_which_the_engine_dies_is_not_made_twice() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if not head.startswith(b"POST"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    return
                seen.append(await reader.readexactly(3))
                if len(seen) > 1:
                    await asyncio.sleep(0.8)
                    return
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, bench(on=False, engine={"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}) as b:
        assert (await b.ask(b.url, "POST", CHAT, data=b"abc"))[2] == b"ok"
        status, _, _ = await b.ask(b.url, "POST", CHAT, data=b"abc")
        assert status == 502
    assert len(seen) == 2


@pytest.mark.parametrize("path", [CHAT, "/other"])
async def test_a_kept_connection_that_the_engine_closes_costs_no_request(path: str) -> None:
    """The engine closes each connection in the moment in which a second request comes on it."""
    connections = 0
    bodies: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        head = await reader.readuntil(b"\r\n\r\n")
        if b"POST" not in head:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return writer.close()
        connections += 1
        bodies.append(await reader.readexactly(5))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.read(10)  # the next request begins
        return writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, bench(on=False, engine={"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}) as b:
        for _ in range(3):
            status, _, body = await b.ask(b.url, "POST", path, data=b"hello")
            assert (status, body) == (200, b"ok")
        assert bodies == [b"hello"] * 3
        # The second came on a connection of its own, which is not kept.
        assert connections == 3


async def test_a_failing_recorder_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:

        def fail(*args: object) -> None:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(b.tap._segments, "of", fail)
        status, _, body = await b.ask(b.url, "POST", CHAT, data=b"abc")
        assert (status, body) == (200, b"abc")
        assert b.metric("dropped_total", reason="recorder_error") == 1


# --- injection --------------------------------------------------------------------------------------------------------


def asked(request: bytes, **changes: Any) -> bytes:
    """The recorded request as a client would have sent it that does not know of token ids."""
    body = {**json.loads(request), **changes}
    return json.dumps({key: value for key, value in body.items() if value is not None}).encode()


async def test_a_stream_is_recorded_with_ids_and_the_client_sees_none_of_it() -> None:
    path, request, pieces = recorded("plain")
    async with bench(vllm=True, sampling={"window_s": 3600}) as b:
        await b.until_probed()
        b.engine.replays(pieces)
        plain = asked(request, return_token_ids=None, stream_options=None)
        _, _, body = await b.ask(b.url, "POST", path, data=plain, headers={"x-request-id": "r-1", "x-tenant": "a"})
        sent = json.loads(b.engine.bodies[-1])
        assert sent == json.loads(request)
        assert b'_ids":[' not in body
        assert b'"usage"' not in body
        out, before = events(body), events(b"".join(pieces))
        assert len(out) == len(before) - 1
        assert out[-1] == "[DONE]"
    (record,) = [record for record in b.control.records if record["id"] == "r-1"]
    assert len(record["output_token_ids"]) == 48
    assert record["engine"]["accepted"] == 37
    assert record["labels"] == {"tenant": "a"}
    assert record["weight"] == 1.0
    assert record["deployment"] == {
        "engine": "vllm",
        "version": "0.32.0",
        "system_fingerprint": "vllm-0.32.0-92e136f8",
    }
    assert record["timing"]["ttft_s"] > 0
    assert record["timing"]["tpot_s"] > 0


async def test_a_plain_answer_is_stripped_and_its_length_is_right() -> None:
    path, request, pieces = recorded("extra_nonstream_chat")
    async with bench(vllm=True) as b:
        await b.until_probed()
        b.engine.replays(pieces, "application/json")
        status, headers, body = await b.ask(b.url, "POST", path, data=asked(request, return_token_ids=None))
        expected = json.loads(pieces[0])
        expected["prompt_token_ids"] = expected["choices"][0]["token_ids"] = None
        assert (status, json.loads(body)) == (200, expected)
        assert (b"content-length", b"%d" % len(body)) in headers


@pytest.mark.parametrize("place", ["choice", "root"])
async def test_a_large_plain_answer_is_stripped_as_it_passes(place: str) -> None:
    """The client gets the same JSON as without the tap, under the engine's own length, and no stream waits for it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": 'a"\\b' * 400_000}, "finish_reason": "stop"}
    answer: dict[str, Any] = {"id": "c", "choices": [choice | {"token_ids": None}], "prompt_token_ids": None}
    asked = json.loads(json.dumps(answer))
    (asked if place == "root" else asked["choices"][0])["prompt_token_ids" if place == "root" else "token_ids"] = list(
        range(1_500_000)
    )
    async with bench(vllm=True, tap={"memory_bytes": 4_000_000}) as at:
        await at.until_probed()
        body = json.dumps(asked).encode()
        at.engine.replays([body[i : i + 65_536] for i in range(0, len(body), 65_536)], "application/json")
        status, _, got = await at.ask(at.url, "POST", CHAT, json=BODY)
        assert (status, json.loads(got)) == (200, answer)
        assert len(got) == len(body)
        assert at.metric("dropped_total", reason="too_large") == 1
        assert at.metric("requests_total", segment="tenant=none", outcome="ok") >= 1


async def test_what_the_tap_refuses_is_counted() -> None:
    async with bench() as at:
        for request in (b"GET /a HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 70_000 + b"\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", at.tap.ports[0])
            writer.write(request)
            assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 4")
            writer.close()
        assert at.metric("requests_total", segment="unrecorded", outcome="client_error") == 2
        reader, writer = await asyncio.open_connection("127.0.0.1", at.tap.ports[0])
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab".encode())
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 400 ")
        writer.close()
        assert at.metric("requests_total", segment="tenant=none", outcome="client_error") == 1


async def test_a_stripped_stream_that_came_with_a_length_has_the_right_one() -> None:
    """As from a gateway that buffers: the next answer on this connection begins where this one says that it ends."""
    path, request, pieces = recorded("plain")
    async with bench(vllm=True) as b:
        await b.until_probed()

        async def handler(request: web.Request) -> web.StreamResponse:
            b.engine.bodies.append(await request.read())
            return web.Response(body=b"".join(pieces), headers={"content-type": "text/event-stream"})

        b.engine.handler = handler
        plain = asked(request, return_token_ids=None, stream_options=None)
        for _ in range(2):
            status, headers, body = await b.ask(b.url, "POST", path, data=plain)
            assert status == 200
            assert (b"content-length", b"%d" % len(body)) in headers
            assert b'_ids":[' not in body
            assert body.rstrip().endswith(b"data: [DONE]")


async def test_a_client_that_asks_itself_gets_every_byte() -> None:
    path, request, pieces = recorded("plain")
    async with bench(vllm=True) as b:
        await b.until_probed()
        b.engine.replays(pieces)
        assert (await b.ask(b.url, "POST", path, data=request))[2] == b"".join(pieces)
        assert b.engine.bodies[-1] == request


async def test_errors_and_bodies_that_are_no_json_pass_untouched() -> None:
    path, request, pieces = recorded("invalid_400")
    async with bench(vllm=True) as b:
        await b.until_probed()

        async def handler(request: web.Request) -> web.StreamResponse:
            b.engine.bodies.append(await request.read())
            return web.Response(status=400, body=pieces[0], content_type="application/json")

        b.engine.handler = handler
        plain = asked(request, return_token_ids=None)
        direct, through = await b.both("POST", path, data=plain)
        assert through == direct
        await b.ask(b.url, "POST", path, data=b"{not json")
        assert b.engine.bodies[-1] == b"{not json"


async def test_a_plain_answer_that_breaks_off_breaks_off_although_it_is_held_back() -> None:
    async with bench(vllm=True) as b:
        await b.until_probed()

        async def handler(request: web.Request) -> web.StreamResponse:
            await request.read()
            response = web.StreamResponse(headers={"content-type": "application/json"})
            response.content_length = 1000
            await response.prepare(request)
            await response.write(b'{"choices":')
            await asyncio.sleep(0.05)
            assert request.transport is not None
            request.transport.abort()
            return response

        b.engine.handler = handler
        async with b.client.post(b.url + CHAT, json=BODY) as response:
            assert response.content_length == 1000
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()


# --- samples, admin, life and death -----------------------------------------------------------------------------------


async def test_samples_reach_control_while_the_tap_runs() -> None:
    answer = {"choices": [{"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}]}
    async with bench(sampling={"per_window": 3, "window_s": 0.2}) as b:
        b.engine.replays([json.dumps(answer).encode()], "application/json")
        await asyncio.gather(*(b.ask(b.url, "POST", CHAT, json=BODY) for _ in range(20)))
        async with asyncio.timeout(10):
            while sum(record["weight"] for record in b.control.records) < 19.99:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert sum(record["weight"] for record in b.control.records) == pytest.approx(20)
    assert all(record["output"] == "hello" for record in b.control.records)
    assert "Bearer" not in json.dumps(b.control.records)


async def test_of_much_traffic_little_is_asked_all_is_counted_and_the_samples_stand_for_all() -> None:
    path, request, pieces = recorded("plain")
    plain = asked(request, return_token_ids=None, stream_options=None)
    async with bench(vllm=True, sampling={"per_window": 1, "window_s": 1}) as b:
        await b.until_probed()
        b.engine.bodies.clear()
        sent = 0

        async def handler(request: web.Request) -> web.StreamResponse:
            b.engine.bodies.append(await request.read())
            unasked = [b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\n', b"data: [DONE]\n\n"]
            body = b"".join(pieces if b"return_token_ids" in b.engine.bodies[-1] else unasked)
            return web.Response(body=body, headers={"content-type": "text/event-stream"})

        b.engine.handler = handler

        async def send(count: int) -> None:
            nonlocal sent
            answers = await asyncio.gather(
                *(b.ask(b.url, "POST", path, data=plain, headers={"x-tenant": "a"}) for _ in range(count))
            )
            sent += count
            assert all(status == 200 and b'_ids":[' not in body for status, _, body in answers)

        def asked_for() -> int:
            return sum(b"return_token_ids" in body for body in b.engine.bodies)

        async with asyncio.timeout(30):
            while sent - asked_for() < 20:  # until a window has been busy enough for the next one to leave some alone
                await send(20)
        await asyncio.sleep(2.1)  # a window without traffic: all may be kept again
        before = asked_for()
        await send(1)
        assert asked_for() == before + 1
        assert b.metric("requests_total", segment="tenant=a", outcome="ok") == sent
        assert b.metric("time_to_first_token_seconds_count", segment="tenant=a") == sent
        assert b.metric("time_per_output_token_seconds_count", segment="tenant=a") == asked_for()
    samples = [record for record in b.control.records if record["labels"] == {"tenant": "a"}]
    assert [len(record["output_token_ids"]) for record in samples] == [48] * len(samples)
    assert sum(record["weight"] for record in samples) == pytest.approx(sent)
    assert b.metric("samples_total", segment="tenant=a", outcome="not_chosen") == sent - len(samples)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_an_engine_that_compresses_all_the_same_is_asked_once_and_no_client_sees_it(
    encoding: str, streams: bool
) -> None:
    """What was asked for cannot be taken out of such an answer: the request goes again as the client sent it."""
    async with bench(vllm=True) as b:
        await b.until_probed()
        b.engine.bodies.clear()

        async def handler(request: web.Request) -> web.StreamResponse:
            b.engine.bodies.append(await request.read())
            shown = b"return_token_ids" in b.engine.bodies[-1]
            answer = json.dumps({"choices": [], "token_ids": [1] if shown else None}).encode()
            kind = "text/event-stream" if streams else "application/json"
            body = gzip.compress(b"data: " + answer + b"\n\n" if streams else answer)
            return web.Response(body=body, headers={"content-type": kind, "content-encoding": encoding})

        b.engine.handler = handler
        client = json.dumps(BODY | {"stream": streams}).encode()
        for _ in range(3):
            _, headers, body = await b.ask(b.url, "POST", CHAT, data=client, headers={"accept-encoding": encoding})
            assert (b"content-encoding", encoding.encode()) in headers
            assert b"[1]" not in gzip.decompress(body)
        assert [body == client for body in b.engine.bodies] == [False, True, True, True]
        assert b.engine.requests[-3].headers["accept-encoding"] == encoding
        assert b.metric("not_asked_total") == 2
        assert b.metric("requests_total", segment="tenant=none", outcome="ok") >= 3
        assert b.metric("dropped_total", reason="recorder_error") == 0


async def test_an_error_that_quotes_its_request_quotes_the_clients() -> None:
    """As servers do that validate a body against a schema."""
    path, request, _ = recorded("invalid_400")
    async with bench(vllm=True) as b:
        await b.until_probed()
        b.engine.bodies.clear()

        async def handler(request: web.Request) -> web.StreamResponse:
            b.engine.bodies.append(await request.read())
            return web.json_response({"error": {"input": json.loads(b.engine.bodies[-1])}}, status=422)

        b.engine.handler = handler
        client = asked(request, return_token_ids=None)
        status, _, body = await b.ask(b.url, "POST", path, data=client)
        assert (status, json.loads(body)) == (422, {"error": {"input": json.loads(client)}})
        assert [b"return_token_ids" in one for one in b.engine.bodies] == [True, False]
        assert b.metric("requests_total", segment="tenant=none", outcome="client_error") == 1
        await b.ask(b.url, "POST", path, data=client)
        assert b"return_token_ids" in b.engine.bodies[2], "the fault was the client's"


async def test_an_engine_that_refuses_what_is_asked_costs_no_request() -> None:
    path, request, _ = recorded("extra_nonstream_chat")
    async with bench(vllm=True) as b:
        await b.until_probed()
        b.engine.bodies.clear()

        async def handler(request: web.Request) -> web.StreamResponse:
            b.engine.bodies.append(await request.read())
            strict = b"return_token_ids" in b.engine.bodies[-1]
            return web.json_response(
                {"error": "extra fields"} if strict else {"id": "x"}, status=400 if strict else 200
            )

        b.engine.handler = handler
        client = asked(request, return_token_ids=None)
        for _ in range(3):
            status, _, body = await b.ask(b.url, "POST", path, data=client)
            assert (status, json.loads(body)) == (200, {"id": "x"})
        assert [b"return_token_ids" in one for one in b.engine.bodies] == [True, False, False, False]
        assert b.metric("requests_total", segment="tenant=none", outcome="client_error") == 0


async def test_the_admin_listener() -> None:
    async with bench() as b:
        await b.ask(b.url, "POST", CHAT, data=b"x")
        assert (await b.ask(b.admin, "GET", "/healthz"))[0] == 200
        assert (await b.ask(b.admin, "GET", "/readyz"))[0] == 200
        status, headers, text = await b.ask(b.admin, "GET", "/metrics")
        assert status == 200
        assert any(name == b"content-type" and value.startswith(b"text/plain") for name, value in headers)
        assert b'driftwatch_requests_total{outcome="ok",segment="tenant=none"} 1.0' in text
        assert b'driftwatch_dropped_total{reason="queue_full"} 0.0' in text
        assert b"driftwatch_queue_depth 0.0" in text
        status, _, text = await b.ask(b.admin, "GET", "/v1/models")
        assert (status, json.loads(text)["error"]["code"]) == (404, "not_found")
        assert (await b.ask(b.admin, "POST", "/metrics"))[0] == 405
        # The same paths on the other listener are the engine's.
        await b.ask(b.url, "GET", "/healthz")
        assert b.engine.requests[-1].path == "/healthz"


async def test_stopping_lets_streams_finish_and_is_not_ready_meanwhile() -> None:
    go_on = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: 2\n\n")
        return response

    async with bench() as b:
        b.engine.handler = handler
        async with b.client.post(b.url + CHAT, json=BODY) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            b.tap.stop()
            assert (await b.ask(b.admin, "GET", "/readyz"))[0] == 503
            assert (await b.ask(b.admin, "GET", "/healthz"))[0] == 200
            go_on.set()
            assert await response.read() == b"data: 2\n\n"


async def test_a_stream_that_outlasts_the_drain_is_cut_off_and_the_engine_told() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"1")
        await asyncio.sleep(60)
        return response

    async with bench(tap={"drain_s": 0}) as b:
        b.engine.handler = handler
        async with b.client.post(b.url + CHAT, json=BODY) as response:
            assert await response.content.readany() == b"1"
            b.tap.stop()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        await asyncio.wait_for(b.engine.stopped.wait(), 5)


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        for key, other in (("listen", "admin"), ("admin", "listen")):
            with pytest.raises(DriftwatchError, match=rf"`tap\.{key}`: cannot listen on {listen}: .*; free the port"):
                run(Settings(tap={key: listen, other: "127.0.0.1:0"}))


async def test_sigterm_flushes_the_open_window_and_ends_the_process() -> None:
    answer = {"choices": [{"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}]}
    engine, control = Engine(), Control()
    engine.replays([json.dumps(answer).encode()], "application/json")
    listen, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    async with engine.on(), control.on(), aiohttp.ClientSession() as client:
        environment = {
            **os.environ,
            "DRIFTWATCH_ENGINE__URL": engine.url,
            "DRIFTWATCH_TAP__CONTROL_URL": control.url,
            "DRIFTWATCH_TAP__LISTEN": listen,
            "DRIFTWATCH_TAP__ADMIN": admin,
            "DRIFTWATCH_SAMPLING__WINDOW_S": "3600",
        }
        code = "from driftwatch.settings import load; from driftwatch.tap.app import run; run(load(None))"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-c", code, env=environment, stderr=subprocess.PIPE
        )
        try:
            async with asyncio.timeout(20):
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        async with client.get(f"http://{admin}/readyz") as response:
                            if response.status == 200:
                                break
                    await asyncio.sleep(0.05)
            async with client.post(f"http://{listen}{CHAT}", json=BODY) as response:
                assert await response.json() == answer
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            _, errors = await asyncio.wait_for(process.communicate(), 20)
        finally:
            if process.returncode is None:
                process.kill()
        assert (process.returncode, errors) == (0, b"")
        assert time.monotonic() - started < 10
        assert [record["output"] for record in control.records] == ["hello"]


def test_the_tap_does_without_torch_and_database() -> None:
    code = (
        "import sys, driftwatch.tap.app\n"
        "print([name for name in ('torch', 'sqlalchemy', 'fastapi', 'transformers') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert out.stdout.strip() == "[]"
