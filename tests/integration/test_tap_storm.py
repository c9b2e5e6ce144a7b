"""Whatever engines and clients do to each other, in any mixture: each exchange is counted once, nothing stays held, and
no client sees what the tap asked for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import logging
import random
import socket
import struct
from typing import Any

import pytest
import uvloop

from driftwatch.settings import Segment
from driftwatch.tap import asking
from driftwatch.tap.hooks import Hooks, Request
from driftwatch.tap.memory import Memory
from driftwatch.tap.metrics import Metrics
from driftwatch.tap.probe import Probe
from driftwatch.tap.recorder import Recorder
from driftwatch.tap.relay import Relay
from driftwatch.tap.sampler import Sampler
from driftwatch.tap.segments import Segments
from driftwatch.tap.upstream import Pool
from driftwatch.wire.exchange import Exchange

ROOM = 2_000_000
CAPTURE = 20_000
CLIENTS = 150
SHOWN = b"[90210"
"""The beginning of ids that only the tap asks for."""


class Storm:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.opened = 0
        self.leaks: list[bytes] = []
        self.problems: list[Any] = []
        self.metrics = Metrics()
        self.memory = Memory(ROOM)
        self.sampler = Sampler[Exchange](8, 3600.0, draw=self.random.random)

    # --- the engine ---------------------------------------------------------------------------------------------------

    async def engine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, RuntimeError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if self.random.random() < 0.05:
                    break  # over the request
                body = b""
                if b"expect:" in head and self.random.random() < 0.8:
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                if b"content-length: " in head:
                    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
                    body = await reader.readexactly(length)
                elif b"chunked" in head:
                    body = await reader.readuntil(b"0\r\n\r\n")
                if not await self.answer(writer, b'"return_token_ids":true' in body):
                    break
        writer.transport.abort()

    async def answer(self, writer: asyncio.StreamWriter, asked: bool) -> bool:
        """Whether the connection goes on."""
        chance = self.random
        status, streams = 200, chance.random() < 0.6
        if asked and chance.random() < 0.1:
            status = chance.choice([400, 422])
        elif chance.random() < 0.1:
            status = chance.choice([204, 400, 404, 429, 500, 503])
        ids = b"%b, 1]" % SHOWN if asked else b"null"
        text = json.dumps("x" * chance.choice([1, 50, 3000, CAPTURE])).encode()
        event = b'{"choices":[{"index":0,"delta":{"content":%b},"finish_reason":null,"token_ids":%b}]}' % (text, ids)
        body = event
        if status >= 400:
            body, streams = b'{"error":{"input":{"token_ids":%b}}}' % (ids if status in (400, 422) else b"1"), False
        elif streams:
            body = b"".join(b"data: %b\n\n" % event for _ in range(chance.choice([1, 5])))
            body += chance.choice([b"data: [DONE]\n\n", b'data: {"error":{}}\n\n', b""])
        lines = [b"HTTP/1.1 %d X" % status]
        if chance.random() < 0.95:
            lines.append(b"Content-Type: " + (b"text/event-stream" if streams else b"application/json"))
        if chance.random() < 0.1:
            body = gzip.compress(body, mtime=0)
            lines.append(b"Content-Encoding: gzip")
        framing = chance.choice([b"chunked", b"length", b"close"])
        if status == 204:
            body = b""
        elif framing == b"chunked":
            lines.append(b"Transfer-Encoding: chunked")
            size = chance.choice([7, 100, 5000])
            pieces = [body[i : i + size] for i in range(0, len(body), size)]
            body = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"
        elif framing == b"length":
            lines.append(b"Content-Length: %d" % len(body))
        whole = b"\r\n".join([*lines, b"", body])
        if chance.random() < 0.1:
            whole = b"HTTP/1.1 103 Early Hints\r\n\r\n" + whole
        if chance.random() < 0.05:
            whole = whole.replace(b"\r\n", b"\n", 3)  # no HTTP
        broken = chance.random() < 0.1
        if broken:
            whole = whole[: chance.randrange(len(whole))]
        cuts = sorted(chance.sample(range(len(whole) + 1), min(len(whole), chance.choice([0, 2, 9]))))
        for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            writer.write(whole[begin:end])
            await writer.drain()
            await asyncio.sleep(chance.choice([0, 0, 0.002]))
        if chance.random() < 0.05:
            writer.write(b"unasked")
        return framing != b"close" and status != 204 and not broken and b"\n\n" not in whole[:3]

    # --- clients ------------------------------------------------------------------------------------------------------

    def request(self) -> tuple[bytes, bool]:
        """A request, and whether the client asks for ids itself."""
        chance = self.random
        itself = chance.random() < 0.1
        body = json.dumps(
            {"messages": [{"role": "user", "content": "y" * chance.choice([1, 100, CAPTURE])}], "stream": True}
            | ({"return_token_ids": True} if itself else {}),
            separators=(",", ":"),
        ).encode()
        if chance.random() < 0.1:
            body = b"{no json"
        lines = [b"POST " + chance.choice([b"/v1/chat/completions"] * 4 + [b"/other"]) + b" HTTP/1.1", b"Host: x"]
        lines.append(b"X-Tenant: t%d" % chance.randrange(4))
        lines += [b"Accept-Encoding: gzip"] * (chance.random() < 0.5)
        lines += [b"Expect: 100-continue"] * (chance.random() < 0.1)
        if chance.random() < 0.3:
            lines.append(b"Transfer-Encoding: chunked")
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            if chance.random() < 0.1:
                body = b"zz\r\n" + body
        else:
            lines.append(b"Content-Length: %d" % len(body))
        return b"\r\n".join([*lines, b"", body]), itself

    async def client(self, port: int) -> None:
        chance = self.random
        await asyncio.sleep(chance.random() * 0.5)
        made = [self.request() for _ in range(chance.choice([1, 1, 2, 4]))]
        data = b"".join(request for request, _ in made)
        ending = chance.choice(["read", "read", "read", "half close", "leave", "reset", "cut"])
        if ending == "cut":
            data = data[: chance.randrange(len(data))]
        got = b""
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                for begin in range(0, len(data), 4000):
                    writer.write(data[begin : begin + 4000])
                    await asyncio.sleep(0)
                if ending == "half close":
                    writer.write_eof()
                patience = 0.3 if ending in ("read", "half close") else chance.random() * 0.05
                with contextlib.suppress(TimeoutError):
                    while piece := await asyncio.wait_for(reader.read(1 << 16), patience):
                        got += piece
                if ending == "reset":
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            finally:
                writer.transport.abort()
        if SHOWN in b"".join(map(_read, got.split(b"HTTP/1.1 "))) and not any(itself for _, itself in made):
            self.leaks.append(got)

    # --- all of it ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.problems.append(context))
        engine = await asyncio.start_server(self.engine, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
        segments = Segments([Segment(label="tenant", header="x-tenant")], max_segments=3)
        recorder = Recorder(CAPTURE, segments, self.sampler, Probe(url, "vllm"), self.metrics, self.memory)
        opening = recorder.open

        def open(request: Request) -> Hooks:
            self.opened += 1
            return opening(request)

        recorder.open = open  # type: ignore[method-assign]
        sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
        relay = Relay(Pool(url), recorder)
        await relay.listen(sock)
        await asyncio.gather(*(self.client(sock.getsockname()[1]) for _ in range(CLIENTS)))
        await relay.drain(2)
        await asyncio.sleep(0.05)
        assert not relay.connections
        engine.close()
        await asyncio.sleep(0.05)

    def count(self, name: str, **labels: str) -> float:
        found = (one for family in self.metrics.registry.collect() for one in family.samples)
        return sum(one.value for one in found if one.name == name and labels.items() <= one.labels.items())


def _read(answer: bytes) -> bytes:
    """An answer's body without framing, as far as it came; compressed or not."""
    head, _, body = answer.partition(b"\r\n\r\n")
    out = body
    if b"chunked" in head:
        out = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            try:
                count = int(size, 16)
            except ValueError:
                return out + size + body  # broken off
            out, body = out + body[:count], body[count + 2 :]
    if b"Content-Encoding: gzip" in head:
        with contextlib.suppress(OSError, EOFError):
            return gzip.decompress(out)
    return out


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_leaves_nothing_behind(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(asking, "PAUSE_S", 0.0)  # go on asking engines that have shown that they should not be
    storm = Storm(seed)
    with caplog.at_level(logging.ERROR):
        uvloop.run(storm.run())
    assert storm.problems == []
    assert caplog.records == []
    assert storm.leaks == []
    assert storm.opened > CLIENTS
    refused_unopened = storm.count("driftwatch_requests_total") - storm.opened
    assert refused_unopened >= 0
    recorded = storm.opened - storm.count("driftwatch_requests_total", segment="unrecorded") + refused_unopened
    assert recorded == storm.count("driftwatch_requests_total") - storm.count(
        "driftwatch_requests_total", segment="unrecorded"
    )
    good = storm.count("driftwatch_end_to_end_seconds_count")
    windows = storm.sampler.flush()
    assert sum(window.seen for window in windows) == good, "none of the answers failed to be seen whole"
    lost = storm.count("driftwatch_dropped_total")
    assert sum(window.lost for window in windows) == lost
    assert {window.segment for window in windows} <= {"tenant=t0", "tenant=t1", "tenant=t2", "tenant=t3", "other"}
    del windows
    gc.collect()
    assert storm.memory.left == ROOM
