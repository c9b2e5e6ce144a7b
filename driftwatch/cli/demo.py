"""``driftwatch demo``: the whole loop on this machine."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console

from driftwatch.cli.options import needs_shadow

LEAST_REQUESTS = 120


@click.command()
@click.option(
    "--requests", default=240, show_default=True, type=click.IntRange(LEAST_REQUESTS), help="Requests to send."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the traffic.")
@click.option("--shift/--no-shift", default=True, help="Whether one tenant's traffic shifts half-way.")
@click.option("--retrain", is_flag=True, help="Train the draft further after the alarm, and judge the candidate.")
@click.option("--keep", is_flag=True, help="Leave everything running until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, as the last line.")
@click.option("--cache", type=click.Path(path_type=Path), help="Where the model is kept between runs.")
def demo(requests: int, seed: int, shift: bool, retrain: bool, keep: bool, as_json: bool, cache: Path | None) -> None:
    """Run the whole loop here: a real engine, driftwatch in front of it, and traffic that shifts. Needs no GPU."""
    if retrain and not shift:
        raise click.UsageError("--retrain needs the shift: without an alarm nothing is trained")
    try:
        from driftwatch.demo.loop import run
        from driftwatch.demo.report import Report, show
    except ModuleNotFoundError as error:
        raise needs_shadow(error) from None
    console = Console(stderr=as_json, width=max(Console().width, 110))
    started = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:5.0f} s[/dim]  {line}", highlight=False)

    def finished(report: Report) -> None:
        show(report, console)
        if as_json:
            click.echo(json.dumps(report.as_dict()))
        if keep:
            say("everything stays running; Ctrl-C ends it")
            try:
                while True:
                    time.sleep(3600)
            except KeyboardInterrupt:
                say("stopping")

    folder = Path(tempfile.mkdtemp(prefix="driftwatch-demo-"))
    say(f"everything is written to {folder}")
    run(
        folder=folder,
        cache=cache or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "driftwatch",
        requests=requests,
        seed=seed,
        shift=shift,
        retrain=retrain,
        say=say,
        finished=finished,
    )
