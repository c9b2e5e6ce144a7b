from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from driftwatch.tap import attempts as module
from driftwatch.tap.attempts import Attempts
from driftwatch.tap.upstream import Connection, Pool


class Exchange:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.failures: list[Exception] = []
        self.told = asyncio.Event()

    def use(self, connection: Connection) -> None:
        self.connections.append(connection)
        self.told.set()

    def unreachable(self, failure: Exception) -> None:
        self.failures.append(failure)
        self.told.set()


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[Pool]:
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    yield pool
    pool.close()
    server.close()
    await asyncio.wait_for(asyncio.gather(*filter(None, serving)), 5)


async def told(exchange: Exchange) -> None:
    await asyncio.wait_for(exchange.told.wait(), 5)
    exchange.told.clear()


async def test_a_kept_connection_comes_at_once_and_the_second_one_is_new() -> None:
    async with engine() as pool:
        first, second = Exchange(), Exchange()
        attempts = Attempts(pool, first)
        attempts.begin()
        attempts.begin()  # one is on its way
        await told(first)
        (kept,) = first.connections
        pool.give_back(kept)
        attempts = Attempts(pool, second)
        attempts.begin()
        assert second.connections == [kept]
        pool.give_back(kept)
        attempts.repeat()
        assert attempts.again
        assert second.connections == [kept]
        second.told.clear()
        await told(second)
        assert second.connections[1] is not kept
        second.connections[1].abort()


async def test_only_a_first_connection_that_is_lost_at_once_may_have_been_closed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine() as pool:
        exchange = Exchange()
        attempts = Attempts(pool, exchange)
        attempts.begin()
        await told(exchange)
        assert attempts.raced()
        monkeypatch.setattr(module, "RACE_S", 0.0)
        assert not attempts.raced()
        monkeypatch.setattr(module, "RACE_S", 10.0)
        attempts.repeat()
        await told(exchange)
        assert not attempts.raced()
        for connection in exchange.connections:
            connection.abort()


async def test_what_nobody_waits_for_any_more_is_kept_for_others() -> None:
    async with engine() as pool:
        exchange = Exchange()
        attempts = Attempts(pool, exchange)
        attempts.begin()
        attempts.stop()
        async with asyncio.timeout(5):
            while (connection := pool.take()) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (exchange.connections, exchange.failures) == ([], [])
        connection.abort()


async def test_an_engine_that_is_not_there_is_told_of_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    exchange, gone = Exchange(), Exchange()
    pool = Pool(f"http://127.0.0.1:{port}")
    Attempts(pool, exchange).begin()
    left = Attempts(pool, gone)
    left.begin()
    left.stop()
    await told(exchange)
    await asyncio.sleep(0.05)
    assert len(exchange.failures) == 1
    assert isinstance(exchange.failures[0], ConnectionRefusedError)
    assert gone.failures == []
