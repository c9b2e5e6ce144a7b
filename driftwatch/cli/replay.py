"""``driftwatch replay``: what a draft would have done on recorded requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from driftwatch.acceptance import DEFAULT_GAMMA, Rule
from driftwatch.cli.options import files, hidden_states, needs_shadow
from driftwatch.cli.output import written_whole
from driftwatch.errors import DriftwatchError, RecordError
from driftwatch.records import read_lines, read_records
from driftwatch.settings import HiddenStates, Shadow, load

if TYPE_CHECKING:
    from driftwatch.shadow.draft import Draft, Fingerprinted
    from driftwatch.shadow.history import Outcome, Summary
    from driftwatch.shadow.rays import Open
    from driftwatch.shadow.tokenizer import Retokeniser


@click.command()
@files
@click.option(
    "--draft",
    "draft_spec",
    required=True,
    help="Folder of the draft, an EAGLE-3 head as a tree by FOLDER:steps=5,topk=4,tokens=8; or a name: "
    "ngram:min=1,max=3, or lookahead:window=5,ngram=3,guesses=5[,requests=50], which is run with the target on so many "
    "of the records.",
)
@click.option(
    "--target",
    "target_path",
    type=click.Path(path_type=Path),
    help="Folder of the target. Its tokenizer reads text records; the model is loaded only where it is needed: for "
    "EAGLE-3, the rejection rule, agreement and lookahead decoding.",
)
@hidden_states
@click.option(
    "--gamma",
    default=DEFAULT_GAMMA,
    show_default=True,
    type=click.IntRange(1, 32),
    help="Largest proposal length; a tree has its own, its steps.",
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
@click.option(
    "--ray",
    "ray",
    is_flag=False,
    flag_value="",
    metavar="[ADDRESS]",
    help="Replay on Ray; write it behind FILES, or as --ray=ADDRESS. With the address of a running cluster there, else "
    "on this machine. The figures are the same.",
)
def replay(
    files: tuple[Path, ...],
    draft_spec: str,
    target_path: Path | None,
    engine: HiddenStates | None,
    gamma: int,
    rule: Rule,
    agreement: bool | None,
    by: tuple[str, ...],
    lines_path: Path | None,
    as_json: bool,
    ray: str | None,
) -> None:
    """Replay a draft on the requests in FILES (records, JSONL) and print how much of it was accepted.

    Device, type and batch size come from the environment: DRIFTWATCH_SHADOW__DEVICE and so on.
    """
    try:
        from driftwatch.shadow.eagle3.rollout import Eagle3TreeDraft
        from driftwatch.shadow.history import Summary, per_request, replay_records
        from driftwatch.shadow.lookahead.method import is_lookahead, parse
        from driftwatch.shadow.lookahead.share import Tried, decode_records
        from driftwatch.shadow.open import kind_of
        from driftwatch.shadow.target import Target
    except ModuleNotFoundError as error:
        raise needs_shadow(error) from None
    shadow = load(None).shadow
    draft: Fingerprinted
    summary: Summary
    outcomes: Iterator[Outcome]
    if engine is not None and target_path is None:
        raise DriftwatchError("--hidden-states needs --target too: the folder with the target's config.json")
    if is_lookahead(draft_spec):
        if target_path is None or rule != "argmax" or ray is not None:
            missing = "give the target with --target" if target_path is None else "leave out --rule and --ray"
            raise DriftwatchError(f"draft {draft_spec}: the target itself is run, and greedily; {missing}")
        method = parse(draft_spec)
        tried = Tried.on(read_records(files), method, by)
        total: int | None = len(tried.records)
        draft, summary, gamma = method, tried, method.gamma
        outcomes = decode_records(
            Target.configured(target_path, shadow, engine), tried.records, method, tokenizer=_tokenizer(target_path)
        )
    else:
        if agreement is None:
            at_hand = target_path is not None and engine is None
            agreement = at_hand and (rule == "rejection" or kind_of(draft_spec) not in ("chain", "ngram"))
        opened = partial(_open, draft_spec, target_path, engine, shadow, rule, gamma, agreement)
        loaded, tokenizer = opened()
        gamma = loaded.tree.steps if isinstance(loaded, Eagle3TreeDraft) else gamma
        draft, summary, total = loaded, Summary(rule, gamma, by), _count(files)
        if ray is None:
            records = read_records(files)
            outcomes = replay_records(loaded, records, batch_tokens=shadow.batch_tokens, tokenizer=tokenizer)
        else:
            outcomes = _on_ray(files, opened, loaded, shadow, ray)
    with written_whole("--per-request", lines_path, files) as lines, _progress(total) as advance:
        for outcome in outcomes:
            summary.add(outcome)
            if lines is not None and outcome.weights is not None:
                lines.write(json.dumps(per_request(outcome, rule, gamma)) + "\n")
            advance()
        if not summary.leading.total.output_tokens:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in summary.skipped.items())
            raise DriftwatchError(f"no request could be replayed: {reasons or 'the files hold no records'}")
    if as_json:
        click.echo(json.dumps(summary.as_dict(draft)))
    else:
        _print(summary, summary.as_dict(draft))


def _open(
    spec: str, path: Path | None, engine: HiddenStates | None, shadow: Shadow, rule: Rule, gamma: int, agreement: bool
) -> tuple[Draft, Retokeniser | None]:
    """The draft, and the target's tokenizer; with Ray on each machine anew."""
    from driftwatch.shadow.open import Opening
    from driftwatch.shadow.target import Target
    from driftwatch.shadow.worker import load_draft

    target = None if path is None else Target.configured(path, shadow, engine)
    tokenizer = None if path is None else _tokenizer(path)
    opening = Opening.configured(shadow, rule, depths=gamma, agreement=agreement)
    return load_draft(spec, tokenizer, opening, target), tokenizer


def _tokenizer(path: Path) -> Retokeniser:
    from driftwatch.shadow.tokenizer import Retokeniser

    return Retokeniser(path)


def _on_ray(files: Sequence[Path], opened: Open, draft: Draft, shadow: Shadow, address: str) -> Iterator[Outcome]:
    if Path(address).exists() and address:
        raise DriftwatchError(f"--ray {address}: that is a file; write --ray behind FILES, or --ray=ADDRESS")
    try:
        from driftwatch.shadow.rays import replay_files
    except ModuleNotFoundError as error:
        extra = "pip install 'driftwatch-sidecar[ray]'"
        raise DriftwatchError(f"--ray needs {error.name}, which is not installed: {extra}") from None
    on_gpu = shadow.device == "auto" or shadow.device.startswith("cuda")
    return replay_files(files, opened, draft, address=address or None, on_gpu=on_gpu, batch_tokens=shadow.batch_tokens)


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


def _print(summary: Summary, report: dict[str, Any]) -> None:
    console = Console()
    fingerprint = report["draft"]
    if run := report.get("run"):
        click.echo(
            f"run with the target, not replayed, on {run['chosen']:,} of {run['records']:,} records, greedily, however "
            f"they were served: {_ratio(run['fed_per_step'])} tokens through the target a step"
        )
    click.echo(
        f"{report['requests']} requests, {report['output_tokens']} output tokens, {fingerprint['kind']} draft "
        f"{fingerprint['path']} ({fingerprint['parameters']:,} parameters), rule {report['rule']}"
    )
    apart = report.get("retokenised")
    if apart and summary.leading is summary.retokenised:
        click.echo("all of them tokenised from text: their ids need not be the served ones")
        apart = None
    _print_figures(console, report, str(summary.gamma))
    if cost := report.get("cost"):
        click.echo(f"{cost['trees']:,} trees in {cost['passes']:,} passes of the head over {cost['rows']:,} rows")
    if apart:
        click.echo(f"apart from them, {apart['requests']} requests tokenised from text, not exact:")
        _print_figures(console, apart, str(summary.gamma))
    for reason, count in report["skipped"].items():
        console.print(f"skipped: {count} ({reason})")


def _print_figures(console: Console, report: dict[str, Any], last: str) -> None:
    console.print(_table("gamma", report["gamma"]))
    if "agreement" in report:
        click.echo(_agreement(report["agreement"]))
    for label, values in report.get("by", {}).items():
        console.print(f"by {label}, gamma {last}")
        console.print(_table(label, {value: found["gamma"][last] for value, found in values.items()}))


def _agreement(found: dict[str, Any]) -> str:
    first = (_ratio(found[key][0]) for key in ("argmax_match", "p_top1", "sum_min_pq"))
    values = (*first, *(_ratio(found[key]) for key in ("outside_draft_vocabulary", "target_logprob", "target_entropy")))
    names = ("argmax match", "p(first choice)", "sum min(p, q)", "outside its vocabulary", "target logprob", "entropy")
    return "at depth 0: " + ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))


def _table(first: str, rows: dict[str, dict[str, Any]]) -> Table:
    columns = (first, "windows", "accepted", "rejected", "length", "steps/\ntoken", "hit rate", "95% interval")
    table = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name, row in rows.items():
        counts = [f"{row[key]:,.0f}" for key in ("windows", "accepted", "rejected")]
        ratios = (_ratio(row[key]) for key in ("acceptance_length", "steps_per_token", "hit_rate"))
        table.add_row(name, *counts, *ratios, _interval(row))
    return table


def _ratio(value: float | None) -> str:
    return "not enough data" if value is None else f"{value:.3f}"


def _interval(row: dict[str, Any]) -> str:
    if row["hit_rate_lower"] is None:
        return "not enough data"
    return f"{row['hit_rate_lower']:.3f} to {row['hit_rate_upper']:.3f}"
