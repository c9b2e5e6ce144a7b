"""Connections: short read and write transactions on SQLite or PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import Session

from driftwatch.errors import RecordError, StoreError
from driftwatch.store.schema import Base

BUSY_SECONDS = 10
"""How long anybody waits for a lock, a connection or the server before giving up."""

CONNECTIONS = 20
"""Of one process at most: those of all controls and shadows must fit into PostgreSQL's ``max_connections``."""

DEAD_AFTER = "SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 2"
"""A machine that is gone holds its locks until the server notices: in 9 seconds, and not in two hours."""
SERVER_DEAD_AFTER = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 2, "tcp_user_timeout": 9000}
"""The same the other way round."""


class Store:
    """One database. ``read`` and ``write`` give a transaction each; a write on SQLite takes the write lock at once."""

    def __init__(self, url: str) -> None:
        wanted = "write sqlite:///FILE or postgresql+psycopg://..."
        try:
            self.url = make_url(url)
        except (ArgumentError, ValueError):
            raise StoreError(f"store.url is not a URL; {wanted}") from None
        if self.url.get_backend_name() not in ("sqlite", "postgresql"):
            raise StoreError(f"store.url: {self.url.get_backend_name()} is not supported; {wanted}")
        try:
            self.engine = _engine(self.url)
        except (ModuleNotFoundError, NoSuchModuleError):
            extra = "pip install 'driftwatch-sidecar[postgres]'"
            raise StoreError(f"store.url: {self.url.drivername} is not installed: {extra}; {wanted}") from None
        self._writer = self.engine.execution_options(immediate=True)
        self._checks: tuple[Callable[[Session], None], ...] = ()

    def checked(self, check: Callable[[Session], None]) -> Store:
        """The same database; every write begins with a check, which raises to refuse it."""
        other = copy(self)
        other._checks = (*self._checks, check)
        return other

    @property
    def name(self) -> str:
        """The URL without its password, for messages."""
        query = {key: "***" if key == "password" else value for key, value in self.url.query.items()}
        return self.url.set(query=query).render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Session]:
        with self._session(self.engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Commits at the end, rolls back on any error.

        Raises StoreError if the database cannot be reached or written, RecordError for a value that it cannot hold.
        """
        with self._session(self._writer) as session:
            for check in self._checks:
                check(session)
            yield session
            session.commit()

    @contextmanager
    def _session(self, engine: sa.Engine) -> Iterator[Session]:
        try:
            with Session(engine, expire_on_commit=False) as session:
                yield session
        except (DataError, OverflowError) as error:
            reason = _reason(error) if isinstance(error, DataError) else str(error)
            raise RecordError(f"a value that the store cannot hold: {reason}") from error
        except SQLAlchemyError as error:
            raise StoreError(f"store {self.name}: {_reason(error)}") from error

    def close(self) -> None:
        self.engine.dispose()


def _reason(error: SQLAlchemyError) -> str:
    if isinstance(error, DBAPIError) and error.orig is not None:
        message = str(error.orig).strip().splitlines()[0]
        if "no such table" in message or "does not exist" in message:
            return f"{message}; run `driftwatch db upgrade`"
        return message
    return str(error).splitlines()[0]


def _engine(url: sa.URL) -> sa.Engine:
    if url.get_backend_name() == "sqlite":
        return _sqlite(url)
    engine = sa.create_engine(
        url,
        json_deserializer=orjson.loads,  # half of what a page of many segments costs is to read the hours of its cells
        pool_pre_ping=True,
        pool_size=CONNECTIONS // 2,
        max_overflow=CONNECTIONS // 2,
        pool_timeout=BUSY_SECONDS,
        connect_args={"connect_timeout": BUSY_SECONDS, **SERVER_DEAD_AFTER},
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.execute(f"SET lock_timeout = '{BUSY_SECONDS}s'; {DEAD_AFTER}")
        connection.commit()

    return engine


def _sqlite(url: sa.URL) -> sa.Engine:
    engine = sa.create_engine(url, json_deserializer=orjson.loads, connect_args={"timeout": BUSY_SECONDS})

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not guessed by the driver
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        # A transaction that turns writer halfway fails at once when another wrote meanwhile; one that starts as a
        # writer waits its turn.
        immediate = connection.get_execution_options().get("immediate", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def lock(session: Session, name: str) -> None:
    """Wait for others that hold this name, and hold it until the transaction ends. SQLite has one writer anyway."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(name, 0))))


def insert_new(session: Session, table: type[Base], rows: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """Insert the rows that do not exist yet; the values of column ``key`` of those inserted."""
    if not rows:
        return []
    statement = _insert(session, table).on_conflict_do_nothing().returning(getattr(table, key))
    return list(session.execute(statement, list(rows)).scalars())


def increment(session: Session, table: type[Base], keys: dict[str, Any], column: str, by: int) -> None:
    """Add to a counter row, creating it at need."""
    accumulate(session, table, keys, {column: by})


def accumulate(session: Session, table: type[Base], keys: dict[str, Any], added: dict[str, float]) -> None:
    """Add to several columns of a row, creating it at need."""
    upsert(session, table, [keys | added], list(keys), add=True)


def upsert(
    session: Session, table: type[Base], rows: Sequence[dict[str, Any]], keys: Sequence[str], *, add: bool = False
) -> None:
    """One statement over rows of the same columns, each key once: insert those that do not exist yet, and write the
    other columns of those that do; ``add``: add to these columns. Locks are taken in the order of the rows."""
    statement = _insert(session, table).values(rows[0] if len(rows) == 1 else rows)  # SQLAlchemy caches that of one row
    new = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    changed = {name: getattr(table, name) + value for name, value in new.items()} if add else new
    session.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed))


def _insert(session: Session, table: type[Base]) -> Any:
    """Both dialects have the same ``ON CONFLICT``, each in an insert of its own."""
    dialect: Any = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    return dialect.insert(table)
