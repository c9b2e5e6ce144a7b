"""What the demo shows at the end: for a person, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from sqlalchemy import func, select

from driftwatch.acceptance import DEFAULT_GAMMA, tally
from driftwatch.demo.receiver import Received
from driftwatch.demo.traffic import Request
from driftwatch.drift.sums import Sums
from driftwatch.store import replays
from driftwatch.store.connection import Store
from driftwatch.store.schema import Event, Replay, Retrain, Sample

GAMMA = 5
INCUMBENT = "incumbent"


@dataclass(frozen=True)
class Report:
    shift_index: int | None
    requests: int
    samples: int
    replays: int
    cells: list[dict[str, Any]]
    events: list[dict[str, Any]]
    webhooks: list[dict[str, Any]]
    exports: list[str]
    urls: dict[str, str]
    candidate: dict[str, Any] | None = None
    """What was trained, its verdict, and its own cells: on requests that it was not trained on."""

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def make(
    store: Store,
    sent: Sequence[Request],
    middle: int,
    shift: bool,
    hooks: Sequence[Received],
    urls: dict[str, str],
    retrain: dict[str, Any] | None,
) -> Report:
    """Read everything back from where driftwatch keeps it; ``retrain`` is one that is over, as its API tells it."""
    index = {request.id: request.index for request in sent}
    with store.read() as session:
        samples = session.scalar(select(func.count()).select_from(Sample)) or 0
        of_incumbent = select(func.count()).select_from(Replay).where(Replay.draft == INCUMBENT)
        judged = session.scalar(of_incumbent) or 0
        events = [
            {
                "kind": event.kind,
                "segment": event.segment,
                "index": index[event.request_id],
                "start_index": index.get(event.start_request_id or ""),
                "cause": event.cause,
            }
            for event in session.scalars(select(Event).order_by(Event.opened_at))
        ]
        exports = [row.data["uri"] for row in session.scalars(select(Retrain)) if row.data]
        everything = replays.all_judged(session)
        cells = _cells([one for one in everything if one.draft == INCUMBENT], index, middle)
    return Report(
        shift_index=middle if shift else None,
        requests=len(sent),
        samples=samples,
        replays=judged,
        cells=cells,
        events=events,
        webhooks=[{"type": hook.type, "verified": hook.verified} for hook in hooks],
        exports=exports,
        urls=urls,
        candidate=None if retrain is None else _candidate(retrain, everything, index, middle),
    )


def _candidate(
    retrain: dict[str, Any], judged: Sequence[replays.Judged], index: dict[str, int], middle: int
) -> dict[str, Any]:
    found = retrain["candidates"][-1]
    own = [one for one in judged if one.draft == found["id"]]
    return {
        "retrain": retrain["state"],
        "rows": retrain["data"]["rows"],
        "path": found["path"],
        "reason": retrain["reason"],
        "verdict": found["verdict"],
        "cells": _cells(own, index, middle),
    }


def _cells(judged: Sequence[replays.Judged], index: dict[str, int], middle: int) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str, str], Sums] = {}
    for one in judged:
        period = "before" if index[one.request_id] < middle else "after"
        key = (one.segment, one.split, period)
        request = Sums.request(tally(one.weights, DEFAULT_GAMMA))
        sums[key] = sums.get(key, Sums.zero(DEFAULT_GAMMA)) + request
    order = sorted(sums, key=lambda key: (key[0], key[1], key[2] == "after"))
    return [_cell(*key, sums[key]) for key in order]


def _cell(segment: str, split: str, period: str, sums: Sums) -> dict[str, Any]:
    figures = sums.tally.figures(GAMMA)
    hit = sums.interval("hit_rate", GAMMA)
    counts = {key: figures[key] for key in ("windows", "drafted", "accepted", "rejected", "acceptance_length")}
    return (
        {"segment": segment, "split": split, "period": period, "requests": sums.requests}
        | counts
        | {"hit_rate": hit.value, "lower": hit.lower, "upper": hit.upper}
    )


def show(report: Report, console: Console) -> None:
    """The short version, for a person."""
    columns = ("segment", "period", "draft", "requests", "acceptance length", "hit rate", "95% interval")
    table = Table(*columns, box=box.SIMPLE)
    rows = [(cell, INCUMBENT) for cell in report.cells]
    rows += [(cell, "candidate") for cell in (report.candidate or {"cells": []})["cells"]]
    for cell, draft in sorted(rows, key=lambda row: (row[0]["segment"], row[0]["period"] == "after")):
        table.add_row(
            cell["segment"],
            cell["period"],
            draft,
            str(cell["requests"]),
            _number(cell["acceptance_length"], 2),
            _number(cell["hit_rate"], 3),
            f"{_number(cell['lower'], 3)} to {_number(cell['upper'], 3)}",
        )
    console.print(table)
    where = "no shift" if report.shift_index is None else f"the shift came at request {report.shift_index}"
    console.print(f"{report.requests} requests sent, {report.samples} sampled, {report.replays} replayed; {where}")
    for event in report.events:
        console.print(
            f"alarm: {event['kind']} in {event['segment']} at request {event['index']}, "
            f"which seems to have begun at request {event['start_index']}"
        )
    if not report.events:
        console.print("no alarm")
    for hook in report.webhooks:
        console.print(f"webhook: {hook['type']}, signature {'verified' if hook['verified'] else 'NOT verified'}")
    for uri in report.exports:
        console.print(f"training data: {uri}", soft_wrap=True)
    if report.candidate is not None:
        _show_candidate(report.candidate, console)
    for name, url in report.urls.items():
        console.print(f"{name}: {url}", soft_wrap=True)


def _show_candidate(candidate: dict[str, Any], console: Console) -> None:
    console.print(f"candidate, trained on {candidate['rows']} requests: {candidate['path']}", soft_wrap=True)
    console.print(f"{candidate['retrain']}: {candidate['reason']}; both drafts on the same requests:")
    for row in candidate["verdict"]["table"]:
        figures = [_number(row[name], 3) for name in ("incumbent", "candidate", "difference", "lower", "upper")]
        console.print(
            "  {}: hit rate {} and {}, difference {} ({} to {}), {} requests".format(
                row["segment"], *figures, row["requests"]
            )
        )


def _number(value: float | None, digits: int) -> str:
    return "not enough data" if value is None else f"{value:.{digits}f}"
