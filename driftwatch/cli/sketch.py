"""``driftwatch sketch``: what a draft was trained on, as an artefact, and which prompts are off it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from driftwatch.cli.backtest import read_requests
from driftwatch.cli.options import files, needs_shadow
from driftwatch.drift.sketch import file
from driftwatch.drift.sketch.build import EPSILON, build
from driftwatch.drift.sketch.sketch import Share, Sketch, Verdict, purity
from driftwatch.drift.sketch.usefulness import Usefulness, usefulness
from driftwatch.errors import SketchError
from driftwatch.records import Record, read_records

CHUNK = 1024


@click.group()
def sketch() -> None:
    """The distribution that a draft was trained on: build a sketch of it, score prompts against it."""


@sketch.command("build")
@click.option(
    "--data",
    "data_paths",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Training data, JSONL as SpecForge reads it: pre-tokenised, conversations or preformatted; repeatable.",
)
@click.option(
    "--production",
    "production_paths",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A sample of today's requests (records, JSONL): says what is boilerplate there, and how much is off.",
)
@click.option("--draft", "draft_path", required=True, type=click.Path(path_type=Path), help="The draft it belongs to.")
@click.option(
    "--target",
    "target_path",
    type=click.Path(path_type=Path),
    help="Folder of the target: its tokenizer reads text, its input embedding tells prompts apart. Not needed where "
    "the data has token ids and the draft the target's whole vocabulary.",
)
@click.option(
    "--epsilon",
    default=EPSILON,
    show_default=True,
    type=click.FloatRange(0.0, 0.5, min_open=True),
    help="Share of prompts like the training data that may be called off.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File to write.")
def build_sketch(
    data_paths: tuple[Path, ...],
    production_paths: tuple[Path, ...],
    draft_path: Path,
    target_path: Path | None,
    epsilon: float,
    out: Path,
) -> None:
    """Learn what the draft's training prompts look like, and calibrate on prompts held out from that."""
    try:
        from driftwatch.shadow.config import read_config
        from driftwatch.shadow.corpus import Corpus, input_embedding
        from driftwatch.shadow.draft import hash_weights
        from driftwatch.shadow.open import folder_of, is_named
        from driftwatch.shadow.tokenizer import Retokeniser
    except ModuleNotFoundError as error:
        raise needs_shadow(error) from None
    if is_named(str(draft_path)):
        raise SketchError(f"draft {draft_path} was trained on nothing, so nothing is off its distribution")
    read_config(folder_of(draft_path))  # says so if this is no draft
    fingerprint = hash_weights(folder_of(draft_path))
    embedding = input_embedding(draft_path, target_path)
    corpus = Corpus(Retokeniser(target_path) if target_path else None)
    made = build(
        corpus.rows(data_paths),
        embedding,
        draft=fingerprint,
        epsilon=epsilon,
        production=corpus.rows(production_paths) if production_paths else None,
    )
    size = file.write(out, made)
    click.echo(
        f"{out}: {size / 1e6:.1f} MB, from {made.rows} prompts, {len(made.calibration)} of them held out; "
        f"draft {made.draft[:12]}"
    )
    click.echo(f"prompts like these are off in {_share(made.off_rate)} of cases (epsilon {epsilon:g})")
    if made.production_off is not None:
        click.echo(_off(made.production_off, epsilon))
    _skipped(corpus.skipped)


@sketch.command("score")
@files
@click.option("--sketch", "sketch_path", required=True, type=click.Path(path_type=Path), help="The sketch.")
@click.option(
    "--target", "target_path", type=click.Path(path_type=Path), help="Folder of the target: its tokenizer reads text."
)
@click.option(
    "--results",
    "results_path",
    type=click.Path(path_type=Path),
    help="Lines of `driftwatch replay --per-request` on the same records: acceptance by p-value.",
)
@click.option("--gamma", default=3, show_default=True, help="Proposal length to read from the results.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def score_records(
    files: tuple[Path, ...],
    sketch_path: Path,
    target_path: Path | None,
    results_path: Path | None,
    gamma: int,
    as_json: bool,
) -> None:
    """Say of each request in FILES (records, JSONL) whether its prompt is on or off the training distribution.

    p is the share of held-out training prompts that are at least as strange. Output novelty, the share of the output's
    n-grams that the training data did not have, is told beside it and decides nothing.
    """
    loaded = file.read(sketch_path)
    skipped: Counter[str] = Counter()
    found = [one for chunk in _chunks(_tokens(files, target_path, skipped)) for one in _score(loaded, chunk)]
    if not found:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in skipped.items())
        raise SketchError(f"no request could be scored: {reasons or 'the files hold no records'}")
    acceptance = None if results_path is None else _acceptance(found, results_path, gamma)
    off = Share.of(sum(one.verdict.side == "off" for one in found), len(found))
    if as_json:
        report = _report(loaded, found, off) | {"skipped": dict(skipped)}
        if acceptance is not None:
            report["acceptance"] = {"gamma": gamma} | acceptance.as_dict()
        click.echo(json.dumps(report))
        return
    for one in found:
        views = one.verdict.views
        novelty = "boilerplate" if views is None else f"novelty {views.novelty:.3f}"
        click.echo(f"{one.id}\t{one.verdict.side}\tp {one.verdict.p:.4f}\t{novelty}\toutput novelty {one.output:.3f}")
    click.echo(_off(off, loaded.epsilon))
    _skipped(skipped)
    if acceptance is not None:
        _print(acceptance, gamma)


@dataclass(frozen=True)
class _Scored:
    id: str
    verdict: Verdict
    output: float


_Ids = tuple[str, list[int], list[int]]


def _tokens(paths: Iterable[Path], target: Path | None, skipped: Counter[str]) -> Iterator[_Ids]:
    """Id, prompt and output of each record; what has no token ids is read by the target's tokenizer, where given."""
    tokenise = None
    if target is not None:
        try:
            from driftwatch.shadow.tokenizer import Retokeniser
        except ModuleNotFoundError as error:
            raise needs_shadow(error) from None
        tokenise = Retokeniser(target).tokens
    for record in read_records(paths):
        if record.prompt_token_ids and record.output_token_ids:
            yield record.id, record.prompt_token_ids, record.output_token_ids
        elif record.is_empty:
            skipped["too_short"] += 1
        elif tokenise is None:
            skipped["no_tokenizer"] += 1
        elif (tokens := tokenise(_text(record))) is None:
            skipped["template_refused"] += 1
        else:
            yield record.id, list(tokens.prompt), list(tokens.output)


def _text(record: Record) -> dict[str, Any]:
    return record.model_dump(include={"messages", "prompt", "output"}, exclude_none=True)


def _chunks(items: Iterator[_Ids]) -> Iterator[list[_Ids]]:
    while chunk := list(islice(items, CHUNK)):
        yield chunk


def _score(loaded: Sketch, chunk: list[_Ids]) -> Iterator[_Scored]:
    verdicts = loaded.score([prompt for _, prompt, _ in chunk])
    outputs = loaded.output_novelty([output for *_, output in chunk])
    for (id, *_), verdict, output in zip(chunk, verdicts, outputs, strict=True):
        yield _Scored(id, verdict, output)


def _acceptance(found: list[_Scored], results: Path, gamma: int) -> Usefulness:
    p = {one.id: one.verdict.p for one in found}
    lines = [line for line in read_requests(results, gamma) if str(line.id) in p]
    if not lines:
        raise SketchError(f"{results}: no line has the id of a record that was scored; give results of the same file")
    return usefulness((p[str(line.id)], line.accepted, line.tested) for line in lines)


def _report(loaded: Sketch, found: list[_Scored], off: Share) -> dict[str, Any]:
    records = []
    for one in found:
        views = one.verdict.views
        seen = {"distance": None, "novelty": None} if views is None else views._asdict()
        p = {"id": one.id, "p": one.verdict.p, "split": one.verdict.side}
        records.append(p | seen | {"output_novelty": one.output})
    return {
        "requests": len(found),
        "sketch": {
            "draft": loaded.draft,
            "epsilon": loaded.epsilon,
            "rows": loaded.rows,
            "calibration": len(loaded.calibration),
            "off_rate": asdict(loaded.off_rate),
        },
        "off": asdict(off),
        "purity": asdict(purity(off, loaded.epsilon)),
        "records": records,
    }


def _print(found: Usefulness, gamma: int) -> None:
    table = Table("p", "requests", "hit rate", "95% interval", box=box.SIMPLE)
    for tenth in found.tenths:
        rate = tenth.hit_rate
        value = "not enough data" if rate.value is None else f"{rate.value:.3f}"
        limits = "not enough data" if rate.lower is None else f"{rate.lower:.3f} to {rate.upper:.3f}"
        table.add_row(f"{tenth.lower:.1f} to {tenth.upper:.1f}", str(rate.requests), value, limits)
    click.echo(f"hit rate at gamma {gamma} by p:")
    Console().print(table)
    if found.difference is None:
        click.echo("not enough data: two groups of tenths with 10 requests each are needed")
        return
    difference, lower, upper = found.difference
    meaning = {
        "informative": "the sketch tells where the draft is accepted less",
        "uninformative": "the sketch is uninformative here: do not act on its split",
    }
    click.echo(f"highest less lowest: {difference:+.3f} ({lower:+.3f} to {upper:+.3f}); {meaning[found.answer]}")


def _off(off: Share, epsilon: float) -> str:
    pure = purity(off, epsilon)
    return (
        f"off: {_share(off)} of {off.requests} requests; at least {pure.value:.0%} of these are off indeed "
        f"({pure.lower:.0%} to {pure.upper:.0%}), the rest is chance"
    )


def _share(share: Share) -> str:
    return f"{share.value:.1%} ({share.lower:.1%} to {share.upper:.1%})"


def _skipped(reasons: Counter[str]) -> None:
    for reason, count in reasons.items():
        click.echo(f"skipped: {count} ({reason})")
