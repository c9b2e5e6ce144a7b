"""Migrations: bring a database to the schema of this version, and check that it is there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import SQLAlchemyError

import driftwatch
from driftwatch.errors import StoreError
from driftwatch.store.connection import Store
from driftwatch.store.schema import Base

log = logging.getLogger(__name__)


def _scripts() -> Path:
    """The migrations lie in the package when installed, beside it in a checkout."""
    package = Path(driftwatch.__file__).parent
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent / "migrations"


def _config(connection: sa.Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_scripts()))
    config.attributes["connection"] = connection
    return config


class NewerStore(StoreError):
    """A later version has migrated the store."""


def upgrade(store: Store, revision: str = "head") -> None:
    """Migrate up, in one transaction. Raises StoreError if the database is unreachable, NewerStore if it is newer than
    this version."""
    _run(store, command.upgrade, revision)


def prepare(store: Store) -> None:
    """Migrate up before a process starts. What a later version has made is left as it is, so that a roll-out can be
    rolled back: migrations only add what an earlier version need not know. Raises StoreError as above."""
    try:
        upgrade(store)
    except NewerStore as error:
        log.warning("%s; going on with it as it is", error)


def downgrade(store: Store, revision: str) -> None:
    """Migrate down: ``base`` drops every table of driftwatch."""
    _run(store, command.downgrade, revision)


def _run(store: Store, action: Any, revision: str) -> None:
    try:
        engine = store.engine.execution_options(immediate=True)
        with engine.connect() as connection, _rebuildable(connection), connection.begin():
            _alone(connection)
            _refuse_newer(connection)
            action(_config(connection), revision)
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        raise StoreError(f"store {store.name}: {str(cause).strip().splitlines()[0]}") from error


def _alone(connection: sa.Connection) -> None:
    """Several processes may start at once: one migrates, the others wait for it, however long it takes."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SET LOCAL lock_timeout = 0"))
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(hashtextextended('driftwatch:migrate', 0))"))


@contextmanager
def _rebuildable(connection: sa.Connection) -> Iterator[None]:
    """SQLite changes a constraint by copying the table and dropping the old one, which must not cascade.

    Foreign keys can be switched off outside of a transaction only: https://www.sqlite.org/lang_altertable.html, 7.
    """
    raw: Any = connection.connection.driver_connection
    if connection.dialect.name != "sqlite":
        yield
        return
    raw.execute("PRAGMA foreign_keys=OFF")
    try:
        yield
    finally:
        raw.execute("PRAGMA foreign_keys=ON")


def _refuse_newer(connection: sa.Connection) -> None:
    current = MigrationContext.configure(connection).get_current_revision()
    if _is_newer(current):
        raise NewerStore(_newer(current))


def _is_newer(revision: str | None) -> bool:
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    return revision is not None and revision not in known


def _newer(revision: str | None) -> str:
    return f"the store is at revision {revision}, newer than this version of driftwatch; upgrade driftwatch"


def problems(store: Store) -> list[str]:
    """What differs between the database and the schema of this version; empty when nothing does."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    try:
        with store.engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_server_default": False})
            current = context.get_current_revision()
            if _is_newer(current):
                return [_newer(current)]
            if current != head:
                return [f"at revision {current or 'none'}, expected {head}: run `driftwatch db upgrade`"]
            return [str(difference) for difference in compare_metadata(context, Base.metadata)]
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        raise StoreError(f"store {store.name}: {str(cause).strip().splitlines()[0]}") from error


def is_empty(store: Store) -> bool:
    """Whether the database was never migrated."""
    with store.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision() is None
