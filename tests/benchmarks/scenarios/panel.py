"""One deployment after another under watch, wired as control wires it, from the fields of Record and Replay alone.

Each request feeds a cell of the replay (tenant and split), one of the engine's figures, and the tests beside them, a
set for each tenant. Cells, tests and the reading of causes are the product's own (``CellState``, ``Watch``, ``Beside``,
``attribute``), and so is what follows from them: new facts start new cells, whose normal is compared with the one
before; an event that another one explains is dropped (``causes.review``); a named cause is left for another only.
Tests of the tail are left out: more than 1 % of this traffic is made slower on any day.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from driftwatch.control import causes
from driftwatch.control.beside import Beside
from driftwatch.control.conditions import Conditions, Served
from driftwatch.control.load import Burden
from driftwatch.drift.attribution import Part, attribute, parts_changed
from driftwatch.drift.cell import BaselineFrozen, CellState, DriftClosed, DriftOpened, Rules
from driftwatch.drift.comparison import compare
from driftwatch.drift.latch import Opened
from driftwatch.drift.monitors import Counts, gap_counts, length_counts, share_counts
from driftwatch.drift.watch import Kind, Terms, Watch
from driftwatch.store import schema
from tests.benchmarks.scenarios.traffic import GAMMA, Request

COST = 0.1
"""A draft pass, in plain decode steps."""
TESTS: tuple[Kind, ...] = ("off_share", "surprise", "live_gap", "agreement", "below_break_even", "slower")
ALL_TESTS = 2 + len(TESTS)
"""That a request feeds: its two cells as well."""
RULES = Rules(threshold=ALL_TESTS * 100_000.0, min_requests=300, min_hours=0.0)
LOOK = 25
"""Requests between two looks at the causes of open events; control looks at each round of folding."""
HORIZON = 5000
"""Requests after an event in which its cause is still followed."""
CHANGE_KNOWN = 500
"""Requests of a new deployment after which what began is no longer told as its change: the product's hour."""
EVENTS: Mapping[str, str] = {"agreement": "live_gap"}

Name = tuple[str, str, str]
"""Tenant, split, channel."""


def cost_of_window(batch: float) -> float:
    """gamma c + v: verification stays one step until the batch fills the machine."""
    return GAMMA * COST + max(1.0, batch * (GAMMA + 1) / 64.0)


def terms_of(kind: Kind) -> Terms:
    level = cost_of_window(1.0) if kind == "below_break_even" else None
    return Terms(kind, 0.03, RULES.threshold, 500, 0.0, GAMMA, level)


@dataclass
class Event:
    """``cause`` is the one of ``causes.SETTLE`` requests of the tenant later, when training would be asked for."""

    kind: str
    tenant: str
    index: int
    start_index: int
    split: str = "none"
    channel: str = "shadow"
    cause: str | None = None
    action: str | None = None
    settled: str | None = None
    before: int = 0
    closed_index: int | None = None


@dataclass
class Deployment:
    """Cells and tests of one set of facts."""

    facts: dict[str, str]
    first: int
    changed: frozenset[Part]
    cells: dict[Name, CellState] = field(default_factory=dict)
    watches: dict[tuple[str, Kind], Watch] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    loads: dict[int, Conditions] = field(default_factory=dict)
    """By a thousand requests, of every fifth."""


@dataclass
class Panel:
    live_alone: bool = False
    """Nothing is replayed: the engine's figures are all there is."""
    deployments: list[Deployment] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def take(self, request: Request) -> None:
        if not self.deployments or self.deployments[-1].facts != request.facts:
            self._roll_out(request)
        now = self.deployments[-1]
        now.requests[request.tenant] = now.requests.get(request.tenant, 0) + 1
        if request.at % 5 == 0:
            now.loads.setdefault(request.at // 1000, Conditions()).add(Served(running=request.batch), 1.0)
        self._cell(request, "none", "live", (request.live_accepted, request.live_tested))
        if not self.live_alone:
            self._cell(request, ("off" if request.flagged else "on"), "shadow", (request.accepted, request.tested))
            for kind in TESTS:
                self._test(request, kind)
        fresh = any(event.action is None and event.closed_index is None for event in self.events)
        if fresh or (self.events and request.at % LOOK == 0):
            self._review(request)

    def _roll_out(self, request: Request) -> None:
        """New facts: cells and tests start anew, and what was open in the old ones is over."""
        old = self.deployments[-1].facts if self.deployments else request.facts
        changed = parts_changed(key for key, value in request.facts.items() if old.get(key) != value)
        self.deployments.append(Deployment(request.facts, request.at, changed))
        for event in self.events:
            if event.closed_index is None:
                event.closed_index = request.at

    def _cell(self, request: Request, split: str, channel: str, counts: Counts) -> None:
        name, cells = (request.tenant, split, channel), self.deployments[-1].cells
        cell = cells.get(name) or cells.setdefault(name, CellState.start(RULES))
        for change in cell.observe(request.time_s, request.at, request.session, *counts):
            if isinstance(change, DriftOpened):
                self._open(Event("drift", request.tenant, change.index, change.start_index, split, channel))
            elif isinstance(change, DriftClosed):
                self._close(change.index, [one for one in self.events if _of(one) == ("drift", *name)])
            elif isinstance(change, BaselineFrozen) and len(self.deployments) > 1:
                self._compare(name, cell, request)

    def _compare(self, name: Name, cell: CellState, request: Request) -> None:
        older = self.deployments[-2].cells.get(name)
        if older is None or older.baseline.frozen is None:
            return
        told = any(event.kind == "deployment_regressed" and event.tenant == name[0] for event in self.events)
        if not told and compare(older.baseline, cell.baseline, tolerance=RULES.tolerance).regressed:
            parts = self.deployments[-1].changed
            cause = next(iter(parts)) if len(parts) == 1 else "unknown"
            at = request.at
            self._open(Event("deployment_regressed", name[0], at, at, *name[1:], cause, "rollback", cause))

    def _test(self, request: Request, kind: Kind) -> None:
        watches = self.deployments[-1].watches
        key = request.tenant, kind
        watch = watches.get(key) or watches.setdefault(key, Watch.start(terms_of(kind)))
        counts = watch.counts(request.surprise) if kind == "surprise" else _counts(request, kind)
        for change in watch.observe(request.time_s, request.at, request.session, counts):
            told = EVENTS.get(kind, kind)
            mine = [one for one in self.events if (one.kind, one.tenant) == (told, request.tenant)]
            if not isinstance(change, Opened):
                beside = [watches[request.tenant, one] for one in TESTS if one != kind and EVENTS.get(one, one) == told]
                if all(one.state != "drifting" for one in beside):
                    self._close(change.index, mine)
            elif all(event.closed_index is not None for event in mine):
                self._open(Event(told, request.tenant, change.index, change.start_index))

    def _open(self, event: Event) -> None:
        event.before = self.deployments[-1].requests.get(event.tenant, 0)
        self.events.append(event)

    def _close(self, index: int, events: Iterable[Event]) -> None:
        for event in events:
            if event.closed_index is None:
                event.closed_index = index

    def _review(self, request: Request) -> None:
        for event in [one for one in self.events if one.closed_index is None and one.kind != "deployment_regressed"]:
            if event.action is not None and request.at > event.index + HORIZON:
                continue
            verdict = attribute(self._beside(event).findings())
            if event.action is None:
                if any(causes.is_told_by(_row(event), verdict.cause, _row(one)) for one in self._others(event)):
                    self.events.remove(event)
                    continue
                event.cause, event.action = verdict.cause, verdict.action
            elif verdict.cause != "unknown" or event.cause == "unknown":
                event.cause, event.action = verdict.cause, verdict.action
            requests = self.deployments[-1].requests.get(event.tenant, 0) - event.before
            if event.settled in (None, "unknown") and causes.is_settled(requests, event.cause or "", verdict.cause):
                event.settled = event.cause

    def _others(self, event: Event) -> list[Event]:
        return [one for one in self.events if one is not event and one.closed_index is None]

    def _beside(self, event: Event) -> Beside:
        now = self.deployments[-1]
        ids = {name: id for id, name in enumerate(now.cells)}
        cells = [
            (schema.Cell(id=ids[name], split=name[1], segment=name[0], channel=name[2]), cell)
            for name, cell in now.cells.items()
            if name[0] == event.tenant and name[2] == ("live" if self.live_alone else "shadow")
        ]
        tests = [
            (schema.Monitor(segment=tenant, kind=kind, fingerprint=""), watch)
            for (tenant, kind), watch in now.watches.items()
        ]
        open_now = [one for one in self.events if one.kind == "drift" and one.closed_index is None]
        latched = frozenset(ids[one.tenant, one.split, one.channel] for one in open_now)
        changed = now.changed if event.start_index < now.first + CHANGE_KNOWN else frozenset()
        return Beside(_row(event), cells, tests, latched, None, changed, self._burden(event))

    def _burden(self, event: Event) -> Burden:
        """As ``control.load`` tells it of the hours, here thousands of requests."""
        if event.kind not in ("below_break_even", "slower"):
            return Burden()
        before, since = Conditions(), Conditions()
        for thousand, one in self.deployments[-1].loads.items():
            if thousand < event.start_index // 1000:
                before += one
            else:
                since += one
        usual, late = before.running.quantile(0.5).upper, since.running.quantile(0.5).lower
        return Burden(load_up=None if usual is None or late is None else late > usual)


def _of(event: Event) -> tuple[str, str, str, str]:
    return event.kind, event.tenant, event.split, event.channel


def _row(event: Event) -> schema.Event:
    details = {"channel": event.channel, "start_served_at": None}
    return schema.Event(
        kind=event.kind, segment=event.tenant, split=event.split, draft="", cause=event.cause or "", details=details
    )


def _counts(request: Request, kind: Kind) -> Counts:
    window = cost_of_window(request.batch)
    if kind == "off_share":
        return share_counts(request.flagged)
    if kind == "live_gap":
        return gap_counts((request.live_accepted, request.live_tested), (request.accepted, request.tested))
    if kind == "agreement":
        return request.agreeing, request.live_windows
    if kind == "slower":
        return share_counts(request.windows * window > request.tokens)
    part, whole = length_counts(request.accepted, request.windows, GAMMA)
    return min(max(part - (window - cost_of_window(1.0)) * request.windows, 0.0), whole), whole
