"""``driftwatch retrain``: training data, and what became of requests to retrain."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import click
from sqlalchemy import select

from driftwatch.cli.options import with_settings
from driftwatch.errors import DriftwatchError
from driftwatch.retrain.export import choose_from, source_of
from driftwatch.retrain.export import export as write_export
from driftwatch.settings import Settings
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, Retrain


@click.group()
def retrain() -> None:
    """Training data for a segment, and the requests to retrain."""


@retrain.command()
@click.option("--segment", required=True, help="Segment id, as /v1/segments shows it.")
@click.option("--out", required=True, help="Folder to write, which must not exist, or an fsspec URL (s3://...).")
@click.option("--draft", default="incumbent", show_default=True, help="Name of the draft.")
@click.option("--days", default=7.0, show_default=True, help="How far back the segment's own requests go.")
@with_settings
def export(segment: str, out: str, draft: str, days: float, settings: Settings) -> None:
    """Write the served tokens of a segment as SpecForge's pre-tokenised JSONL, with what `retrain.data` adds."""
    if Path(out).exists():
        raise DriftwatchError(f"--out {out} exists; give a new folder")
    store = Store(settings.store.url)
    with store.read() as session:
        query = select(Cell).where(Cell.segment == segment, Cell.draft == draft).order_by(Cell.updated_at.desc())
        cell = session.scalars(query).first()
    if cell is None:
        raise DriftwatchError(f"no cell of segment {segment!r} and draft {draft!r}; GET /v1/segments lists them")
    rules = settings.retrain.data
    chosen = choose_from(store, source_of(cell, time.time() - days * 86_400, rules), rules)
    done, _ = write_export(store, chosen, rules, place=out)
    click.echo(f"{done.rows} rows, {done.loss_tokens} loss tokens: {done.uri}")
    click.echo(f"{done.eval_rows} rows for evaluation: {done.eval_uri}")
    for reason, count in done.left_out.items():
        click.echo(f"left out: {count} ({reason})")


@retrain.command()
@with_settings
def status(settings: Settings) -> None:
    """List the requests to retrain, newest first."""
    with Store(settings.store.url).read() as session:
        rows = list(session.scalars(select(Retrain).order_by(Retrain.created_at.desc()).limit(50)))
    for row in rows:
        when = datetime.fromtimestamp(row.created_at).astimezone().isoformat(timespec="seconds")
        click.echo(f"{when}  {row.state:<15}  {row.id}  {row.reason or (row.data or {}).get('uri', '')}")
    if not rows:
        click.echo("no request to retrain")
