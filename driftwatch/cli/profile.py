"""``driftwatch profile``: what a plain step, a verification and a proposal cost on this device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from driftwatch.cli.options import needs_shadow
from driftwatch.cli.output import written_whole
from driftwatch.economics.profile import CostProfile
from driftwatch.errors import ProfileError
from driftwatch.evaluate.exported import watch
from driftwatch.settings import load

if TYPE_CHECKING:
    from driftwatch.shadow.profile.run import LoopName

positive = click.IntRange(min=1)


@click.command()
@click.option("--target", "target_path", type=click.Path(path_type=Path), help="Folder of the target.")
@click.option(
    "--draft",
    help="Folder of a draft, an EAGLE-3 head as a tree by FOLDER:steps=5,topk=4,tokens=8; ngram:min=1,max=3 is taken "
    "to cost nothing.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the cost profile here, JSON.")
@click.option("--batch", "batches", multiple=True, type=positive, help="Batch size; repeatable. Default: by device.")
@click.option("--context", "contexts", multiple=True, type=positive, help="Tokens in the cache; repeatable.")
@click.option("--gamma", "gammas", multiple=True, type=click.IntRange(1, 32), help="Proposal length; repeatable.")
@click.option(
    "--loop",
    default="passes",
    show_default=True,
    type=click.Choice(["passes", "transformers"]),
    help="What decodes: bare passes as an engine makes them, or transformers' assisted generation with all that it "
    "does around them (one sequence, chain drafts).",
)
@click.option(
    "--engine-url",
    "engines",
    multiple=True,
    help="In place of --target: read the step times that a serving vLLM exports. Repeat it, once for a plain engine "
    "and once for a speculating one of the same target.",
)
@click.option(
    "--seconds", default=300.0, show_default=True, type=click.FloatRange(min=1), help="How long engines are read."
)
def profile(
    target_path: Path | None,
    draft: str | None,
    out: Path | None,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    gammas: tuple[int, ...],
    loop: LoopName,
    engines: tuple[str, ...],
    seconds: float,
) -> None:
    """Make a cost profile: how long a plain step, a verification and a proposal take.

    With --target they are measured on this device, in about two minutes; device and type come from the environment,
    DRIFTWATCH_SHADOW__DEVICE and so on. An engine has kernels of its own: with --engine-url the times are those that it
    exports, over as many batches as its load runs through meanwhile. Costs from elsewhere can be entered in a file.
    """
    if (target_path is None) == (not engines):
        raise ProfileError("nothing to measure: give --target, or engines with --engine-url, and not both")
    if engines and (draft or batches or contexts or gammas):
        raise ProfileError("--engine-url reads what engines do: leave out --draft, --batch, --context and --gamma")
    with written_whole("--out", out) as file:
        found = (
            _watched(engines, seconds)
            if target_path is None
            else _measured(target_path, draft, batches, contexts, gammas, loop)
        )
        if file is not None:
            file.write(json.dumps(found.to_json(), indent=1) + "\n")
    _print(found)


def _watched(engines: Sequence[str], seconds: float) -> CostProfile:
    with _spinner("reading engines"):
        return watch(engines, seconds=seconds)


def _measured(
    target_path: Path,
    draft: str | None,
    batches: Sequence[int],
    contexts: Sequence[int],
    gammas: Sequence[int],
    loop: LoopName,
) -> CostProfile:
    try:
        from driftwatch.shadow.device import pick_device, pick_dtype
        from driftwatch.shadow.profile.run import Shapes
        from driftwatch.shadow.profile.run import profile as measured
    except ModuleNotFoundError as error:
        raise needs_shadow(error) from None
    shadow = load(None).shadow
    device = pick_device(shadow.device)
    with _spinner("measuring"):
        return measured(
            target_path,
            draft,
            device=device,
            dtype=pick_dtype(shadow.dtype, device),
            shapes=Shapes(batches, contexts, gammas),
            loop=loop,
            threads=shadow.threads,
        )


@contextmanager
def _spinner(what: str) -> Iterator[None]:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn(what), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield


def _print(found: CostProfile) -> None:
    bound, error = found.bound, found.error
    click.echo(f"cost profile of {bound.device}, {bound.dtype}, costs {found.origin}")
    gammas = sorted({point.gamma for point in found.timings if point.gamma})
    table = Table("batch", "context", "plain step", "c", *(f"v({g})" for g in gammas), box=box.SIMPLE)
    for batch, context in sorted({(point.batch, point.context) for point in found.timings}, key=lambda at: at[::-1]):
        plain = found.plain_s(batch, context)
        c = "-" if found.draft is None else f"{found.cost(batch, 1, context).draft:.3f}"
        verify = [f"{found.target.seconds(batch, gamma, context) / plain:.2f}" for gamma in gammas]
        table.add_row(f"{batch:g}", f"{context:g}", f"{1000 * plain:.2f} ms", c, *verify)
    Console().print(table)
    if error is not None:
        left_out = "" if error.left_out is None else f", {error.left_out:.1%} for points left out of it"
        click.echo(
            f"fit of {error.points} points: relative error {error.rms:.1%}{left_out}, the worst {error.worst:+.1%}"
        )
