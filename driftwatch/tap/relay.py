"""The relay: every request goes to the engine, and its answer back, as the bytes come. It knows hooks and nothing else.

Measured reasons for its shape: aiohttp's client under a pure ASGI application adds less than a millisecond to a first
chunk, and without a watcher on ``receive()`` a client's leaving goes unnoticed while the engine keeps generating.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import aiohttp

from driftwatch.tap.asgi import Headers, Receive, Scope, Send, error, respond, start, write
from driftwatch.tap.hooks import Ending, Hooks, Open, Request
from driftwatch.tap.upstream import Upstream, end_to_end

logger = logging.getLogger(__name__)

REPLAY_BYTES = 64 * 1024
"""Of a body that is streamed, this much is remembered for a second try."""


class Relay:
    """An ASGI application in front of an engine."""

    def __init__(self, upstream: Upstream, open: Open) -> None:
        self._upstream = upstream
        self._open = open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope["method"], scope["path"], list(scope["headers"]))
        hooks = self._open(request)
        body = Body(receive, request.headers)
        answer = _Answer(send, hooks)
        relaying = asyncio.create_task(self._relay(_target(scope), request, body, hooks, answer))
        leaving = asyncio.create_task(body.client_left())
        try:
            await asyncio.wait({relaying, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Cancelled while the engine still answers, the relaying task closes its connection: the engine then stops.
            relaying.cancel()
            leaving.cancel()
            outcome, _ = await asyncio.gather(relaying, leaving, return_exceptions=True)
            if not answer.ended:
                answer.end("aborted")
        if isinstance(outcome, Exception) and not isinstance(outcome, ClientLeft):
            logger.error("%s %s was not relayed", request.method, request.path, exc_info=outcome)

    async def _relay(self, target: str, request: Request, body: Body, hooks: Hooks, answer: _Answer) -> None:
        headers = request.headers
        data: Body | bytes | None = body if body.expected else None
        if hooks.capture_bytes:
            whole = await body.read(hooks.capture_bytes)
            if replaced := hooks.body(whole):
                data, headers = replaced
        try:
            response = await self._upstream.open(
                request.method, target, headers, data, replayable=lambda: body.replayable, sent=hooks.sent
            )
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            if body.left:
                raise ClientLeft from None
            await answer.refuse(failure)
            return
        try:
            await answer.relay(response)
        finally:
            response.close()  # no-op for an answer read to its end: its connection is back in the pool


class ClientLeft(Exception):
    """The client closed its connection."""


class Body:
    """The client's side of an exchange: its request body, and whether it is still there."""

    def __init__(self, receive: Receive, headers: Headers) -> None:
        self._receive = receive
        self._kept: list[bytes] = []
        self._limit = REPLAY_BYTES
        self._size = 0
        self._complete = asyncio.Event()
        self.left = False
        names = dict(headers)
        self.expected = b"transfer-encoding" in names or names.get(b"content-length", b"0") != b"0"
        if not self.expected:
            self._complete.set()

    @property
    def replayable(self) -> bool:
        """Whether all that has been taken from the client is still known."""
        return self._size <= self._limit

    async def read(self, limit: int) -> bytes | None:
        """The whole body, or None if it has more than ``limit`` bytes. It can be iterated in both cases."""
        self._limit = limit
        while self.replayable and not self._complete.is_set():
            self._kept.append(await self._next())
        return b"".join(self._kept) if self.replayable else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        kept = list(self._kept)
        if not self.replayable:
            self._kept.clear()
        for piece in filter(None, kept):  # an empty piece would end a chunked body
            yield piece
        while not self._complete.is_set():
            piece = await self._next()
            if self.replayable:
                self._kept.append(piece)
            else:
                self._kept.clear()
            if piece:
                yield piece

    async def client_left(self) -> None:
        """Return when the client has closed its connection. Behind the body nothing else can come."""
        await self._complete.wait()
        while not self.left and (await self._receive())["type"] != "http.disconnect":
            pass

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.left = True
            self._complete.set()
            raise ClientLeft
        piece: bytes = message.get("body", b"")
        self._size += len(piece)
        if not message.get("more_body", False):
            self._complete.set()
        return piece


class _Answer:
    """The client's answer: its head once, its bytes as the hooks let them through, and how it ended."""

    def __init__(self, send: Send, hooks: Hooks) -> None:
        self._send = send
        self._hooks = hooks
        self._held: tuple[int, Headers] | None = None
        self.ended = False

    async def relay(self, response: aiohttp.ClientResponse) -> None:
        headers = end_to_end((name.lower(), value) for name, value in response.raw_headers)
        if response.status == 304:  # the length is that of a body which is not sent: the listener would wait for it
            headers = [line for line in headers if line[0] != b"content-length"]
        self._held = response.status, headers
        if not self._hooks.head(response.status, headers):
            await self._release()
        try:
            while data := await response.content.readany():
                if out := self._hooks.chunk(data):
                    await self._release()
                    await write(self._send, out, more=True)
        except (aiohttp.ClientError, OSError) as failure:
            logger.warning("the engine broke off its answer: %s", str(failure) or type(failure).__name__)
            rest = self.end("broken")
            await self._release()
            if rest:
                await write(self._send, rest, more=True)
            return  # without an end: the listener closes the connection, as the engine did
        rest = self.end("complete")
        if self._held:
            length = (b"content-length", b"%d" % len(rest))
            self._held = response.status, [length if line[0] == length[0] else line for line in headers]
        await self._release()
        await write(self._send, rest, more=False)

    async def refuse(self, failure: Exception) -> None:
        """Answer 502: there is no engine, or none that answers in HTTP."""
        unreachable = isinstance(failure, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        self.end("unreachable" if unreachable else "broken")
        code = "engine_unreachable" if unreachable else "engine_broke_off"
        message = "the inference engine " + ("cannot be reached" if unreachable else "gave no answer")
        logger.warning("%s: %s", message, str(failure) or type(failure).__name__)
        hint = "try again; if this lasts, check that the engine runs and that the tap's engine.url names it"
        await respond(self._send, 502, error(code, message, hint))

    def end(self, ending: Ending) -> bytes:
        self.ended = True
        return self._hooks.end(ending)

    async def _release(self) -> None:
        if self._held:
            status, headers = self._held
            self._held = None
            await start(self._send, status, headers)


def _target(scope: Scope) -> str:
    """Path and query as they came, not decoded and encoded again."""
    path, query = scope["raw_path"], scope["query_string"]
    return str((path + b"?" + query if query else path).decode("latin-1"))
