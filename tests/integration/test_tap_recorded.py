"""Exchanges of a real vLLM through a whole tap process, as bytes: what a client gets is what the engine sent, to the
byte where nothing was asked of it, and to the JSON where more was.

Every answer is sent in pieces cut anywhere; no library reads or writes HTTP here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from .test_tap import EXCHANGES
from .test_tap_faults import content, tap_process

Json = dict[str, Any]
ROUNDS = 6


@dataclass(frozen=True)
class Recorded:
    kind: str
    request: bytes
    answer: bytes

    @property
    def whole(self) -> bool:
        """Its client did not leave in the middle."""
        return self.kind != "abort"

    def kept_alive(self) -> Recorded:
        """The same on a connection that goes on."""
        return Recorded(self.kind, *(re.sub(rb"(?i)connection: close\r\n", b"", one, count=1) for one in self.both))

    @property
    def both(self) -> tuple[bytes, bytes]:
        return self.request, self.answer

    def through(self) -> bytes:
        """The answer as a relay passes it on: what concerns the connection is said of its own."""
        head, end, body = re.sub(rb"(?i)connection: close\r\n", b"", self.answer, count=1).partition(b"\r\n\r\n")
        return head + b"\r\nConnection: close" + end + body


def load() -> list[Recorded]:
    rows = map(json.loads, EXCHANGES.read_text().splitlines())
    return [
        Recorded(
            row["kind"],
            base64.b64decode(row["request_b64"]),
            b"".join(base64.b64decode(data) for _, data in row["response_chunks"]),
        )
        for row in rows
    ]


EXCHANGED = load()


class Engine:
    """Sends bytes that a test gives it, for the request that it gets, in random pieces."""

    def __init__(self) -> None:
        self.answer: Callable[[bytes], bytes] = lambda _: b""
        self.bodies: list[bytes] = []
        self.random = random.Random(0)
        self.port = 0

    @contextlib.asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        tasks: list[asyncio.Task[None] | None] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.append(asyncio.current_task())
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._serve(reader, writer)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        yield
        server.close()
        await asyncio.wait_for(asyncio.gather(*filter(None, tasks)), 20)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"POST"):  # the tap asks what it is
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            length = re.search(rb"(?i)content-length: (\d+)", head)
            self.bodies.append(await reader.readexactly(int(length[1]) if length else 0))
            answer = self.answer(self.bodies[-1])
            cuts = sorted(self.random.sample(range(len(answer)), min(len(answer), self.random.choice((0, 3, 30)))))
            for begin, end in zip([0, *cuts], [*cuts, len(answer)], strict=True):
                writer.write(answer[begin:end])
                await writer.drain()
                await asyncio.sleep(0)
            if b"connection: close" in answer.partition(b"\r\n\r\n")[0].lower():
                return


async def ask(port: int, requests: Iterable[bytes]) -> bytes:
    """All that comes on one connection until the other side closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    for request in requests:
        middle = len(request) // 2
        writer.write(request[:middle])
        await asyncio.sleep(0)
        writer.write(request[middle:])
    try:
        return await reader.read()
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def bench(kind: str, **settings: object) -> AsyncIterator[tuple[Engine, int]]:
    engine = Engine()
    async with engine.on(), tap_process(engine.port, ENGINE__KIND=kind, **settings) as (port, _):
        yield engine, port


def asks_itself(one: Recorded) -> bool:
    """Nothing is added to the request: it has all of it, or can give no record."""
    request = json.loads(one.request.partition(b"\r\n\r\n")[2])
    usage = not request.get("stream") or request.get("stream_options", {}).get("include_usage")
    return bool(request.get("n", 1) > 1 or (request.get("return_token_ids") and usage))


@pytest.mark.parametrize("kind", ["openai", "vllm", "trtllm"])
async def test_recorded_bytes_pass_byte_for_byte_however_they_are_cut(kind: str) -> None:
    exchanges = [one for one in EXCHANGED if kind != "vllm" or asks_itself(one)]
    assert len(exchanges) > 8
    async with bench(kind) as (engine, port):
        for _ in range(ROUNDS):
            for one in exchanges:
                engine.answer = lambda _, one=one: one.answer  # type: ignore[misc]
                assert await ask(port, [one.request]) == one.through(), one.kind
                assert engine.bodies[-1] == one.request.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("kind", ["openai", "vllm"])
async def test_recorded_exchanges_pipelined_on_one_connection_pass_byte_for_byte(kind: str) -> None:
    exchanges = [one.kept_alive() for one in EXCHANGED if one.whole and (kind != "vllm" or asks_itself(one))]
    last = next(one for one in EXCHANGED if one.kind == "plain")
    async with bench(kind) as (engine, port):
        for _ in range(ROUNDS):
            waiting = iter([*exchanges, last])
            engine.answer = lambda _, waiting=waiting: next(waiting).answer  # type: ignore[misc]
            got = await ask(port, [*(one.request for one in exchanges), last.request])
            assert got == b"".join(one.answer for one in exchanges) + last.through()


# --- with more asked for ----------------------------------------------------------------------------------------------


def events(body: bytes) -> list[Any]:
    blocks = [block.removeprefix(b"data: ") for block in body.split(b"\n\n") if block]
    return [json.loads(block) if block != b"[DONE]" else "[DONE]" for block in blocks]


def unasked(items: list[Any]) -> list[Any]:
    """What vLLM 0.32 sends without ids and usage, out of what it sent with them: written down apart from the tap."""
    out: list[Any] = []
    for item in json.loads(json.dumps(items)):
        if item != "[DONE]":
            if item["choices"] == [] and item.get("usage"):
                out[-1]["system_fingerprint"] = item["system_fingerprint"]
                continue
            for holder in (item, *item["choices"]):
                holder.update({key: None for key in ("prompt_token_ids", "token_ids") if key in holder})
        out.append(item)
    return out


def without(request: bytes, *keys: str) -> bytes:
    """The recorded request of a client that does not know these fields."""
    head, end, body = request.partition(b"\r\n\r\n")
    left = json.dumps({key: value for key, value in json.loads(body).items() if key not in keys}).encode()
    return re.sub(rb"(?i)content-length: \d+", b"Content-Length: %d" % len(left), head) + end + left


async def test_a_client_that_asked_for_nothing_gets_the_recorded_stream_without_ids_and_usage() -> None:
    kinds = ("plain", "plain_ignore_eos", "multi_turn", "stop", "logprobs5")
    exchanges = [one for one in EXCHANGED if one.kind in kinds]
    async with bench("vllm") as (engine, port):
        for one in exchanges * ROUNDS:
            engine.answer = lambda _, one=one: one.answer  # type: ignore[misc]
            got = await ask(port, [without(one.request, "return_token_ids", "stream_options")])
            head, _, framed = one.through().partition(b"\r\n\r\n")
            assert got.startswith(head + b"\r\n\r\n")
            assert events(dechunked(got)) == unasked(events(dechunked(head + b"\r\n\r\n" + framed)))
            asked = json.loads(engine.bodies[-1])
            assert (asked["return_token_ids"], asked["stream_options"]) == (True, {"include_usage": True})
            assert b'token_ids":[' not in got


async def test_a_plain_answer_comes_under_the_length_that_it_has() -> None:
    (one,) = [one for one in EXCHANGED if one.kind == "extra_nonstream_chat"]
    async with bench("vllm") as (engine, port):
        engine.answer = lambda _: one.answer
        for _ in range(ROUNDS):
            got = await ask(port, [without(one.request, "return_token_ids")])
            expected = json.loads(content(one.answer))
            expected["prompt_token_ids"] = expected["choices"][0]["token_ids"] = None
            assert json.loads(content(re.sub(rb"(?i)content-length", b"Content-Length", got, count=1))) == expected


async def test_a_recorded_refusal_comes_byte_for_byte_though_more_was_asked() -> None:
    (one,) = [one for one in EXCHANGED if one.kind == "invalid_400"]
    client = without(one.request, "return_token_ids", "stream_options")
    async with bench("vllm") as (engine, port):
        engine.answer = lambda _: one.answer
        assert await ask(port, [client]) == one.through()
        assert [b"return_token_ids" in body for body in engine.bodies] == [True, False]
        assert engine.bodies[1] == client.partition(b"\r\n\r\n")[2]


def dechunked(answer: bytes) -> bytes:
    body, out = answer.partition(b"\r\n\r\n")[2], b""
    while not body.startswith(b"0\r\n"):
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        assert body[count : count + 2] == b"\r\n"
        out, body = out + body[:count], body[count + 2 :]
    assert body == b"0\r\n\r\n"
    return out
