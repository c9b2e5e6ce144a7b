"""How an exchange gets its connection to the engine: a kept or a new one, and then, if it must, only new ones."""

from __future__ import annotations

import asyncio
from typing import Protocol

from driftwatch.tap.upstream import Connection, Pool

RACE_S = 0.5
"""An engine that had closed a kept connection says so within a round trip."""


class Waiting(Protocol):
    """Who wants the connection."""

    def use(self, connection: Connection) -> None:
        """Here it is."""

    def unreachable(self, failure: Exception) -> None:
        """There is none."""


class Attempts:
    """At most three: a kept connection that was just being closed, one with what was asked for, one without it."""

    def __init__(self, pool: Pool, exchange: Waiting) -> None:
        self._pool = pool
        self._exchange: Waiting | None = exchange
        """None: nobody waits any more."""
        self._connecting: asyncio.Task[None] | None = None
        self._since = 0.0
        self.again = False
        """This is not the first."""

    def begin(self) -> None:
        """Give a connection, unless one is on its way."""
        if self._connecting is not None:
            return
        if not self.again and (connection := self._pool.take()) is not None:
            self._give(connection)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def repeat(self) -> None:
        """Give another connection."""
        self.again = True
        self.begin()

    def raced(self) -> bool:
        """Whether a kept connection that is lost now may have been closed in the very moment in which it was chosen.

        One that is lost later was lost over its request, which must not be made twice (RFC 9110, 9.2.2).
        """
        return not self.again and asyncio.get_running_loop().time() - self._since < RACE_S

    def stop(self) -> None:
        """Nobody waits any more: what comes is kept for others."""
        self._exchange = None

    async def _connect(self) -> None:
        try:
            connection = await self._pool.connect()
        except (OSError, ValueError) as failure:
            self._connecting = None
            if self._exchange is not None:
                self._exchange.unreachable(failure)
            return
        self._connecting = None
        self._give(connection)

    def _give(self, connection: Connection) -> None:
        if self._exchange is None:
            self._pool.give_back(connection)
            return
        self._since = asyncio.get_running_loop().time()
        self._exchange.use(connection)
