"""``driftwatch replay``: what a draft would have done on recorded requests."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from driftwatch.acceptance import DEFAULT_GAMMA, Rule
from driftwatch.cli.options import files, needs_shadow
from driftwatch.errors import DriftwatchError, RecordError
from driftwatch.records import read_lines, read_records
from driftwatch.settings import load

if TYPE_CHECKING:
    from driftwatch.shadow.history import Summary


@click.command()
@files
@click.option("--draft", "draft_spec", required=True, help="Folder of the draft, or a name: ngram:min=1,max=3.")
@click.option(
    "--target",
    "target_path",
    type=click.Path(path_type=Path),
    help="Folder of the target. Its tokenizer reads text records; the model is loaded only where it is needed: for "
    "EAGLE-3, the rejection rule and agreement.",
)
@click.option(
    "--gamma", default=DEFAULT_GAMMA, show_default=True, type=click.IntRange(1, 32), help="Largest proposal length."
)
@click.option(
    "--rule",
    default="argmax",
    show_default=True,
    type=click.Choice(["argmax", "rejection"]),
    help="Acceptance rule of the engine; rejection needs the records' sampling settings and the target.",
)
@click.option(
    "--agreement/--no-agreement",
    default=None,
    help="Compare draft and target beyond the rule: argmax match, p of the draft's first choice, sum of min(p, q), and "
    "the target's own surprise. By default wherever the target is loaded anyway.",
)
@click.option("--by", multiple=True, metavar="LABEL", help="Figures by the values of a label too; repeatable.")
@click.option("--per-request", "lines_path", type=click.Path(path_type=Path), help="Write one line a request, JSONL.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def replay(
    files: tuple[Path, ...],
    draft_spec: str,
    target_path: Path | None,
    gamma: int,
    rule: Rule,
    agreement: bool | None,
    by: tuple[str, ...],
    lines_path: Path | None,
    as_json: bool,
) -> None:
    """Replay a draft on the requests in FILES (records, JSONL) and print how much of it was accepted.

    Device, type and batch size come from the environment: DRIFTWATCH_SHADOW__DEVICE and so on.
    """
    try:
        from driftwatch.shadow.device import pick_device, pick_dtype
        from driftwatch.shadow.history import Summary, per_request, replay_records
        from driftwatch.shadow.open import Opening, kind_of
        from driftwatch.shadow.target import Target
        from driftwatch.shadow.tokenizer import Retokeniser
        from driftwatch.shadow.worker import load_draft
    except ModuleNotFoundError as error:
        raise needs_shadow(error) from None
    shadow = load(None).shadow
    device = pick_device(shadow.device)
    dtype = pick_dtype(shadow.dtype, device)
    target = (
        Target(target_path, device=device, dtype=dtype, prefill_tokens=shadow.batch_tokens) if target_path else None
    )
    if agreement is None:
        agreement = target is not None and (rule == "rejection" or kind_of(draft_spec) == "eagle3")
    opening = Opening(device, dtype, rule, depths=gamma, agreement=agreement, prefill_tokens=shadow.batch_tokens)
    tokenizer = Retokeniser(target_path) if target_path else None
    draft = load_draft(draft_spec, tokenizer, opening, target)
    summary = Summary(rule, gamma, by)
    total = _count(files)
    with _written_whole(lines_path) as lines, _progress(total) as advance:
        outcomes = replay_records(draft, read_records(files), batch_tokens=shadow.batch_tokens, tokenizer=tokenizer)
        for outcome in outcomes:
            summary.add(outcome)
            if lines is not None and outcome.weights is not None:
                lines.write(json.dumps(per_request(outcome, rule, gamma)) + "\n")
            advance()
    if summary.total.requests == 0:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in summary.skipped.items())
        raise DriftwatchError(f"no request could be replayed: {reasons or 'the files hold no records'}")
    if as_json:
        click.echo(json.dumps(summary.as_dict(draft)))
    else:
        _print(summary, summary.as_dict(draft))


def _count(files: Sequence[Path]) -> int | None:
    """Records in the files, for the progress bar; None where counting would use up a pipe, or is not possible."""
    if not all(path.is_file() for path in files):
        return None
    try:
        return sum(1 for path in files for _ in read_lines(path))
    except RecordError:  # said in order, when the records before it have been judged
        return None


@contextmanager
def _progress(total: int | None) -> Iterator[Any]:
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replay", total=total)
        yield lambda: progress.advance(task)


@contextmanager
def _written_whole(path: Path | None) -> Iterator[IO[str] | None]:
    """A text file that appears under its name only when it is complete."""
    if path is None:
        yield None
        return
    if path.exists() and not path.is_file():
        raise DriftwatchError(f"--per-request {path}: not a file; name one that may be written")
    try:
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    except OSError as error:
        raise DriftwatchError(f"--per-request {path}: {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "w") as file:
            yield file
        Path(scratch).chmod(0o644)
        Path(scratch).replace(path)
    finally:
        Path(scratch).unlink(missing_ok=True)


def _print(summary: Summary, report: dict[str, Any]) -> None:
    console = Console()
    fingerprint = report["draft"]
    click.echo(
        f"{report['requests']} requests, {report['output_tokens']} output tokens, {fingerprint['kind']} draft "
        f"{fingerprint['path']} ({fingerprint['parameters']:,} parameters), rule {report['rule']}"
    )
    console.print(_table("gamma", report["gamma"]))
    if "agreement" in report:
        click.echo(_agreement(report["agreement"]))
    for label, values in report.get("by", {}).items():
        last = str(summary.gamma)
        console.print(f"by {label}, gamma {last}")
        console.print(_table(label, {value: found["gamma"][last] for value, found in values.items()}))
    for reason, count in report["skipped"].items():
        console.print(f"skipped: {count} ({reason})")


def _agreement(found: dict[str, Any]) -> str:
    first = (_ratio(found[key][0]) for key in ("argmax_match", "p_top1", "sum_min_pq"))
    values = (*first, *(_ratio(found[key]) for key in ("outside_draft_vocabulary", "target_logprob", "target_entropy")))
    names = ("argmax match", "p(first choice)", "sum min(p, q)", "outside its vocabulary", "target logprob", "entropy")
    return "at depth 0: " + ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))


def _table(first: str, rows: dict[str, dict[str, Any]]) -> Table:
    columns = (first, "windows", "drafted", "accepted", "rejected", "length", "hit rate", "95% interval")
    table = Table(*columns, box=box.SIMPLE)
    for name, row in rows.items():
        counts = [f"{row[key]:,.0f}" for key in ("windows", "drafted", "accepted", "rejected")]
        table.add_row(name, *counts, *(_ratio(row[key]) for key in ("acceptance_length", "hit_rate")), _interval(row))
    return table


def _ratio(value: float | None) -> str:
    return "not enough data" if value is None else f"{value:.3f}"


def _interval(row: dict[str, Any]) -> str:
    if row["hit_rate_lower"] is None:
        return "not enough data"
    return f"{row['hit_rate_lower']:.3f} to {row['hit_rate_upper']:.3f}"
