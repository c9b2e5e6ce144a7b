"""Old and new versions on one store: what a migration adds, an earlier version need not know; going back leaves it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory

from driftwatch.store import migrate
from driftwatch.store.connection import Store

REVISIONS = [
    one.revision for one in ScriptDirectory(str(migrate._scripts())).walk_revisions() if one.down_revision is not None
][::-1]

Columns = dict[str, dict[str, Any]]


def tables(store: Store) -> dict[str, Columns]:
    inspector = sa.inspect(store.engine)
    return {
        name: {column["name"]: dict(column) for column in inspector.get_columns(name)}
        for name in inspector.get_table_names()
    }


def test_migrations_only_add_what_an_earlier_version_can_leave_out(store_url: str) -> None:
    store = Store(store_url)
    migrate.upgrade(store, "0001")
    assert REVISIONS[0] == "0002"
    for revision in REVISIONS:
        before = tables(store)
        migrate.upgrade(store, revision)
        after = tables(store)
        for table, columns in before.items():
            assert columns.keys() <= after[table].keys(), f"{revision} takes something out of {table}"
            for name, column in after[table].items():
                left_out = column["nullable"] or column["default"] is not None
                same = name in columns and columns[name]["nullable"] <= column["nullable"]
                assert same or left_out, f"{revision}: an earlier version writes no {table}.{name}"
    store.close()


def test_a_newer_store_is_no_reason_not_to_start(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with store.engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with caplog.at_level(logging.WARNING):
        migrate.prepare(store)
    assert "revision 9999, newer than this version of driftwatch" in caplog.text
    (problem,) = migrate.problems(store)
    assert problem.startswith("the store is at revision 9999, newer")
    with store.engine.begin() as connection:
        assert connection.scalar(sa.text("SELECT version_num FROM alembic_version")) == "9999"
