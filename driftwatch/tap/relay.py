"""The relay: every request goes to the engine, and its answer back, as the bytes came. It knows hooks and nothing else.

Bytes are passed on where they are read, in protocol callbacks, without a task or a queue between: that is what a chunk
costs. A message's framing is followed to know where it ends, and never made anew unless hooks change its body.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from driftwatch.tap.client import ClientConnection
from driftwatch.tap.hooks import Open
from driftwatch.tap.upstream import Pool

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
"""Idle connections of clients live longer here than at the engine: the tap adds no race of its own."""
SWEEP_S = 5.0
BACKLOG = 2048


class Relay:
    """A listener in front of an engine. ``fault`` counts what hooks have raised."""

    def __init__(self, pool: Pool, open: Open, fault: Callable[[], None]) -> None:
        self.pool = pool
        self.open = open
        self.fault = fault
        self.draining = False
        self.connections: set[ClientConnection] = set()
        self._empty = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def listen(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ClientConnection(self), sock=sock, backlog=BACKLOG)

    async def sweep(self) -> None:
        """Close idle connections, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.pool.sweep()
            oldest = time.monotonic() - KEEP_ALIVE_S
            for connection in [one for one in self.connections if one.idle(oldest)]:
                connection.close()

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

    def closed(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        if self.draining and not self.connections:
            self._empty.set()
