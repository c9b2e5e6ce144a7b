"""Alembic's entry: runs the migrations on the connection that :mod:`driftwatch.store.migrate` opened."""

from __future__ import annotations

from alembic import context

from driftwatch.store.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    compare_server_default=False,
)
context.run_migrations()
