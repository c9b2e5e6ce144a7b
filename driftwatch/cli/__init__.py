"""The command line: one thin module a verb."""

from __future__ import annotations

import logging
import sys
from typing import NoReturn

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

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: no check found anything."""


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
    """Entry point. An expected error, wrong use among them, is one line on stderr and exit code 2."""
    try:
        code = commands(prog_name="driftwatch", standalone_mode=False)
    except DriftwatchError as error:
        _end(str(error), 2)
    except click.exceptions.NoArgsIsHelpError as asked:  # a group without its command: all of its help
        asked.show()
        sys.exit(2)
    except click.UsageError as error:
        told = " ".join(error.format_message().split()).removesuffix(".")
        command = error.ctx.command_path if error.ctx is not None else "driftwatch"
        _end(f"{told}; see `{command} --help`", 2)
    except click.ClickException as error:
        _end(" ".join(error.format_message().split()), 2)
    except click.Abort:
        _end("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _end(line: str, code: int) -> NoReturn:
    click.echo(f"driftwatch: {line}", err=True)
    sys.exit(code)
