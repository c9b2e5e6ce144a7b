"""The fence around a leader: who was replaced and does not know it can write nothing, not even what it has begun."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import psycopg
import pytest
import sqlalchemy as sa

from driftwatch.control import leader as module
from driftwatch.control.leader import Leader, Superseded
from driftwatch.errors import StoreError
from driftwatch.store import migrate
from driftwatch.store.connection import Store
from driftwatch.store.schema import Turn


@pytest.fixture
def url(postgres: str) -> str:
    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(postgres, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    url = postgres.replace("postgresql://", "postgresql+psycopg://").replace("/postgres?", f"/{name}?")
    store = Store(url)
    migrate.upgrade(store)
    store.close()
    return url


@pytest.fixture
def leaders(url: str) -> Iterator[tuple[Leader, Leader]]:
    """Two controls as processes have them: each with a store of its own."""
    stores = Store(url), Store(url)
    pair = Leader(stores[0]), Leader(stores[1])
    for one in pair:
        one.look()
    yield pair
    for one, store in zip(pair, stores, strict=True):
        one.stop()
        store.close()


def write(store: Store, name: str) -> None:
    with store.write() as session:
        session.add(Turn(segment=name, until=0))


def written(store: Store) -> set[str]:
    with store.read() as session:
        return set(session.scalars(sa.select(Turn.segment)))


def cut(url: str, leader: Leader) -> None:
    """End the session that holds the lead, as a broken network does; the leader has not noticed."""
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as admin:
        held = f"SELECT pg_terminate_backend(pid, 5000) {module.HELD} {module.LEADER}"
        assert admin.execute(held.encode()).fetchall() == [(True,)]
    assert leader.leads


def test_one_of_two_leads_until_it_stops(leaders: tuple[Leader, Leader]) -> None:
    first, second = leaders
    assert (first.leads, second.leads) == (True, False)
    write(first.store, "a")
    with pytest.raises(Superseded):
        write(second.store, "b")
    first.stop()
    second.look()
    assert (first.leads, second.leads) == (False, True)
    write(second.store, "c")
    assert written(second.store) == {"a", "c"}


def test_what_a_replaced_leader_has_begun_is_rolled_back(leaders: tuple[Leader, Leader], url: str) -> None:
    first, second = leaders

    def begin() -> None:
        with first.store.write() as session:
            session.add(Turn(segment="begun", until=0))
            session.flush()
            cut(url, first)
            second.look()
            assert second.leads
            write(second.store, "begun")  # it waits for nothing: the other's row is gone

    with pytest.raises(StoreError):
        begin()
    assert written(second.store) == {"begun"}


def test_what_a_replaced_leader_begins_later_is_refused(leaders: tuple[Leader, Leader], url: str) -> None:
    first, second = leaders
    cut(url, first)
    with pytest.raises(Superseded):
        write(first.store, "between")  # nobody leads yet
    second.look()
    with pytest.raises(Superseded):
        write(first.store, "after")
    first.look()
    assert (first.leads, second.leads) == (False, True)
    assert written(second.store) == set()


def test_a_leader_that_hears_nothing_stops_by_itself(
    leaders: tuple[Leader, Leader], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = leaders
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + module.SILENT_S + 1)
    assert not first.leads


def test_on_sqlite_there_is_only_one(sqlite_store: Store) -> None:
    one = Leader(sqlite_store)
    one.start()
    assert one.leads
    write(one.store, "a")
    one.stop()
    assert written(sqlite_store) == {"a"}
