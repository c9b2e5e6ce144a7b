"""Connections to the engine: kept for a few seconds between two requests, never shared by two at a time."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from urllib.parse import urlsplit

from driftwatch.tap.sides import Served

KEEP_ALIVE_S = 3.0
"""vLLM and uvicorn close idle connections after 5 s: one older than this could be closing while it is chosen."""
CONNECT_TIMEOUT_S = 10.0
READ_BYTES = 64 * 1024
"""Read at once: beside the write buffer's high-water mark this bounds what a stalled client costs."""


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel find out within two minutes that a peer's machine is gone, which no packet will ever tell."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Connection(asyncio.BufferedProtocol):
    """One connection to the engine."""

    transport: asyncio.Transport

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.user: Served | None = None
        self.used = False
        """It has served a request before: the engine may be closing it."""
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pool.buffer  # shared: what was read is copied before anything else is

    def buffer_updated(self, nbytes: int) -> None:
        if self.user is None:
            self.abort()  # nobody asked
        else:
            self.user.answer(bytes(self._pool.buffer[:nbytes]))

    def eof_received(self) -> bool:
        user = self.user
        if user is not None and user.tunnel:
            user.engine_ended()
            return True
        self.abort()  # not later, when the engine has read what is on its way to it
        if user is not None:
            user.engine_lost(None, used=self.used)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        user, self.user = self.user, None
        self._pool.forget(self)
        if user is not None:
            user.engine_lost(exc, used=self.used)

    def pause_writing(self) -> None:
        if self.user is not None:
            self.user.engine_full(True)

    def resume_writing(self) -> None:
        if self.user is not None:
            self.user.engine_full(False)

    def abort(self) -> None:
        """Close at once: the engine notices, and stops."""
        self.user = None
        self._pool.forget(self)
        self.transport.abort()


class Pool:
    """Connects to the engine at ``url``."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if secure else 80)
        self._ssl = ssl.create_default_context() if secure else None
        self.prefix = parts.path.rstrip("/").encode()
        """Comes before the path of each request."""
        self._idle: deque[Connection] = deque()
        self._closed = False
        self.buffer = memoryview(bytearray(READ_BYTES))

    def take(self) -> Connection | None:
        """The connection used last, if it is idle and young enough to be open still."""
        self.sweep()
        return self._idle.pop() if self._idle else None

    async def connect(self) -> Connection:
        """A new connection. Raises OSError, and TimeoutError as one."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(
                lambda: Connection(self), self._host, self._port, ssl=self._ssl
            )
        if (sock := connection.transport.get_extra_info("socket")) is not None:
            keep_alive(sock)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request."""
        connection.user = None
        if self._closed or connection.transport.is_closing():
            connection.transport.abort()
            return
        connection.transport.resume_reading()
        connection.used = True
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self) -> None:
        """Close connections that were idle for too long."""
        oldest = time.monotonic() - KEEP_ALIVE_S
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().transport.close()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().transport.abort()
