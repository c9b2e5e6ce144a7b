"""Everything that watches one deployment, from the fields of Record and Replay alone, and the cause it comes to.

Cells by tenant and split with the product's own rules; beside them the share off the training distribution, the gap
between engine and replay, their agreement by window, the target's surprise, slower requests, and batches. The latter
learn their normal from the first requests, as the cells do. A request feeds one cell and six monitors, so each test
takes seven times the threshold wanted for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from driftwatch.drift.attribution import Findings, Verdict, attribute, parts_changed
from driftwatch.drift.baseline import Baseline
from driftwatch.drift.cell import CellState, DriftClosed, DriftOpened, Rules
from driftwatch.drift.latch import Closed, Latch, Opened
from driftwatch.drift.monitors import (
    Counts,
    Monitor,
    agreement_below,
    gap_counts,
    live_below_shadow,
    share_above,
    share_counts,
)
from driftwatch.drift.units import HALF_WEIGHT, Unit
from tests.benchmarks.scenarios.traffic import GAMMA, Request

CALIBRATION = 500
"""Requests from which the cuts of surprise and batch (their 90% quantiles) are taken."""

SETTLE = 300
"""Requests after an event before its cause is read, so that slower tests can speak."""

HORIZON = 1200
"""Requests after an event in which ``unknown`` may still become a cause."""

COST = 0.1
"""A draft pass, in plain decode steps."""


def cost_of_window(batch: float) -> float:
    """gamma c + v: verification stays one step until the batch fills the machine."""
    return GAMMA * COST + max(1.0, batch * (GAMMA + 1) / 64.0)


@dataclass
class Event:
    kind: str
    index: int
    start_index: int
    closed_index: int | None = None
    verdict: Verdict | None = None


@dataclass
class _Watched:
    """One monitor, from learning to watching."""

    baseline: Baseline
    make: Callable[[Baseline, float], Monitor | None]
    monitor: Monitor | None = None

    def take(self, index: int, counts: Counts, threshold: float) -> Opened | Closed | None:
        unit = Unit(index, 0.0, 0.0, 1, *counts)
        if self.monitor is not None:
            return self.monitor.update(unit, index)
        if self.baseline.add(unit):
            self.monitor = self.make(self.baseline, threshold)
        return None


def _watched() -> dict[str, _Watched]:
    def shares() -> Baseline:
        return Baseline(0.05, 500, 0.0, half_weight=0.0)

    return {
        "off_share": _Watched(shares(), share_above),
        "gap": _Watched(Baseline(0.015, 500, 0.0, half_weight=HALF_WEIGHT), live_below_shadow),
        "agreement": _Watched(Baseline(0.03, 500, 0.0, half_weight=HALF_WEIGHT), agreement_below),
        "surprise": _Watched(shares(), share_above),
        "slower": _Watched(shares(), share_above),
        "load": _Watched(shares(), share_above),
    }


@dataclass
class Panel:
    rules: Rules = field(default_factory=lambda: Rules(threshold=700_000.0, min_requests=300, min_hours=0.0))
    live: bool = True
    cells: dict[tuple[str, bool], CellState] = field(default_factory=dict)
    monitors: dict[str, _Watched] = field(default_factory=_watched)
    events: list[Event] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)
    cuts: tuple[float, float] | None = None
    facts: dict[str, str] | None = None
    changed: set[str] = field(default_factory=set)

    def take(self, request: Request) -> None:
        self._facts(request)
        self._cell(request)
        for name, counts in self._counts(request).items():
            change = self.monitors[name].take(request.at, counts, self.rules.threshold)
            if isinstance(change, Opened):
                self.events.append(Event(name, change.index, change.start_index))
            elif change is not None:
                self._close(name, change.index)
        self._judge(request.at)

    def _facts(self, request: Request) -> None:
        if self.facts is None:
            self.facts = request.facts
        elif request.facts != self.facts:
            self.changed = {key for key, value in request.facts.items() if self.facts.get(key) != value}

    def _cell(self, request: Request) -> None:
        key = (request.tenant, request.flagged)
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = CellState.start(self.rules)
        name = f"cell {request.tenant} {'off' if request.flagged else 'on'}"
        found = cell.observe(request.time_s, request.at, request.session, request.accepted, request.tested)
        for change in found:
            if isinstance(change, DriftOpened):
                self.events.append(Event(name, change.index, change.start_index))
            elif isinstance(change, DriftClosed):
                self._close(name, change.index)

    def _close(self, kind: str, index: int) -> None:
        for event in self.events:
            if event.kind == kind and event.closed_index is None:
                event.closed_index = index

    def _counts(self, request: Request) -> dict[str, Counts]:
        found = {
            "off_share": share_counts(request.flagged),
            "slower": share_counts(request.windows * cost_of_window(request.batch) > request.tokens),
        }
        if self.live:
            live, shadow = (request.live_accepted, request.live_tested), (request.accepted, request.tested)
            found |= {"gap": gap_counts(live, shadow), "agreement": (request.agreeing, request.live_windows)}
        if self.cuts is None:
            self.surprises.append(request.surprise)
            self.batches.append(request.batch)
            if len(self.batches) == CALIBRATION:
                at = int(0.9 * CALIBRATION)
                self.cuts = sorted(self.surprises)[at], sorted(self.batches)[at]
            return found
        found["surprise"] = share_counts(request.surprise > self.cuts[0])
        found["load"] = share_counts(request.batch > self.cuts[1])
        return found

    def _judge(self, index: int) -> None:
        """Name the cause of the first open event once things have settled; keep trying while it is unknown."""
        for event in self.events[:1]:
            due = event.index + SETTLE <= index <= event.index + HORIZON and (index - event.index) % 50 == 0
            if due and (event.verdict is None or event.verdict.cause == "unknown"):
                event.verdict = attribute(self.findings())

    def findings(self) -> Findings:
        """True: an open event; False: watched, and nowhere near one; None: learning, or undecided."""
        off_up = self._state("off_share")
        # A rising off-share makes what is flagged purer, so that the off cells fall with no change within traffic.
        cells = [cell for (_, off), cell in self.cells.items() if not (off and off_up is not False)]
        states = [_said(cell.detector) for cell in cells]
        drop = True if True in states else (None if None in states and not any(x is False for x in states) else False)
        if drop is False and any(
            c.detector is not None and not c.detector.latched and _near(c.detector) for c in cells
        ):
            drop = None
        gaps = [self._state("gap"), self._state("agreement")]
        gap = True if True in gaps else (False if gaps == [False, False] else None)
        return Findings(
            cell_drop=drop,
            off_share_up=off_up,
            live_below_shadow=gap if self.live else None,
            changed=parts_changed(self.changed),
            surprise_up=self._state("surprise"),
            value_down=self._state("slower"),
            load_up=self._state("load"),
        )

    def _state(self, name: str) -> bool | None:
        return _said(self.monitors[name].monitor)


def _near(latch: Latch) -> bool:
    return latch.evidence_ratio > 0.5


def _said(latch: Latch | None) -> bool | None:
    if latch is None:
        return None
    return True if latch.latched else (None if _near(latch) else False)
