"""The client's side of the relay: one connection, whose requests go to the engine one after the other."""

from __future__ import annotations

import asyncio
import re
import select
import socket
import struct
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from driftwatch.tap import http1
from driftwatch.tap.asgi import error
from driftwatch.tap.exchange import Exchange
from driftwatch.tap.hooks import Watcher
from driftwatch.tap.http1 import Malformed
from driftwatch.tap.upstream import Pool

PIPELINED_BYTES = 64 * 1024
"""Of requests that wait for the one before, this much is read."""
LINGER_S = 1.0
"""A client that still sends gets this time to read an answer before its connection is reset (RFC 9112, 9.6)."""
KEEP_ALIVE_S = 75.0
"""Idle connections of clients live longer here than at the engine: the tap adds no race of its own."""
SILENCE_S = 600.0
"""A client that has half closed, or does not send the rest of its request, may have gone: when nothing has come from
either side for so long, it is taken for gone. One that merely waits is let wait: its own patience decides."""

_BARE_LF = re.compile(rb"(?<!\r)\n")
_ENGINE, _PIPELINE = 1, 2
"""Why reading is paused."""


class Owner(Protocol):
    """What connections need of their relay."""

    pool: Pool
    watcher: Watcher
    draining: bool
    connections: set[ClientConnection]

    def refused(self) -> None: ...

    def closed(self, connection: ClientConnection) -> None: ...


class ClientConnection(asyncio.Protocol):
    """Splits what a client sends into requests, and answers for the tap where there is no engine to do so."""

    write: Callable[[bytes], None]
    _transport: asyncio.Transport

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._exchange: Exchange | None = None
        self._buffer = b""
        """What is behind the present request."""
        self._scanned = 0
        """So much of the buffer holds no end of a head."""
        self._paused = 0
        self._eof = False
        self._closing = False
        self.leaving = False
        self.full = False
        self.idle_since = time.monotonic()

    # --- asyncio ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.write = self._transport.write
        self.leaving = self._owner.draining
        self._owner.connections.add(self)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if self._closing:
            return
        if exchange is not None and (exchange.tunnel or not exchange.complete):
            try:
                data = exchange.request(data)
            except Malformed as malformed:
                self._refuse_malformed(malformed)
                return
            if not data or self._closing:
                return
        self._buffer += data
        if self._exchange is None:
            self._advance()
        elif len(self._buffer) > PIPELINED_BYTES:
            self._pause(_PIPELINE)

    def eof_received(self) -> bool:
        self._eof = True
        exchange = self._exchange
        if exchange is None or self._closing:
            return False
        if not exchange.complete:
            return False  # closes the transport: connection_lost cancels the exchange
        if exchange.tunnel or not self._buffer:
            exchange.half_close()
        return not self._closing

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()
        self._owner.closed(self)

    def pause_writing(self) -> None:
        self.full = True
        if self._exchange is not None:
            self._exchange.client_full(True)

    def resume_writing(self) -> None:
        self.full = False
        if self._exchange is not None:
            self._exchange.client_full(False)

    # --- for the exchange ---------------------------------------------------------------------------------------------

    @property
    def half_closed(self) -> bool:
        return self._eof and not self._buffer

    def engine_full(self, full: bool) -> None:
        if full:
            self._pause(_ENGINE)
        else:
            self._resume(_ENGINE)

    def done(self) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.tunnel:
            data, self._buffer = self._buffer, b""
            exchange.request(data)
            self._resume(_PIPELINE)
            if self._eof:
                exchange.half_close()
            return
        if self.leaving or (self._eof and not self._buffer):
            self.close()
            return
        self._exchange = None
        self.idle_since = time.monotonic()
        self._resume(_ENGINE | _PIPELINE)
        if self._buffer:
            self._advance()

    def refuse(self, status: int, code: str, message: str, hint: str, *, bodiless: bool = False) -> None:
        if self._exchange is None or not self._exchange.complete:
            self.leaving = True  # where the next request begins is not known
        body = error(code, message, hint)
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode(),
            b"Content-Type: application/json",
            b"Content-Length: %d" % len(body),
            *((b"Connection: close",) if self.leaving else ()),
        ]
        self.write(b"\r\n".join([*lines, b"", b"" if bodiless else body]))
        if self._exchange is not None and self._exchange.complete:
            self.done()
        else:
            self.close()

    def write_eof(self) -> None:
        if not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """Close behind what was written. What a client still sends is read and dropped for a moment."""
        if self._closing:
            return
        self._closing = True
        exchange, self._exchange = self._exchange, None
        sending = exchange is None or not exchange.complete or self._buffer
        self._buffer = b""
        if self._eof or not sending or self._transport.is_closing():
            self._transport.close()
            return
        self._transport.write_eof()
        self._resume(_ENGINE | _PIPELINE)
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

    def reset(self) -> None:
        sock: socket.socket | None = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def drain(self) -> None:
        """Take no further request."""
        self.leaving = True
        if self._exchange is None and not self._closing:
            self._closing = True
            self._transport.close()

    def sweep(self, passed_s: float) -> None:
        """Close it if it has waited too long for a request, or if its client must have gone."""
        exchange = self._exchange
        if exchange is None:
            if self.idle_since < time.monotonic() - KEEP_ALIVE_S:
                self.close()
            return
        exchange.quiet_s += passed_s
        left = half = self._eof
        if self._paused or self._eof:  # nothing is read, so nobody would tell
            left, half = self._peer()
        if left or (exchange.quiet_s >= SILENCE_S and (half or not exchange.complete)):
            self.abort()

    def _peer(self) -> tuple[bool, bool]:
        """Whether the client has gone, and whether it has at least closed its own direction."""
        sock: socket.socket | None = self._transport.get_extra_info("socket")
        if sock is None or sock.fileno() < 0 or not hasattr(select, "poll"):
            return False, self._eof
        poll, ended = select.poll(), getattr(select, "POLLRDHUP", 0)
        poll.register(sock.fileno(), ended)
        found = dict(poll.poll(0)).get(sock.fileno(), 0)
        return bool(found & (select.POLLERR | select.POLLHUP)), self._eof or bool(found & ended)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin the next request, if its head is there."""
        while self._buffer.startswith(b"\r\n"):  # RFC 9112, 2.2: empty lines before a request are ignored
            self._buffer = self._buffer[2:]
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n", self._scanned) + 4
        if end < 4:
            self._await_head(buffer)
            return
        self._scanned = 0
        try:
            if end > http1.LARGEST_HEAD:
                raise _too_large(buffer)
            head = http1.request(buffer[:end])
            self.leaving = self.leaving or head.closes
            self._buffer = buffer[end:]
            owner = self._owner
            self._exchange = exchange = Exchange(self, owner.pool, head, owner.watcher)
            self._buffer = exchange.begin(self._buffer)
        except Malformed as malformed:
            self._refuse_malformed(malformed)
            return
        if len(self._buffer) > PIPELINED_BYTES:
            self._pause(_PIPELINE)
        exchange.go()

    def _await_head(self, buffer: bytes) -> None:
        if _BARE_LF.search(buffer, max(0, self._scanned - 1)):
            self._refuse_malformed(Malformed("a line ends without CR"))
        elif len(buffer) > http1.LARGEST_HEAD:
            self._refuse_malformed(_too_large(buffer))
        elif self._eof:
            self.close()
        else:
            self._scanned = max(0, len(buffer) - 3)

    def _refuse_malformed(self, malformed: Malformed) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            self._owner.refused()
        else:
            exchange.cancel("refused")
            if exchange.answering:
                self.abort()
                return
        hint = "the tap passes on only what every HTTP server reads alike (RFC 9112)"
        self.refuse(malformed.status, malformed.code, str(malformed), hint)

    def _pause(self, reason: int) -> None:
        if not self._paused and not self._eof:
            self._transport.pause_reading()
        self._paused |= reason

    def _resume(self, reason: int) -> None:
        if self._paused and not self._paused & ~reason and not self._eof:
            self._transport.resume_reading()
        self._paused &= ~reason


def _too_large(buffer: bytes) -> Malformed:
    if b"\r\n" not in buffer[: http1.LARGEST_HEAD]:
        return Malformed("the target is too long", 414, "uri_too_long")
    return Malformed("the header section is too large", 431, "head_too_large")
