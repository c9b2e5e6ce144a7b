"""The command line: one thin module a verb."""

from __future__ import annotations

import logging
import sys

import click

from driftwatch import __version__
from driftwatch.cli.backtest import backtest
from driftwatch.cli.candidate import candidate
from driftwatch.cli.db import db
from driftwatch.cli.demo import demo
from driftwatch.cli.doctor import doctor
from driftwatch.cli.evaluate import evaluate
from driftwatch.cli.ingest import ingest
from driftwatch.cli.processes import control, serve, shadow, tap
from driftwatch.cli.profile import profile
from driftwatch.cli.replay import replay
from driftwatch.cli.retrain import retrain
from driftwatch.cli.sketch import sketch
from driftwatch.errors import DriftwatchError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def commands() -> None:
    """Drift monitoring for speculative decoding: is the draft still accepted, on your own traffic?"""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for noisy in ("apscheduler", "httpx", "httpcore", "alembic", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


for command in (
    backtest,
    candidate,
    control,
    db,
    demo,
    doctor,
    evaluate,
    ingest,
    profile,
    replay,
    retrain,
    serve,
    shadow,
    sketch,
    tap,
):
    commands.add_command(command)


def main() -> None:
    """Entry point. An expected error is one line on stderr and exit code 2."""
    try:
        commands()
    except DriftwatchError as error:
        click.echo(f"driftwatch: {error}", err=True)
        sys.exit(2)
