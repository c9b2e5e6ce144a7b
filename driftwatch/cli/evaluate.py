"""``driftwatch evaluate``: does speculation pay on these requests, at the median and at the tail?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from driftwatch.acceptance import Rule
from driftwatch.cli.options import files, hidden_states, needs_shadow, with_settings
from driftwatch.cli.output import written_whole
from driftwatch.control.costs import read_profile
from driftwatch.errors import DriftwatchError
from driftwatch.evaluate.baseline import Conditions
from driftwatch.evaluate.engine import Limits
from driftwatch.evaluate.html import page
from driftwatch.evaluate.terminal import show
from driftwatch.settings import HiddenStates, Settings


@click.command()
@files
@click.option("--draft", "draft_spec", help="Folder of the trained draft, if there is one.")
@click.option(
    "--target",
    "target_path",
    type=click.Path(path_type=Path),
    help="Folder of the target: reads text records, serves EAGLE-3 drafts, and decodes a few records with lookahead.",
)
@hidden_states
@click.option(
    "--profile", "profile_path", type=click.Path(path_type=Path), help="Costs: from `driftwatch profile`, or entered."
)
@click.option("--engine-url", help="A real engine without speculation: prompts of the sample are sent to it.")
@click.option("--engine-url-speculative", help="The same with speculation.")
@click.option(
    "--gamma", default=5, show_default=True, type=click.IntRange(1, 32), help="Proposal length in use, or meant."
)
@click.option("--rule", default="argmax", show_default=True, type=click.Choice(["argmax", "rejection"]))
@click.option("--by", multiple=True, metavar="LABEL", help="A segment for each value of a label; repeatable.")
@click.option(
    "--batch",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Requests that run at once on an engine; to real engines so many are sent at a time.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Requests per second and engine: both modes are compared at this rate, each at the batch that follows from "
    "it; real engines get no more.",
)
@click.option(
    "--price-per-gpu-hour",
    "per_gpu_hour",
    type=click.FloatRange(min=0, min_open=True),
    help="For costs, any currency; else the settings' `value.gpu_hour_price`.",
)
@click.option(
    "--requests", default=100, show_default=True, type=click.IntRange(min=1), help="Prompts sent to an engine at most."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--html", "html_path", type=click.Path(path_type=Path), help="Write the report here, one file, no links.")
@with_settings
def evaluate(
    files: tuple[Path, ...],
    draft_spec: str | None,
    target_path: Path | None,
    engine: HiddenStates | None,
    profile_path: Path | None,
    engine_url: str | None,
    engine_url_speculative: str | None,
    gamma: int,
    rule: Rule,
    by: tuple[str, ...],
    batch: int,
    rate: float | None,
    per_gpu_hour: float | None,
    requests: int,
    as_json: bool,
    html_path: Path | None,
    settings: Settings,
) -> None:
    """Report, for the requests in FILES (records, JSONL), what speculation does to their time and cost.

    Four sections: the target alone, how much of the draft is accepted, time per token up to the p99, and cost; then a
    verdict for each segment. Times are predicted from a cost profile, or measured on real engines. Prompt lookup
    (n-gram) is judged beside the draft, and with --target lookahead decoding too: neither needs training. Device, price
    and the engine that gives hidden states are those of the settings unless said here.
    """
    if engine_url_speculative and not engine_url:
        raise DriftwatchError("--engine-url-speculative needs its baseline: give the plain engine with --engine-url")
    if engine is not None and target_path is None:
        raise DriftwatchError("--hidden-states needs --target too: the folder with the target's config.json")
    profile = None if profile_path is None else read_profile(profile_path)
    try:
        from driftwatch.evaluate.run import Subject, run
    except ModuleNotFoundError as error:
        raise needs_shadow(error) from None
    engines = [url for url in (engine_url, engine_url_speculative) if url is not None]
    if engine is None and target_path is not None:
        served = (model for model in settings.models if model.target and Path(model.target) == target_path)
        engine = next((model.hidden_states for model in served), None)
    price = settings.value.gpu_hour_price if per_gpu_hour is None else per_gpu_hour
    conditions = Conditions(gamma, float(batch), rate, price, settings.value.gpus)
    subject = Subject(files, by, draft_spec, target_path, profile, rule, engines, engine)
    with written_whole("--html", html_path, files) as html:
        with _progress() as progress:
            found = run(subject, conditions, Limits(requests, batch, rate), settings.shadow, progress)
        if html is not None:
            html.write(page(found))
    if as_json:
        click.echo(json.dumps(found.to_json(), allow_nan=False))
    else:
        show(found)


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """Takes a name and a total at every step of whatever is going on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def step(name: str, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.advance(tasks[name])

        yield step
