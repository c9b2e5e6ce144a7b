"""``driftwatch serve``, and its three processes one by one."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from driftwatch.cli.options import needs_shadow, with_settings
from driftwatch.serve import supervise
from driftwatch.settings import Settings, load
from driftwatch.store import migrate
from driftwatch.store.connection import Store


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML); else environment and defaults.")
def serve(config: Path | None) -> None:
    """Migrate the store, then run tap, control and shadow on this machine."""
    supervise(load(config), config)


@click.command()
@with_settings
def tap(settings: Settings) -> None:
    """Run the tap: the proxy in front of the engine."""
    from driftwatch.tap.app import run

    run(settings)


@click.command()
@with_settings
def control(settings: Settings) -> None:
    """Run control: API, metrics, detectors, webhooks."""
    from driftwatch.control.app import run

    store = Store(settings.store.url)
    migrate.prepare(store)
    run(store, settings)


@click.command()
@with_settings
def shadow(settings: Settings) -> None:
    """Run a shadow worker: replays drafts on samples."""
    try:
        from driftwatch.shadow.metrics import app, served
        from driftwatch.shadow.worker import Worker
    except ModuleNotFoundError as error:
        raise needs_shadow(error) from None

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    worker = Worker(settings, Store(settings.store.url))
    with served(settings.shadow.listen, app(worker.governor)):
        worker.run(stop)
