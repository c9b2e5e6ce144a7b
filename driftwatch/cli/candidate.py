"""``driftwatch candidate``: is a retrained draft better than the one that serves?"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from driftwatch.acceptance import Rule
from driftwatch.cli.options import files, needs_shadow
from driftwatch.drift.gate import Rules, Verdict, fixed
from driftwatch.errors import DriftwatchError
from driftwatch.records import read_records
from driftwatch.settings import load

if TYPE_CHECKING:
    from driftwatch.shadow.compare import Compared

NOT_BETTER = 1


@click.group()
def candidate() -> None:
    """Retrained drafts."""


@candidate.command()
@files
@click.option("--incumbent", required=True, help="Folder of the draft that serves, or a name: ngram:min=1,max=3.")
@click.option("--candidate", "candidate_spec", required=True, help="Folder of the draft that may take its place.")
@click.option("--target", "target_path", type=click.Path(path_type=Path), help="Folder of the target, where needed.")
@click.option("--by", multiple=True, metavar="LABEL", help="Cells by the values of a label; repeatable.")
@click.option("--gamma", default=5, show_default=True, type=click.IntRange(1, 32), help="Proposal length.")
@click.option(
    "--rule",
    default="argmax",
    show_default=True,
    type=click.Choice(["argmax", "rejection"]),
    help="Acceptance rule of the engine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def compare(
    files: tuple[Path, ...],
    incumbent: str,
    candidate_spec: str,
    target_path: Path | None,
    by: tuple[str, ...],
    gamma: int,
    rule: Rule,
    as_json: bool,
) -> None:
    """Replay two drafts on the requests in FILES and test the difference, request by request.

    Exit code 0 if the candidate is better by the margin over all and worse nowhere, 1 if not, or if that cannot be
    said on so few requests. Take requests that neither was trained on. What is asked comes from the environment:
    DRIFTWATCH_RETRAIN__GATE__MARGIN and so on.
    """
    try:
        from driftwatch.shadow.compare import compare as compare_outcomes
        from driftwatch.shadow.history import replay_records
        from driftwatch.shadow.open import Opening
        from driftwatch.shadow.target import Target
        from driftwatch.shadow.tokenizer import Retokeniser
        from driftwatch.shadow.worker import load_draft
    except ModuleNotFoundError as error:
        raise needs_shadow(error) from None
    settings = load(None)
    tokens = settings.shadow.batch_tokens
    target = Target.configured(target_path, settings.shadow) if target_path else None
    tokenizer = Retokeniser(target_path) if target_path else None
    opening = Opening.configured(settings.shadow, rule, depths=gamma)
    own, other = (load_draft(spec, tokenizer, opening, target) for spec in (candidate_spec, incumbent))
    outcomes = [
        replay_records(draft, read_records(files), batch_tokens=tokens, tokenizer=tokenizer) for draft in (own, other)
    ]
    found = compare_outcomes(*outcomes, gamma=gamma, by=by)
    if not len(found.pairs):
        reasons = ", ".join(f"{reason} ({count})" for reason, count in found.skipped.items())
        raise DriftwatchError(f"no request could be replayed with both: {reasons or 'the files hold no records'}")
    gates = settings.retrain.gate
    rules = Rules(gates.margin, gates.tolerance, gates.min_share, gates.tail_tolerance, gates.error)
    verdict = fixed(found.pairs, found.cells, None, rules)
    if as_json:
        drafts = {"candidate": own.fingerprint.as_dict(), "incumbent": other.fingerprint.as_dict()}
        click.echo(json.dumps(_report(verdict, found) | drafts | {"gamma": gamma, "rule": rule}))
    else:
        _print(verdict, found)
    if verdict.outcome != "promote":
        sys.exit(NOT_BETTER)


def _report(verdict: Verdict, found: Compared) -> dict[str, Any]:
    table = [{"name": found.cells[row.cell]} | asdict(row) for row in verdict.table if row.cell is not None]
    return {
        "verdict": verdict.outcome,
        "reasons": list(verdict.reasons),
        "table": table,
        "overall": asdict(verdict.overall),
        "tail": asdict(verdict.tail),
        "skipped": found.skipped,
    }


def _print(verdict: Verdict, found: Compared) -> None:
    columns = ("cell", "requests", "share", "incumbent", "candidate", "difference", "interval", "finding")
    table = Table(*columns, box=box.SIMPLE)
    for row in (*verdict.table, verdict.overall):
        name = "all" if row.cell is None else found.cells[row.cell]
        rates = [_number(value) for value in (row.incumbent, row.candidate, row.difference)]
        interval = "not enough data" if row.lower is None else f"{row.lower:+.3f} to {row.upper:+.3f}"
        finding = "" if row.cell is None else row.finding
        table.add_row(name, f"{row.requests:,}", f"{row.share:.1%}", *rates, interval, finding)
    console = Console()
    console.print(table, width=max(console.width, 110))
    tail = verdict.tail
    p99s = [_number(value) for value in (tail.incumbent_p99, tail.candidate_p99)]
    click.echo(f"p99 of steps per token: {p99s[0]} with the incumbent, {p99s[1]} with the candidate ({tail.finding})")
    for reason, count in found.skipped.items():
        click.echo(f"skipped: {count} ({reason})")
    click.echo(f"{verdict.outcome.replace('_', ' ')}: {'; '.join(verdict.reasons)}")


def _number(value: float | None) -> str:
    return "not enough data" if value is None else f"{value:.3f}"
