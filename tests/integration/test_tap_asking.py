"""With more asked of the engine than the client asked for, the client gets what it would have got without.

A real relay and recorder between raw sockets; the engine's answers have the documented shapes of vLLM 0.32 and SGLang
0.5.23, with and without what was asked for, framed and cut in every way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import uvloop
from hypothesis import example, given, settings
from hypothesis import strategies as st

from driftwatch.settings import EngineKind
from driftwatch.tap.memory import Memory
from driftwatch.tap.metrics import Metrics
from driftwatch.tap.probe import Probe
from driftwatch.tap.recorder import Recorder
from driftwatch.tap.relay import Relay
from driftwatch.tap.sampler import Sampler
from driftwatch.tap.segments import Segments
from driftwatch.tap.upstream import Pool
from driftwatch.wire import dialects
from driftwatch.wire.exchange import Exchange

CHAT = "/v1/chat/completions"
ROOM = 50_000_000
Json = dict[str, Any]


@dataclass
class Answer:
    """What an engine answers to a client that asked for nothing more, and to the tap that did."""

    stream: bool
    usage: bool
    texts: list[str]
    large: int
    """So many ids of the prompt."""
    odd: str
    """JSON of a field that strict readers may refuse."""

    def vllm(self, ids: bool, usage: bool) -> bytes:
        prompt = list(range(self.large)) if ids else None
        if not self.stream:
            choice = {"index": 0, "message": {"role": "assistant", "content": "".join(self.texts)}}
            choice |= {"finish_reason": "stop", "token_ids": [1] * len(self.texts) if ids else None}
            return self._text({"id": "c", "choices": [choice], "prompt_token_ids": prompt, "usage": {}})
        first = self._chunk({"role": "assistant", "content": ""}) | {"prompt_token_ids": prompt}
        events = [first]
        for text in self.texts:
            if ids and not text:
                events.append(self._chunk({}, ids=[3]))  # there for its ids alone
            elif text:
                events.append(self._chunk({"content": text}, ids=[1, 2] if ids else None))
        last = self._chunk({"content": ""}, ids=[4] if ids else None, finish="stop")
        end = {"id": "c", "choices": [], "usage": {"completion_tokens": 7}, "system_fingerprint": "f"}
        events += [last, end] if usage else [last | {"system_fingerprint": "f"}]
        return self._events(events)

    def sglang(self, ids: bool) -> bytes:
        extensions = {"sglext": {"input_ids": list(range(self.large)), "output_ids": [[1, 2]]}} if ids else {}
        if not self.stream:
            choice = {"index": 0, "message": {"role": "assistant", "content": "".join(self.texts)}}
            return self._text({"id": "c", "choices": [choice | {"finish_reason": "stop"}], "usage": {}} | extensions)
        events = [self._chunk({"content": text}) for text in self.texts]
        events.append(self._chunk({"content": ""}, finish="stop"))
        events += [{"id": "c", "choices": [], "usage": None} | extensions] if ids else []
        return self._events([{key: value for key, value in one.items() if key != "token_ids"} for one in events])

    def _chunk(self, delta: Json, ids: list[int] | None = None, finish: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": ids}
        return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}

    def _text(self, answer: Json) -> bytes:
        return (json.dumps(answer)[:-1] + f', "odd": {self.odd}}}').encode()

    def _events(self, events: list[Json]) -> bytes:
        return b"".join(b"data: " + self._text(one) + b"\n\n" for one in events) + b"data: [DONE]\n\n"


def told(body: bytes, stream: bool) -> Any:
    """What a client reads: events without blank lines between them, or the JSON. As text, since NaN equals nothing."""
    if not stream:
        return json.dumps(json.loads(body), sort_keys=True)
    blocks = [block.removeprefix(b"data: ") for block in body.split(b"\n\n") if block.strip(b"\n")]
    return [block if block == b"[DONE]" else json.dumps(json.loads(block), sort_keys=True) for block in blocks]


def framed(body: bytes, framing: str, stream: bool, cuts: list[int]) -> list[bytes]:
    places = sorted({place % (len(body) + 1) for place in cuts} | {0, len(body)})
    pieces = [body[a:b] for a, b in pairwise(places)]
    kind = b"Content-Type: " + (b"text/event-stream" if stream else b"application/json")
    if framing == "chunked":
        head, pieces = b"Transfer-Encoding: chunked", [b"%x\r\n%b\r\n" % (len(one), one) for one in pieces]
        pieces.append(b"0\r\n\r\n")
    elif framing == "length":
        head = b"Content-Length: %d" % len(body)
    else:
        head = b"Connection: close"
    return [b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n" + head + b"\r\n\r\n", *pieces]


def content(answer: bytes) -> bytes:
    """The body of a whole answer, by its framing."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"content-length: " in head.lower():
        assert int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]) == len(body)
    if b"chunked" not in head:
        return body
    out = b""
    while not body.startswith(b"0\r\n"):
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        assert body[count : count + 2] == b"\r\n"
        out, body = out + body[:count], body[count + 2 :]
    assert body == b"0\r\n\r\n"
    return out


async def through(
    kind: EngineKind, request: Json, answer: Callable[[Json, bytes], list[bytes]]
) -> tuple[bytes, Sampler[Exchange]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            for piece in answer(json.loads(await reader.readexactly(length)), head):
                writer.write(piece)
                await asyncio.sleep(0)
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    engine = await asyncio.start_server(serve, "127.0.0.1", 0)
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    sampler, memory = Sampler[Exchange](8, 3600.0), Memory(ROOM)
    recorder = Recorder(10_000_000, Segments([]), sampler, Probe(url, kind), Metrics(), memory)
    relay = Relay(Pool(url), recorder)
    await relay.listen(sock)
    reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
    body = json.dumps(request).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    writer.write(head + body)
    got = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await relay.drain(1)
    engine.close()
    return got, sampler


ODD = st.sampled_from(["1", "NaN", '"\\ud800"', "12345678901234567890123", '{"token_ids": [1]}', "1.50"])
ANSWERS = st.builds(
    Answer,
    st.booleans(),
    st.booleans(),
    st.lists(st.text(max_size=5) | st.just('"token_ids": [1]'), max_size=5),
    st.sampled_from([0, 3, 15_000]),
    ODD,
)
CUTS = st.lists(st.integers(0, 800_000), max_size=10)


@settings(max_examples=60, deadline=None)
@example(Answer(True, False, ["a"], 200_000, "NaN"), "chunked", list(range(0, 2_000_000, 60_000)), "vllm")
@example(Answer(False, False, ["a"], 400_000, "NaN"), "length", list(range(0, 3_000_000, 60_000)), "sglang")
@given(ANSWERS, st.sampled_from(["chunked", "length", "close"]), CUTS, st.sampled_from(["vllm", "sglang"]))
def test_the_client_gets_what_it_would_have_got(
    answer: Answer, framing: str, cuts: list[int], kind: EngineKind
) -> None:
    request: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": answer.stream}
    if answer.usage and answer.stream:
        request["stream_options"] = {"include_usage": True}

    def engine(asked: Json, head: bytes) -> list[bytes]:
        if kind == "vllm":
            assert asked["return_token_ids"] is True
            body = answer.vllm(True, bool(asked.get("stream_options")))
        else:
            assert b"x-sglext-return-output-ids: 1" in head
            body = answer.sglang(True)
        return framed(body, framing, answer.stream, cuts)

    got, sampler = uvloop.run(through(kind, request, engine))
    wanted = answer.vllm(False, answer.usage and answer.stream) if kind == "vllm" else answer.sglang(False)
    assert told(content(got), answer.stream) == told(wanted, answer.stream)
    (window,) = sampler.flush()
    (kept,) = window.kept
    if answer.odd not in ("NaN", '"\\ud800"') and any(answer.texts):
        assert dialects.record(kept.item).deployment["engine"] == kind
