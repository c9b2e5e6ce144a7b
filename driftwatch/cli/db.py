"""``driftwatch db``: the store's schema and its size."""

from __future__ import annotations

import sys
import time

import click

from driftwatch.cli.options import with_settings
from driftwatch.settings import Settings
from driftwatch.store import migrate, retention
from driftwatch.store.connection import Store


@click.group()
def db() -> None:
    """Migrate, check and prune the store."""


@db.command()
@with_settings
def upgrade(settings: Settings) -> None:
    """Bring the store to the schema of this version."""
    store = Store(settings.store.url)
    migrate.upgrade(store)
    click.echo(f"{store.name} is up to date")


@db.command()
@with_settings
def check(settings: Settings) -> None:
    """Say whether the store has the schema of this version; exit 1 if not."""
    store = Store(settings.store.url)
    problems = migrate.problems(store)
    for problem in problems:
        click.echo(f"{store.name}: {problem}")
    if problems:
        sys.exit(1)
    click.echo(f"{store.name} is up to date")


@db.command()
@with_settings
def prune(settings: Settings) -> None:
    """Delete what is past its retention, now."""
    keep = settings.retention
    store = Store(settings.store.url)
    pruned = retention.prune(store, now=time.time(), payload_days=keep.payload_days, replay_days=keep.replay_days)
    click.echo(f"deleted {pruned.payloads} payloads and {pruned.samples} samples")
