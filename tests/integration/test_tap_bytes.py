"""The relay alone, between raw sockets: which bytes pass, in which order, and what is refused.

Engines here are scripts over bytes, so that nothing but the relay reads HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.tap.asgi import Headers
from driftwatch.tap.client import SILENCE_S
from driftwatch.tap.hooks import Ending, Hooks, Request, Unread
from driftwatch.tap.memory import Memory
from driftwatch.tap.relay import Relay
from driftwatch.tap.rewriting import HELD_BYTES
from driftwatch.tap.upstream import Pool

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSED = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


class Watch:
    """Hooks that note all they are told."""

    def __init__(self, request: Request, capture_bytes: int = 0) -> None:
        self.request = request
        self.capture_bytes = capture_bytes
        self.seen: bytes | None = None
        self.missed: Unread | None = None
        self.status = 0
        self.headers: Headers = []
        self.content = b""
        self.endings: list[Ending] = []

    def body(self, data: bytes) -> tuple[bytes, Headers] | None:
        self.seen = data
        return None

    def unread(self, reason: Unread) -> None:
        self.missed = reason

    def sent(self) -> None:
        pass

    def again(self, status: int, headers: Headers) -> bool:
        return False

    def head(self, status: int, headers: Headers) -> bool:
        self.status, self.headers = status, headers
        return False

    def chunk(self, data: bytes) -> bytes:
        self.content += data
        return b"not for the client"

    def release(self) -> bytes:
        return b"nor this"

    def end(self, ending: Ending, *, whole: bool) -> None:
        assert whole
        self.endings.append(ending)


@dataclass
class Line:
    """A relay with an engine behind it."""

    relay: Relay
    port: int
    watches: list[Watch] = field(default_factory=list)
    connections: int = 0
    received: bytes = b""
    faults: int = 0
    refusals: int = 0

    async def ask(self, data: bytes) -> bytes:
        """Send bytes, read until the relay closes."""
        reader, writer = await self.connect()
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def line(
    script: Script,
    *,
    capture_bytes: int = 0,
    open: Callable[[Request], Hooks] | None = None,
    memory: Memory | None = None,
) -> AsyncIterator[Line]:
    room = memory or Memory(100_000_000)
    scripts: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        one.connections += 1
        feed = reader.feed_data

        def note(data: Any) -> None:
            one.received += data
            feed(data)

        reader.feed_data = note  # type: ignore[method-assign]
        scripts.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await script(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    class Watching:
        memory = room

        def open(self, request: Request) -> Hooks:
            if open is not None:
                return open(request)
            one.watches.append(Watch(request, capture_bytes))
            return one.watches[-1]

        def fault(self) -> None:
            one.faults += 1

        def refused(self) -> None:
            one.refusals += 1

    engine = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
    with contextlib.closing(engine):
        sock = socket.create_server(("127.0.0.1", 0))
        relay = Relay(Pool(f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"), Watching())
        one = Line(relay, sock.getsockname()[1])
        await relay.listen(sock)
        try:
            yield one
        finally:
            await relay.drain(1)
            # What a script has found wrong is raised here.
            await asyncio.wait_for(asyncio.gather(*scripts), 5)


def answers(*pieces: bytes, close: bool = False) -> Script:
    """An engine that answers each head with these bytes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.001)
            if close:
                return

    return script


# --- any bytes in any pieces ------------------------------------------------------------------------------------------

CONTENT = st.binary(max_size=300)
CASES = st.sampled_from([b"Content-Length", b"content-length", b"CONTENT-LENGTH"])
TRAILERS = st.sampled_from([b"", b"X-Sum: 1\r\n", b"x-a: b\r\nX-Sum:   c d \r\n"])
FIELDS = st.sampled_from([b"", b"X-Odd:   two  words \t\r\nx-odd:\r\n", b'ETag: "1"\r\nSet-Cookie: a=\xe9; b\r\n'])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """Fields that frame a body, the body as framed, and what it says."""
    content = draw(CONTENT)
    if draw(st.booleans()):
        return draw(CASES) + b": %d\r\n" % len(content), content, content
    cuts = sorted(draw(st.lists(st.integers(0, len(content)), max_size=4)))
    parts = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    size = draw(st.sampled_from([b"%x", b"%X", b"000%x", b"%x;ext", b'%x ; a="b"']))
    chunks = b"".join(size % len(part) + b"\r\n" + part + b"\r\n" for part in parts if part)
    return b"Transfer-Encoding: chunked\r\n", chunks + b"0\r\n" + draw(TRAILERS) + b"\r\n", content


@dataclass
class Turn:
    """A request, its answer, and what hooks are told of them."""

    request: bytes
    answer: bytes
    asked: bytes
    said: bytes


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    method = draw(st.sampled_from([b"GET", b"POST", b"HEAD", b"DELETE", b"X-ODD"]))
    framing, body, asked = draw(bodies()) if method != b"GET" else (b"", b"", b"")
    target = draw(st.sampled_from([b"/", b"/a%2Fb?q=%20&x", b"*", b"http://h/p", b"/\xe2\x82\xac"]))
    request = method + b" " + target + b" HTTP/1.1\r\nhOsT:x\r\n" + draw(FIELDS) + framing + b"\r\n" + body
    interim = draw(
        st.sampled_from([b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", b"HTTP/1.1 102 \r\n\r\n" * 2])
    )
    framing, body, said = draw(bodies())
    status = draw(st.sampled_from([b"200 OK", b"404 ", b"204 No Content", b"304 Not Modified", b"500 x y"]))
    if method == b"HEAD" or status[:3] in (b"204", b"304"):
        body = said = b""
        framing = framing if status[:3] != b"204" else b""
    answer = interim + b"HTTP/1.1 " + status + b"\r\n" + draw(FIELDS) + framing + b"\r\n" + body
    return Turn(request, answer, asked, said)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted(place % (len(data) + 1) for place in cuts)
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


PLACES = st.lists(st.integers(0, 10_000), max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(turns(), min_size=1, max_size=4), PLACES, PLACES, st.sampled_from([0, 50, 100_000]), st.booleans())
def test_pipelined_exchanges_pass_byte_for_byte(
    exchanges: list[Turn], sent: list[int], answered: list[int], capture: int, half_close: bool
) -> None:
    async def go() -> None:
        waiting = iter(exchanges)

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1):
                turn = next(waiting)
                assert data + await reader.readexactly(len(turn.request) - 1) == turn.request
                for piece in cut(turn.answer, answered):
                    writer.write(piece)
                    await asyncio.sleep(0)

        async with line(script, capture_bytes=capture) as one:
            reader, writer = await one.connect()
            for piece in cut(b"".join(turn.request for turn in exchanges), sent):
                writer.write(piece)
                await asyncio.sleep(0)
            if half_close:
                writer.write_eof()
            expected = b"".join(turn.answer for turn in exchanges)
            assert await asyncio.wait_for(reader.readexactly(len(expected)), 5) == expected
            if half_close:
                assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
            assert one.received == b"".join(turn.request for turn in exchanges)
            for turn, watch in zip(exchanges, one.watches, strict=True):
                assert watch.endings == ["complete"]
                if capture:
                    assert watch.content == turn.said
                    assert watch.seen == turn.asked or (capture == 50 and watch.seen is None)
            assert one.faults == 0

    uvloop.run(go())


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), PLACES, st.booleans())
def test_any_bytes_of_a_client_end_in_a_refusal_or_a_close(data: bytes, sent: list[int], tail: bool) -> None:
    """Whatever comes, nothing but a whole head reaches the engine, and the relay lives on."""

    async def go() -> None:
        async with line(answers(OK)) as one:
            reader, writer = await one.connect()
            with contextlib.suppress(ConnectionError):
                for piece in cut(data + (b"\r\n\r\n" if tail else b""), sent):
                    writer.write(piece)
                    await asyncio.sleep(0)
                writer.write_eof()
                answer = await asyncio.wait_for(reader.read(), 5)
                assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
            writer.close()
            assert one.received == b""
            assert await one.ask(LAST) == CLOSED

    uvloop.run(go())


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]),
)
def test_any_bytes_of_an_engine_end_in_an_answer_or_a_close(data: bytes, head: bytes) -> None:
    async def go() -> None:
        async with line(answers(head + data, close=True), capture_bytes=1000) as one:
            with contextlib.suppress(ConnectionError):
                answer = await one.ask(LAST)
                assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
            assert [len(watch.endings) for watch in one.watches] == [1]

    uvloop.run(go())


# --- what is refused --------------------------------------------------------------------------------------------------

POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("capture", [0, 1000])
@pytest.mark.parametrize(
    "request_",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        POST + b"Content-Length: 5\r\ncontent-length: 5\r\n\r\nhello",
        POST + b"Content-Length: 5, 5\r\n\r\nhello",
        POST + b"Content-Length: +5\r\n\r\nhello",
        POST + b"Content-Length: -5\r\n\r\nhello",
        POST + b"Content-Length: 0x5\r\n\r\nhello",
        POST + b"Content-Length: 5_0\r\n\r\nhello",
        POST + b"Content-Length: 5 5\r\n\r\nhello",
        POST + b"Content-Length: \xd9\xa5\r\n\r\nhello",
        POST + b"Content-Length:\r\n\r\nhello",
        POST + b"Content-Length: 99999999999999999999999\r\n\r\nhello",
        POST + b"Content-Length : 5\r\n\r\nhello",
        POST + b"Content-Length\t: 5\r\n\r\nhello",
        POST + b" Content-Length: 5\r\n\r\nhello",
        POST + b"X: a\r\n Content-Length: 5\r\n\r\nhello",
        POST + b"X: a\r\n\tfolded\r\n\r\n",
        POST + b"X: a\nContent-Length: 5\r\n\r\nhello",
        POST + b"X: a\rContent-Length: 5\r\n\r\nhello",
        POST + b"X: a\x00b\r\n\r\n",
        POST + b"X: a\x0bb\r\n\r\n",
        POST + b": empty\r\n\r\n",
        POST + b"no colon\r\n\r\n",
        POST + b"X(: a\r\n\r\n",
        POST + b"X\x00: a\r\n\r\n",
        POST + b"Transfer-Encoding: identity\r\n\r\n",
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        POST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
        POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer\xa0-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding\r\n : chunked\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"0x1\r\na\r\n0\r\n\r\n",
        CHUNKED + b"+1\r\na\r\n0\r\n\r\n",
        CHUNKED + b"1_0\r\na\r\n0\r\n\r\n",
        CHUNKED + b" 1\r\na\r\n0\r\n\r\n",
        CHUNKED + b"1 \r\na\r\n0\r\n\r\n",
        CHUNKED + b"-1\r\na\r\n0\r\n\r\n",
        CHUNKED + b"\r\na\r\n0\r\n\r\n",
        CHUNKED + b"1\na\r\n0\r\n\r\n",
        CHUNKED + b"1;a\nb\r\na\r\n0\r\n\r\n",
        CHUNKED + b"1;a\rb\r\na\r\n0\r\n\r\n",
        CHUNKED + b"1\r\na\n0\r\n\r\n",
        CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
        CHUNKED + b"1\r\na0\r\n\r\n\r\n",
        CHUNKED + b"1" + b"0" * 30 + b"\r\na",
        CHUNKED + b"1;" + b"e" * 5000 + b"\r\na\r\n0\r\n\r\n",
        CHUNKED + b"0\r\nX : a\r\n\r\n",
        CHUNKED + b"0\r\n folded\r\n\r\n",
        CHUNKED + b"0\r\nX: a\n\r\n",
        b"GET /a HTTP/1.1\nHost: x\n\n",
        b"GET /a HTTP/1.1\r\nHost: x\n\r\n",
        b"GET /a HTTP/1.1\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET  /a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /a\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET\t/a\tHTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /a HTTP/1.1 \r\nHost: x\r\n\r\n",
        b" GET /a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /a\r\nHost: x\r\n\r\n",
        b"GET /a http/1.1\r\nHost: x\r\n\r\n",
        b"G(T /a HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_what_two_readers_could_read_in_two_ways_is_refused(request_: bytes, capture: int) -> None:
    async with line(answers(OK), capture_bytes=capture) as one:
        head, _, body = (await one.ask(request_ + SMUGGLED)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"Connection: close" in head
        assert set(json.loads(body)["error"]) == {"code", "message", "hint"}
        assert (one.connections, one.received) == (0, b"")
        assert one.refusals + sum(watch.endings == ["refused"] for watch in one.watches) == 1


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /a HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n", 501),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /a HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 15_000 + b"\r\n", 431),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000, 431),
    ],
)
async def test_what_the_relay_does_not_take_has_its_own_status(request_: bytes, status: int) -> None:
    async with line(answers(OK)) as one:
        assert (await one.ask(request_)).startswith(b"HTTP/1.1 %d " % status)
        assert (one.connections, one.refusals) == (0, 1)


async def test_a_body_that_turns_out_malformed_is_cut_off_at_the_engine() -> None:
    async with line(answers()) as one:
        reader, writer = await one.connect()
        writer.write(CHUNKED + b"1\r\na\r\n")
        await one.until(lambda: one.received == CHUNKED + b"1\r\na\r\n")
        writer.write(b"x\r\n" + SMUGGLED)
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 400 ")
        writer.close()
        assert one.received == CHUNKED + b"1\r\na\r\n"
        assert one.watches[0].endings == ["refused"]
        assert one.refusals == 0, "its hooks were told"


@pytest.mark.parametrize("size", [8_000, 65_536])
async def test_large_fields_pass(size: int) -> None:
    answer = b"HTTP/1.1 200 OK\r\nX: " + b"b" * size + b"\r\nContent-Length: 0\r\n\r\n"
    async with line(answers(answer)) as one:
        request = b"GET /a HTTP/1.1\r\nHost: x\r\nX: " + b"a" * size + b"\r\n\r\n"
        reader, writer = await one.connect()
        writer.write(request)
        assert await asyncio.wait_for(reader.readexactly(len(answer)), 5) == answer
        assert one.received == request
        writer.close()


# --- framing and fields of answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        # RFC 9112, 6.3: a coding overrides a length, which is not passed on.
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\ncontent-length: 2\r\n\r\nok",
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
        ),
        # 5.1: whitespace before the colon is removed.
        (
            b"HTTP/1.1 200 OK\r\nX \t: a\r\nContent-Length: 2\r\n\r\nok",
            b"HTTP/1.1 200 OK\r\nX: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nok", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok"),
        (b"HTTP/1.1 200\r\n\r\nok", b"HTTP/1.1 200\r\nConnection: close\r\n\r\nok"),
        (b"HTTP/1.0 200 OK\r\n\r\nok", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nConnection: close\r\n\r\nok",
        ),
        (
            b"HTTP/1.1 426 Upgrade Required\r\nConnection: Upgrade\r\nUpgrade: x\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: x\r\nContent-Length: 0\r\nConnection: Upgrade\r\n"
            b"Connection: close\r\n\r\n",
        ),
    ],
)
async def test_framing_that_an_answer_may_have(answer: bytes, passed: bytes) -> None:
    async with line(answers(answer, close=True)) as one:
        assert await one.ask(LAST) == passed
        assert one.watches[0].endings == ["complete"]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\n\r\nok",
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
        b"HTTP/3 200 OK\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
    ],
)
async def test_an_answer_that_is_none_is_a_502(answer: bytes) -> None:
    async with line(answers(answer, close=True)) as one:
        head, _, body = (await one.ask(LAST)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
        assert json.loads(body)["error"]["code"] == "engine_broke_off"
        assert (await one.ask(LAST.replace(b"GET", b"HEAD"))).endswith(b"\r\n\r\n")
        assert [watch.endings for watch in one.watches] == [["broken"]] * 2


async def test_a_body_until_close_that_is_reset_is_reset() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import socket
        import struct

        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await asyncio.sleep(0.05)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with line(script) as one:
        with pytest.raises(ConnectionResetError):
            await one.ask(GET)
        assert one.watches[0].endings == ["broken"]


async def test_an_http_1_0_client_gets_no_interim_answers_and_a_close() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    async with line(answers(hints + OK)) as one:
        old = b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\nX: 1\r\n\r\n"
        assert await one.ask(old) == CLOSED
        assert one.received == b"GET /a HTTP/1.0\r\nX: 1\r\n\r\n"
        assert await one.ask(LAST) == hints + CLOSED


async def test_only_fields_of_the_connection_are_dropped() -> None:
    async with line(answers(OK)) as one:
        await one.ask(
            b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: X-Hop, close, Host\r\nx-hop: 1\r\nKeep-Alive: 1\r\n"
            b"TE: trailers\r\nProxy-Connection: x\r\nUpgrade: h2c\r\nX-Kept:  a \r\n\r\n"
        )
        assert one.received == b"GET /a HTTP/1.1\r\nHost: x\r\nX-Kept:  a \r\n\r\n"


# --- interim answers, upgrades, half-closed connections ---------------------------------------------------------------


@pytest.mark.parametrize("capture", [0, 2, 1000])
async def test_a_body_is_expected_end_to_end(capture: int) -> None:
    """The engine asks for the body, not the relay; so it can also refuse it unread."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Expect: 100-continue\r\n" in head
        if b"/no" in head:
            writer.write(b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n")
            return
        await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await reader.readexactly(5) == b"hello"
        writer.write(OK)

    async with line(script, capture_bytes=capture) as one:
        reader, writer = await one.connect()
        writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        assert await asyncio.wait_for(reader.readexactly(len(OK)), 5) == OK
        writer.close()
        assert one.watches[0].seen == (b"hello" if capture == 1000 else None)
        refused = POST.replace(b"/a", b"/no") + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"
        assert (await one.ask(refused)).startswith(b"HTTP/1.1 417 ")


UPGRADE = b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n"
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: a\r\n"


@pytest.mark.parametrize("first", ["client", "engine"])
async def test_an_upgraded_connection_is_a_tunnel(first: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head == UPGRADE + b"Connection: Upgrade\r\n\r\n"
        writer.write(SWITCH + b"connection: upgrade\r\n\r\n\x00first")
        while data := await reader.read(100):
            writer.write(data[::-1])
            if data == b"bye" and first == "engine":
                break
        writer.write_eof()
        assert await reader.read() == b""

    async with line(script) as one:
        reader, writer = await one.connect()
        writer.write(UPGRADE + b"Connection: keep-alive, Upgrade\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\x00first"), 5)
        assert head == SWITCH + b"Connection: Upgrade\r\n\r\n\x00first"
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\xff", b"bye"):
            writer.write(data)
            assert await asyncio.wait_for(reader.readexactly(len(data)), 5) == data[::-1]
        if first == "client":
            writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        await one.until(lambda: one.watches[0].endings == ["complete"])


async def test_bytes_behind_an_upgrade_wait_for_the_answer() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.05)
        assert one.received.endswith(b"\r\n\r\n")
        writer.write(SWITCH + b"Connection: upgrade\r\n\r\n")
        writer.write(await reader.readexactly(5))

    async with line(script) as one:
        assert (await one.ask(UPGRADE + b"Connection: Upgrade\r\n\r\nearly")).endswith(b"\r\n\r\nearly")


async def test_a_refused_upgrade_is_an_answer_as_any_other() -> None:
    async with line(answers(OK)) as one:
        assert await one.ask(UPGRADE + b"Connection: Upgrade\r\n\r\n" + LAST) == OK + CLOSED
        h2c = UPGRADE.replace(b"websocket", b"h2c") + b"HTTP2-Settings: AA\r\n"
        one.received = b""
        await one.ask(h2c + b"Connection: Upgrade, HTTP2-Settings, close\r\n\r\n")
        assert b"h2c" not in one.received
        assert b"HTTP2" not in one.received


async def test_a_half_closed_client_gets_its_answer() -> None:
    """If the engine gives one: it is told of the half-closing, as it would be without a relay."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if patient:
            assert await reader.read() == b""
            await asyncio.sleep(0.05)
            writer.write(OK)

    async with line(script) as one:
        for patient in (True, False):
            reader, writer = await one.connect()
            writer.write(GET)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 5) == (OK if patient else b"")
            writer.close()
        assert [watch.endings for watch in one.watches] == [["complete"], ["aborted"]]


async def test_an_early_answer_reaches_a_client_that_still_sends() -> None:
    refusal = b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"
    async with line(answers(refusal, close=True)) as one:
        reader, writer = await one.connect()
        writer.write(POST + b"Content-Length: 100000000\r\n\r\n" + b"x" * 1_000_000)
        assert await asyncio.wait_for(reader.read(), 5) == refusal
        writer.close()


# --- one connection after the other -----------------------------------------------------------------------------------


async def test_a_client_that_reads_slowly_holds_up_the_engine_and_nobody_else() -> None:
    written = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/large" not in head:
                writer.write(OK)
                continue
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(1000):
                writer.write(b"186a0\r\n" + b"x" * 100_000 + b"\r\n")
                await writer.drain()
                written += 100_000
            writer.write(b"0\r\n\r\n")

    async with line(script) as one:
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port, limit=1 << 16)
        writer.write(GET.replace(b"/a", b"/large"))
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.1)
        assert written < 60_000_000, "what the sockets hold, and no more"
        assert await one.ask(LAST) == CLOSED
        total = 0
        async with asyncio.timeout(20):
            while total < len(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n") + 1000 * 100_009 + 5:
                total += len(await reader.read(1 << 20))
        writer.write(LAST)
        assert await asyncio.wait_for(reader.read(), 5) == CLOSED
        writer.close()


async def test_connections_to_the_engine_are_kept_and_never_shared() -> None:
    async with line(answers(OK[:-1], OK[-1:])) as one:
        for _ in range(5):
            assert await one.ask(GET + GET + LAST) == OK + OK + CLOSED
        assert one.connections == 1
        async with asyncio.timeout(5):
            assert await asyncio.gather(*(one.ask(LAST) for _ in range(10))) == [CLOSED] * 10
        assert 5 <= one.connections <= 10


async def test_bytes_that_nobody_asked_for_end_the_connection_to_the_engine() -> None:
    """Else they were the next client's answer."""
    async with line(answers(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")) as one:
        for _ in range(3):
            assert await one.ask(LAST) == CLOSED
        assert one.connections == 3


async def test_bytes_behind_an_early_answer_are_dropped() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await asyncio.sleep(0.05)
        writer.write(OK)
        await reader.readexactly(5)

    async with line(script) as one:
        reader, writer = await one.connect()
        writer.write(POST + b"Content-Length: 5\r\nConnection: close\r\n\r\n")
        await one.until(lambda: one.connections)
        await asyncio.sleep(0.1)
        writer.write(b"hello" + GET)
        assert await asyncio.wait_for(reader.read(), 5) == CLOSED
        writer.close()
        assert [watch.endings for watch in one.watches] == [["complete"]], "and no request behind the last one"


async def test_pipelined_requests_wait_in_bounded_memory() -> None:
    go_on = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            await go_on.wait()
            writer.write(OK)

    async with line(script) as one:
        reader, writer = await one.connect()
        count = 20_000
        writer.write(GET * count)
        await asyncio.sleep(0.2)
        (client,) = one.relay.connections
        assert len(client._buffer) < 400_000
        go_on.set()
        assert await asyncio.wait_for(reader.readexactly(len(OK) * count), 60) == OK * count
        writer.close()


async def test_draining_closes_idle_connections_and_lets_the_others_end() -> None:
    go_on = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/stream" in head:
                writer.write(OK[:-2])
            await go_on.wait()
            writer.write(b"ok" if b"/stream" in head else OK)

    async with line(script) as one:
        idle, to_idle = await one.connect()
        streaming, to_streaming = await one.connect()
        to_streaming.write(GET.replace(b"/a", b"/stream") + GET)
        assert await streaming.readexactly(len(OK) - 2) == OK[:-2]
        waiting, to_waiting = await one.connect()
        to_waiting.write(GET)
        await one.until(lambda: len(one.watches) == 2)
        draining = asyncio.create_task(one.relay.drain(5))
        assert await asyncio.wait_for(idle.read(), 2) == b""
        with pytest.raises(ConnectionRefusedError):
            await one.connect()
        go_on.set()
        # The first head had gone already; the second says that its connection closes. No request behind is taken.
        assert await asyncio.wait_for(streaming.read(), 2) == b"ok"
        assert await asyncio.wait_for(waiting.read(), 2) == CLOSED
        await asyncio.wait_for(draining, 2)
        assert len(one.watches) == 2
        for writer in (to_idle, to_streaming, to_waiting):
            writer.close()


async def test_idle_connections_of_clients_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftwatch.tap.relay.SWEEP_S", 0.02)
    monkeypatch.setattr("driftwatch.tap.client.KEEP_ALIVE_S", 0.1)
    async with line(answers(OK)) as one:
        sweeping = asyncio.create_task(one.relay.sweep())
        for start in (b"", b"GET /a HT", GET):
            reader, writer = await one.connect()
            writer.write(start)
            assert await asyncio.wait_for(reader.read(), 2) == (OK if start == GET else b"")
            writer.close()
        sweeping.cancel()


# --- clients that have gone, engines that are silent ------------------------------------------------------------------

GOODBYES = ("none", "half close", "close", "reset")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(GOODBYES),
    st.sampled_from([b"", OK[:20], OK[:-1]]),
    st.booleans(),
    st.sampled_from([0, 200_000]),
)
def test_nothing_is_held_for_a_client_that_has_gone(
    behind: int, large: bool, goodbye: str, answered: bytes, unfinished: bool, capture: int
) -> None:
    """Whatever was pipelined, with an engine that is silent for ever: at the latest when it has been so for long."""

    async def go() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answered)
            await over.wait()

        over, memory = asyncio.Event(), Memory(10_000_000)
        async with line(script, capture_bytes=capture, memory=memory) as one:
            _, writer = await one.connect()
            more = b"GET /b HTTP/1.1\r\nHost: x\r\nX-Long: %b\r\n\r\n" % (b"x" * (60_000 if large else 1))
            sent = POST_BEGUN if unfinished else GET
            writer.write(sent if unfinished else sent + more * behind)
            await one.until(lambda: one.watches and (one.received or (capture and unfinished)))
            await asyncio.sleep(0.01)
            sock = writer.get_extra_info("socket")
            if goodbye == "half close":
                writer.write_eof()
            elif goodbye == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            elif goodbye == "close":
                writer.transport.abort()
            await asyncio.sleep(0.01)
            for connection in list(one.relay.connections):
                connection.sweep(SILENCE_S / 2)
            await asyncio.sleep(0.01)
            if goodbye == "reset":
                await one.until(lambda: not one.relay.connections)  # it has said so
            if goodbye in ("none", "half close") and not unfinished:
                assert one.relay.connections, "it may wait for an answer"
            for connection in list(one.relay.connections):
                connection.sweep(SILENCE_S / 2)
            await asyncio.sleep(0.01)
            if goodbye == "none" and not unfinished:
                assert one.relay.connections, "it is there, and its patience is its own"
                writer.transport.abort()

            def gone() -> bool:
                for connection in list(one.relay.connections):
                    connection.sweep(SILENCE_S)  # on a busy machine the goodbye may come only now
                return not one.relay.connections

            await one.until(gone)
            assert [watch.endings for watch in one.watches] == [["aborted"]]
            assert memory.left == 10_000_000
            over.set()
            writer.close()

    uvloop.run(go())


POST_BEGUN = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf"


async def test_a_client_that_speaks_is_not_taken_for_gone() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(POST_BEGUN) + 96)
        writer.write(CLOSED)

    async with line(script) as one:
        reader, writer = await one.connect()
        writer.write(POST_BEGUN)
        await one.until(lambda: one.received)
        for piece in (b"x" * 48, b"x" * 47):
            (connection,) = one.relay.connections
            connection.sweep(SILENCE_S * 0.9)
            writer.write(piece)
            await one.until(lambda end=piece: one.received.endswith(end))  # type: ignore[misc]
            await asyncio.sleep(0.01)
        writer.write(b"x")
        assert await asyncio.wait_for(reader.readexactly(len(OK)), 5) == OK
        writer.close()


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("room", [1_000_000, 50_000, 0])
async def test_half_sent_bodies_count_and_pass_unread_where_there_is_no_room(room: int, chunked: bool) -> None:
    body = b"x" * 100_000
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    framed = b"".join(b"2710\r\n" + body[:10_000] + b"\r\n" for _ in range(10)) + b"0\r\n\r\n" if chunked else body
    request = b"POST /a HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\nConnection: close\r\n\r\n"

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(request + framed) - len(b"Connection: close\r\n"))
        writer.write(CLOSED)

    memory = Memory(room)
    async with line(script, capture_bytes=200_000, memory=memory) as one:
        reader, writer = await one.connect()
        writer.write(request + framed[:60_000])
        await one.until(
            lambda: room - memory.left >= 60_000 if room == 1_000_000 else one.watches and one.watches[0].missed
        )
        assert room - memory.left <= (2 if chunked else 1) * 66_000
        writer.write(framed[60_000:])
        assert await asyncio.wait_for(reader.read(), 5) == CLOSED
        assert memory.left == room
        (watch,) = one.watches
        assert (watch.seen, watch.missed) == ((body, None) if room == 1_000_000 else (None, "memory"))
        writer.close()


class Shorter(Watch):
    """Hooks that replace the request, and take every ``-`` out of the answer."""

    def body(self, data: bytes) -> tuple[bytes, Headers] | None:
        return data, self.request.headers

    def head(self, status: int, headers: Headers) -> bool:
        return True

    def chunk(self, data: bytes) -> bytes:
        return data.replace(b"-", b"")

    def release(self) -> bytes:
        return b"."


@pytest.mark.parametrize("room", [10_000_000, 100_000, 0])
@pytest.mark.parametrize("size", [10, 1000, 200_000, 3_000_000])
async def test_a_rewritten_answer_with_a_length_is_whole_in_bounded_memory(size: int, room: int) -> None:
    """Small ones state the length of what is left, large ones keep the engine's and end in line ends."""
    content = b"ab--cd---e" * (size // 10)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    memory = Memory(room)
    most = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most
        await reader.readuntil(b"\r\n\r\nx")
        for start in range(0, len(answer), 50_000):
            writer.write(answer[start : start + 50_000])
            await writer.drain()
            await asyncio.sleep(0)
            most = max(most, room - memory.left)

    request = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx"
    async with line(script, memory=memory, open=lambda request: Shorter(request, 100)) as one:
        head, _, body = (await one.ask(request)).partition(b"\r\n\r\n")
        left = content.replace(b"-", b"") + b"."
        stated = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
        assert len(body) == stated
        if not room:  # nor is there any for the request: it was not replaced
            assert body == content
            return
        small = len(content) < HELD_BYTES and 2 * len(content) < room
        assert body == (left if small else left + b"\n" * (len(content) - len(left)))
        assert most <= min(room, 2 * HELD_BYTES)
        assert memory.left == room


class Rejecting(Watch):
    """Hooks that replace the request, and then do not want its answer to be seen."""

    def body(self, data: bytes) -> tuple[bytes, Headers] | None:
        self.seen = data
        return b"replaced", [(b"host", b"x"), (b"content-length", b"8")]

    def again(self, status: int, headers: Headers) -> bool:
        return True


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("refusal", [b"0\r\n\r\n", b"5\r\nshown\r\n0\r\n\r\n", b"5\r\nsho", b""])
async def test_an_answer_that_must_not_be_seen_is_not_and_the_request_goes_again_as_it_was(
    refusal: bytes, chunked: bool
) -> None:
    body = b"3;x=y\r\nabc\r\n02\r\nde\r\n0\r\nX-Sum: 1\r\n\r\n" if chunked else b"abcde"
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 5"
    original = b"POST /a?b HTTP/1.1\r\nhOsT: x\r\nX-Odd:  two \r\n" + framing + b"\r\n\r\n" + body
    replaced = b"POST /a?b HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\nreplaced"
    memory = Memory(10_000)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            if b"\r\nhost:" in await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(8)
                writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 400 Bad Request\r\n")
                await asyncio.sleep(0.01)
                writer.write(b"Transfer-Encoding: chunked\r\n\r\n" + refusal)
                await reader.read()
                return
            await reader.readexactly(len(body))
            writer.write(b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok")

    watches = list[Rejecting]()

    def watch(request: Request) -> Hooks:
        watches.append(Rejecting(request, 100))
        return watches[-1]

    async with line(script, open=watch, memory=memory) as one:
        reader, writer = await one.connect()
        hints, created = b"HTTP/1.1 103 Early Hints\r\n\r\n", b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok"
        for number in (1, 2):
            writer.write(original)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\nok"), 5)
            assert answer == hints + created
            assert one.received == (replaced + original) * number
        writer.close()
        await one.until(lambda: not one.relay.connections)
        assert memory.left == 10_000
        for seen in watches:
            assert (seen.seen, seen.endings, seen.status, seen.content) == (b"abcde", ["complete"], 201, b"ok")


async def test_a_client_that_leaves_before_its_request_goes_again_leaves_nothing_behind() -> None:
    asked = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"\r\n\r\n")
        asked += 1
        if asked == 1:
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    memory, watches = Memory(10_000), list[Rejecting]()

    def watch(request: Request) -> Hooks:
        watches.append(Rejecting(request, 100))
        return watches[-1]

    async with line(script, open=watch, memory=memory) as one:
        _, writer = await one.connect()
        writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nabcde")
        await one.until(lambda: asked == 2)
        writer.transport.abort()
        await one.until(lambda: not one.relay.connections)
        assert memory.left == 10_000
        assert [seen.endings for seen in watches] == [["aborted"]]
