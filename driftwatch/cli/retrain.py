"""``driftwatch retrain``: training data, and what became of requests to retrain."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from sqlalchemy import select

from driftwatch.cli.options import needs_shadow, with_settings
from driftwatch.errors import DriftwatchError
from driftwatch.retrain.export import FEATURES, MANIFEST, TRAIN, choose_from, source_of
from driftwatch.retrain.export import export as write_export
from driftwatch.retrain.publish import exists, publish
from driftwatch.retrain.specforge import MAX_LENGTH
from driftwatch.settings import Settings, Shadow, load
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, Deployment, Retrain

Write = Callable[[Path, Path], dict[str, Any]]
"""Features of the rows in a file into a folder; what a manifest says of them."""


@click.group()
def retrain() -> None:
    """Training data for a segment, and the requests to retrain."""


@retrain.command()
@click.option("--segment", required=True, help="Segment id, as /v1/segments shows it.")
@click.option("--out", required=True, help="Folder to write, or an fsspec URL (s3://...); it must not exist.")
@click.option("--draft", default="incumbent", show_default=True, help="Name of the draft.")
@click.option("--days", default=7.0, show_default=True, help="How far back the segment's own requests go.")
@click.option(
    "--features",
    "featured",
    is_flag=True,
    help="Write the target's hidden states over the rows too, as SpecForge reads them offline; runs the target.",
)
@with_settings
def export(segment: str, out: str, draft: str, days: float, featured: bool, settings: Settings) -> None:
    """Write the served tokens of a segment as SpecForge's pre-tokenised JSONL, with what `retrain.data` adds."""
    _refuse_existing(out)
    store = Store(settings.store.url)
    with store.read() as session:
        query = select(Cell).where(Cell.segment == segment, Cell.draft == draft).order_by(Cell.updated_at.desc())
        cell = session.scalars(query).first()
        model = "" if cell is None else session.get_one(Deployment, cell.deployment_id).model
    if cell is None:
        raise DriftwatchError(f"no cell of segment {segment!r} and draft {draft!r}; GET /v1/segments lists them")
    write = _configured(settings, model, draft) if featured else None
    rules = settings.retrain.data
    source = source_of(cell, time.time() - days * 86_400, rules)
    whole = replace(source, occasion=replace(source.occasion, split=None))  # a segment is all of its cells
    chosen = choose_from(store, whole, rules)
    more = None if write is None else lambda folder: write(folder / TRAIN, folder / FEATURES)
    done, _ = write_export(store, chosen, rules, place=out, featured=more)
    click.echo(f"{done.rows} rows, {done.loss_tokens} loss tokens: {done.uri}")
    click.echo(f"{done.eval_rows} rows for evaluation: {done.eval_uri}")
    for reason, count in done.left_out.items():
        click.echo(f"left out: {count} ({reason})")


@retrain.command()
@click.option("--data", required=True, type=click.Path(path_type=Path), help="train.jsonl of an export.")
@click.option("--draft", required=True, help="Folder of the draft that is to be trained.")
@click.option("--target", required=True, type=click.Path(path_type=Path), help="Folder of the target.")
@click.option("--out", required=True, help="Folder to write, or an fsspec URL; it must not exist.")
def features(data: Path, draft: str, target: Path, out: str) -> None:
    """Write the target's hidden states over training rows, as SpecForge reads them offline.

    For a trainer that runs neither the target nor a server of it. Device and type come from the environment,
    DRIFTWATCH_SHADOW__DEVICE and so on.
    """
    _refuse_existing(out)
    write = _features(load(None).shadow, draft, target)

    def whole(folder: Path) -> dict[str, Any]:
        found = write(data, folder)
        (folder / MANIFEST).write_text(json.dumps(found, indent=2) + "\n")
        return found

    found = publish(out, whole)
    click.echo(f"features of {found['rows']} rows, {found['tokens']} tokens, {found['bytes'] / 1e6:,.1f} MB: {out}")
    for reason, count in found["left_out"].items():
        click.echo(f"left out: {count} ({reason})")


def _refuse_existing(out: str) -> None:
    if exists(out):
        raise DriftwatchError(f"--out {out} exists; give a new folder")


def _configured(settings: Settings, name: str, draft: str) -> Write:
    """For a draft of a model as the settings have it."""
    model = settings.model_for(name)
    path = next((one.path for one in model.drafts if one.name == draft), None) if model is not None else None
    if model is None or model.target is None or path is None:
        raise DriftwatchError(f"--features needs `models[].target` and the path of the draft {draft!r} in the settings")
    return _features(settings.shadow, path, Path(model.target))


def _features(shadow: Shadow, draft: str, target_path: Path) -> Write:
    """Loads both at once, so that a wrong one is known before anything is written."""
    try:
        from driftwatch.shadow.features import Reading, write
        from driftwatch.shadow.open import Opening, open_draft
        from driftwatch.shadow.target import Target
    except ModuleNotFoundError as error:
        raise needs_shadow(error) from None
    target = Target.configured(target_path, shadow)
    reading = Reading.of(open_draft(draft, Opening.configured(shadow), target), target)
    return lambda rows, folder: write(rows, folder, reading, max_length=MAX_LENGTH)


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
