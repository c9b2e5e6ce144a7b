"""The relay: every request goes to the engine, and its answer back, as the bytes came. It knows hooks and nothing else.

Bytes are passed on where they are read, in protocol callbacks, without a task or a queue between: that is what a chunk
costs. A message's framing is followed to know where it ends, and never made anew unless hooks change its body.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from driftwatch.tap.client import ClientConnection
from driftwatch.tap.hooks import Watcher
from driftwatch.tap.upstream import Pool, keep_alive

logger = logging.getLogger(__name__)

SWEEP_S = 5.0
BACKLOG = 2048


class Relay:
    """A listener in front of an engine."""

    def __init__(self, pool: Pool, watcher: Watcher) -> None:
        self.pool = pool
        self.watcher = watcher
        self.draining = False
        self.connections: set[ClientConnection] = set()
        self._empty = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def listen(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        keep_alive(sock)  # accepted connections inherit it
        self._server = await loop.create_server(lambda: ClientConnection(self), sock=sock, backlog=BACKLOG)

    async def sweep(self) -> None:
        """Close connections that are idle, or whose client has gone, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.pool.sweep()
            for connection in list(self.connections):
                connection.sweep(SWEEP_S)

    async def drain(self, seconds: float) -> None:
        """Take no more requests; those in flight have so many seconds to end."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.drain()
        try:
            if self.connections:
                await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            logger.warning("%d connections were cut off after %g s", len(self.connections), seconds)
        for connection in list(self.connections):
            connection.abort()
        self.pool.close()
        await asyncio.sleep(0)  # the aborted ones are told

    def refused(self) -> None:
        """Count a request that was refused before there were hooks."""
        try:
            self.watcher.refused()
        except Exception:
            logger.exception("a refused request could not be counted")

    def closed(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        if self.draining and not self.connections:
            self._empty.set()
