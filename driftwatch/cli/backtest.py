"""``driftwatch backtest``: when would the alarms have fired on this history?"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from driftwatch.drift.cell import CellState, DriftClosed, DriftOpened, Rules, Transition
from driftwatch.errors import DriftwatchError
from driftwatch.records import explain, read_lines, segment_id

MAX_AGE_LINES = 2000
"""A session longer than this is judged in parts where lines have no times."""

Count = Annotated[float, Field(ge=0, le=1e12)]
"""More is no count, and sums and squares of it would overflow."""


class Counts(BaseModel):
    """What a draft did on one request at one gamma; only accepted and rejected are tested, the rest is checked."""

    accepted: Count
    rejected: Count
    steps: Count | None = None
    windows: Count | None = None
    drafted: Count | None = None


class Line(BaseModel):
    """One request: its counts by gamma (``replay --per-request``), or flat, and then of one gamma unnamed."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)

    id: str | int
    ts: AwareDatetime | None = None
    session: str | None = None
    retokenised: bool = False
    labels: dict[str, str] = {}
    output_tokens: Count | None = None
    gamma: dict[str, Counts] | None = None


@dataclass(frozen=True)
class Request:
    """What the detectors see of a line, and where it stands in the file (0-based)."""

    index: int
    id: str | int
    segment: str
    session: str | None
    time_s: float | None
    accepted: float
    tested: float
    retokenised: bool = False
    """Judged on ids that were made from text: never pooled with exact ones."""


@click.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--gamma", default=3, show_default=True, help="Proposal length to read, where lines hold several.")
@click.option(
    "--baseline",
    default="auto:500",
    show_default=True,
    metavar="VALUE|auto:N",
    help="A hit rate (accepted / tested) that counts as normal, or learn it from the first N requests of each segment.",
)
@click.option("--tolerance", default=0.03, show_default=True, help="Fall in hit rate, absolute, that is no drift.")
@click.option("--arl", default=100_000.0, show_default=True, help="Requests between false alarms, at the least.")
@click.option("--by", multiple=True, metavar="LABEL", help="A segment for each value of a label; repeatable.")
def backtest(results: Path, gamma: int, baseline: str, tolerance: float, arl: float, by: tuple[str, ...]) -> None:
    """Run the detectors over RESULTS, lines of `driftwatch replay --per-request` or flat ones, and print their alarms.

    Prints JSON: the alarms in order, with `index` and `start_index` as 0-based lines of RESULTS (where the alarm came,
    and where the fall most likely began) and `evidence` as the natural logarithm of the e-detector's value; and what
    became of each segment. With auto:N the baseline freezes after N requests even if its interval is still wide; the
    detector builds on the interval's lower limit, so that a wide one costs power and not false alarms. Lines are taken
    in order of `ts` where every line has one; where not, in the order of the file. A session counts as one unit.
    Requests that were tokenised from text have a report of their own, under `retokenised`.
    """
    rules = _rules(baseline, tolerance, arl)
    click.echo(json.dumps(_report(rules, read_requests(results, gamma, by))))


def read_requests(results: Path, gamma: int, by: tuple[str, ...] = ()) -> list[Request]:
    """The lines of `replay --per-request`. Raises DriftwatchError, or RecordError, naming file and line."""
    lines = read_lines(results)
    requests = [_request(number - 1, line, f"{results}:{number}", gamma, by) for number, line in lines]
    if not requests:
        raise DriftwatchError(f"{results}: holds no requests; give lines of `driftwatch replay --per-request`")
    return requests


def _rules(baseline: str, tolerance: float, arl: float) -> Rules:
    """The flags as rules of a cell. Raises DriftwatchError for values without meaning."""
    if not 0.0 < tolerance < 1.0:
        raise DriftwatchError(f"--tolerance {tolerance}: must lie between 0 and 1, such as 0.03")
    if not 1.0 < arl < float("inf"):
        raise DriftwatchError(f"--arl {arl}: must be a number of requests above 1, such as 100000")
    kind, _, count = baseline.partition(":")
    if kind == "auto":
        if not count.isdecimal() or int(count) < 2:
            raise DriftwatchError(f"--baseline {baseline}: N in auto:N must be a whole number of at least 2")
        return Rules(tolerance, arl, min_requests=int(count), min_hours=0.0, narrow=False)
    try:
        value = float(baseline)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise DriftwatchError(f"--baseline {baseline}: must be a hit rate between 0 and 1, or auto:N")
    return Rules(tolerance, arl, given=value)


def _request(number: int, data: bytes, where: str, gamma: int, by: tuple[str, ...]) -> Request:
    """Raises DriftwatchError naming file, line and what is wrong."""
    try:
        line = Line.model_validate_json(data)
        counts = Counts.model_validate_json(data) if line.gamma is None else line.gamma.get(str(gamma))
    except ValidationError as error:
        raise DriftwatchError(f"{where}: {explain(error)}") from None
    if counts is None:
        held = ", ".join(line.gamma or {}) or "none"
        raise DriftwatchError(f"{where}: no counts for gamma {gamma}; the line holds gamma {held}: choose with --gamma")
    if counts.drafted is not None and counts.accepted > counts.drafted * (1 + 1e-6):
        raise DriftwatchError(f"{where}: accepted {counts.accepted:g} is more than drafted {counts.drafted:g}")
    return Request(
        number,
        line.id,
        segment_id({label: line.labels.get(label, "none") for label in by}),
        line.session,
        None if line.ts is None else line.ts.timestamp(),
        counts.accepted,
        counts.accepted + counts.rejected,
        line.retokenised,
    )


def _report(rules: Rules, requests: list[Request]) -> dict[str, Any]:
    """Of exact requests, with those made from text as a report of its own; of these alone where there are no others."""
    exact = [one for one in requests if not one.retokenised]
    apart = [one for one in requests if one.retokenised]
    report = _History(rules).run(exact or apart)
    if apart:
        report["retokenised"] = _History(rules).run(apart)
    return report


@dataclass
class _History:
    """The cells of a history while it passes."""

    rules: Rules
    cells: dict[str, CellState] = field(default_factory=dict)
    totals: dict[str, list[float]] = field(default_factory=dict)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    closed: Counter[str] = field(default_factory=Counter)

    def run(self, requests: list[Request]) -> dict[str, Any]:
        timed = all(one.time_s is not None for one in requests)
        if timed:
            requests = sorted(requests, key=lambda one: one.time_s or 0.0)
        # Without times nobody knows how long a session was silent; it is closed by its last line instead.
        last = {} if timed else {(one.segment, one.session): one.index for one in requests}
        for one in requests:
            time_s = one.time_s if timed and one.time_s is not None else float(one.index)
            cell = self.cells.get(one.segment)
            if cell is None:
                cell = self.cells[one.segment] = CellState.start(self._rules(timed, len(requests)))
                self.totals[one.segment] = [0, 0.0, 0.0]
            totals = self.totals[one.segment]
            totals[0], totals[1], totals[2] = totals[0] + 1, totals[1] + one.accepted, totals[2] + one.tested
            found = cell.observe(time_s, one.index, one.session, one.accepted, one.tested)
            if one.session is not None and last.get((one.segment, one.session)) == one.index:
                found += cell.close(one.session, time_s, one.index)
            self._note(one, found)
        ends = {one.segment: one for one in requests}
        for segment, cell in self.cells.items():
            one = ends[segment]
            self._note(one, cell.finish(one.time_s if timed and one.time_s is not None else one.index, one.index))
        return {"alarms": self.alarms, "segments": {name: self._segment(name) for name in sorted(self.cells)}}

    def _rules(self, timed: bool, lines: int) -> Rules:
        if timed:
            return self.rules
        return Rules(**{**vars(self.rules), "idle_s": lines + 1.0, "max_age_s": float(MAX_AGE_LINES)})

    def _note(self, one: Request, found: list[Transition]) -> None:
        """``one`` is the line at which the transitions became known."""
        for change in found:
            if isinstance(change, DriftOpened):
                facts = {"index": change.index, "id": one.id, "start_index": change.start_index}
                self.alarms.append({"segment": one.segment, **facts, "evidence": change.evidence})
            elif isinstance(change, DriftClosed):
                self.closed[one.segment] += 1

    def _segment(self, name: str) -> dict[str, Any]:
        cell = self.cells[name]
        requests, accepted, tested = self.totals[name]
        baseline, detector = cell.baseline, cell.detector
        estimate = baseline.estimate
        return {
            "requests": int(requests),
            "hit_rate": accepted / tested if tested else None,
            "state": "blind" if detector is not None and detector.blind else cell.state,
            "baseline": {
                "state": baseline.state,
                "requests": estimate.requests,
                "value": estimate.value,
                "lower": estimate.lower,
                "upper": estimate.upper,
                "missing": baseline.progress.missing if baseline.state == "learning" else [],
            },
            "floor": None if detector is None else detector.floor,
            "evidence_ratio": cell.evidence_ratio,
            "alarms": sum(1 for alarm in self.alarms if alarm["segment"] == name),
            "recoveries": self.closed[name],
        }
