"""What is known beside an event, over its segment and over its deployment: the findings that name its cause.

Faults of target, draft and engine are the whole deployment's, so where a segment's own test has not said anything yet,
those of the other segments speak. The share off the training distribution is the segment's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control import changes, load
from driftwatch.control.cells import model_of
from driftwatch.control.load import Burden
from driftwatch.drift.attribution import Findings, Part
from driftwatch.drift.cell import CellState
from driftwatch.drift.watch import Kind, Watch
from driftwatch.settings import Model, Settings
from driftwatch.store import canaries
from driftwatch.store.deployments import FINGERPRINT, cause_of
from driftwatch.store.schema import Cell, Event, Monitor

Said = Literal["yes", "no", "near", "learning"]
"""``near``: undecided, since there is much evidence, and not enough."""

Monitors = dict[tuple[int | None, str], list[tuple[Monitor, Watch]]]
"""Tests of a draft in all segments of a deployment."""

TELLING: tuple[Kind, ...] = ("surprise", "live_gap", "agreement")
"""Tests that could say that training is not the answer."""

NEAR = 0.5
"""Share of the alarm's log evidence from which on a test is undecided."""

ROLL_OUT_S = 3600.0
"""A change of the deployment is one at the start of an event that began within this time after it."""


@dataclass(frozen=True)
class Beside:
    """Everything that is read once for an event."""

    event: Event
    cells: Sequence[tuple[Cell, CellState]]
    """Of its segment and draft, the newest of each split. Those of the replay where there are any: the engine's own has
    no split, so that its fall need not be one within cells."""
    monitors: Sequence[tuple[Monitor, Watch]]
    """Of its draft, in all segments of the deployment."""
    latched: frozenset[int]
    """Cells with an open drift event."""
    canary: bool | None
    """Whether the canary prompts are answered otherwise."""
    changed: frozenset[Part] | None
    burden: Burden

    @classmethod
    def of(cls, session: Session, settings: Settings, event: Event, known: Monitors) -> Beside:
        """Read what is beside an event; ``known`` keeps the tests of a draft, which its other events share."""
        key = {"deployment_id": event.deployment_id, "draft": event.draft}
        cells = select(Cell).filter_by(**key, segment=event.segment).order_by(Cell.updated_at, Cell.id)
        mine = session.scalars(cells).all()
        channel = "shadow" if any(cell.channel == "shadow" for cell in mine) else "live"
        newest = {cell.split: cell for cell in mine if cell.channel == channel}
        ids = [cell.id for cell in newest.values()]
        open_now = (Event.kind == "drift", Event.closed_at.is_(None), Event.cell_id.in_(ids))
        latched = session.scalars(select(Event.cell_id).where(*open_now))
        whose = event.deployment_id, event.draft
        model = Model() if event.deployment_id is None else model_of(session, settings, event.deployment_id)
        if whose not in known:
            rows = session.scalars(select(Monitor).filter_by(**key).order_by(Monitor.updated_at, Monitor.id))
            known[whose] = [(row, Watch.from_json(row.state)) for row in rows]
        return cls(
            event,
            [(cell, CellState.from_json(cell.state)) for cell in newest.values()],
            known[whose],
            frozenset(id for id in latched if id is not None),
            None if event.deployment_id is None else canaries.changed(session, event.deployment_id),
            _changed(session, event),
            load.behind(session, event, list(newest.values()), model),
        )

    @property
    def watching(self) -> bool:
        """Whether another test is past learning that could say that training is not the answer."""
        tests = [watch for _, watch in self.monitors if watch.terms.kind in TELLING]
        return any(watch.monitor is not None for watch in tests) or self.canary is not None

    def findings(self) -> Findings:
        off_share = self._own("off_share")
        surprise = self._anywhere("surprise")
        if self.canary is not None:
            surprise.append("yes" if self.canary else "no")
        return Findings(
            cell_drop=_any(self._cells(_any(off_share))),
            source="live" if all(cell.channel == "live" for cell, _ in self.cells) else "shadow",
            off_share_up=_any(off_share),
            live_below_shadow=_any(self._anywhere("live_gap") + self._anywhere("agreement")),
            changed=self.changed,
            surprise_up=_any(surprise),
            value_down=_any(self._own("below_break_even") + self._own("slower")),
            load_up=self.burden.load_up,
            below_cost_at_one=self.burden.below_cost_at_one,
            never_paid=self._never_paid(),
        )

    def _never_paid(self) -> bool:
        """Whether it lies below break-even since before what is normal was learnt."""
        if self.event.kind != "below_break_even":
            return False
        start = self.event.details.get("start_served_at")
        learnt = [state.baseline.last_s for _, state in self.cells if state.baseline.frozen is not None]
        return start is not None and (not learnt or any(end is not None and start <= end for end in learnt))

    def _cells(self, off_share: bool | None) -> Iterable[Said]:
        """A cell ``off`` counts only while the off-share stands still: what is flagged then gets purer, and falls."""
        for cell, state in self.cells:
            if cell.split != "off" or off_share is False:
                blind = state.detector is None or state.detector.blind
                yield _said(cell.id in self.latched, blind, state.evidence_ratio)

    def _own(self, kind: Kind) -> list[Said]:
        return [_of(watch) for row, watch in self._tests(kind) if row.segment == self.event.segment]

    def _anywhere(self, kind: Kind) -> list[Said]:
        """What the segment's own test says; where it is silent, or another one alarmed, what all of them say."""
        own, all_of_them = self._own(kind), [_of(watch) for _, watch in self._tests(kind)]
        if "yes" in all_of_them or set(own) <= {"learning"}:
            return all_of_them
        return [*own, "near"] if "near" in all_of_them else own

    def _tests(self, kind: Kind) -> list[tuple[Monitor, Watch]]:
        """Tests of a kind, of the draft's newest weights alone."""
        found = [(row, watch) for row, watch in self.monitors if watch.terms.kind == kind]
        newest = found[-1][0].fingerprint if found else ""
        return [(row, watch) for row, watch in found if row.fingerprint == newest]


def _of(watch: Watch) -> Said:
    blind = watch.monitor is None or watch.monitor.blind
    return _said(watch.state == "drifting", blind, watch.evidence_ratio)


def _said(latched: bool, blind: bool, evidence_ratio: float) -> Said:
    if latched:
        return "yes"
    if blind:
        return "learning"
    return "near" if evidence_ratio > NEAR else "no"


def _any(said: Iterable[Said]) -> bool | None:
    """Whether one of them says so; None where none is past learning, or one is undecided."""
    known = set(said)
    if "yes" in known:
        return True
    return False if "no" in known and "near" not in known else None


def _changed(session: Session, event: Event) -> frozenset[Part] | None:
    """Parts whose facts changed when the event began: its deployment was new then. None where nobody can tell."""
    if event.deployment_id is None:
        return None
    mine = select(Event).where(Event.kind == changes.KIND, Event.deployment_id == event.deployment_id)
    change = session.scalars(mine.order_by(Event.opened_at.desc())).first()
    if change is None:
        return frozenset()
    start = event.details.get("start_served_at")
    if start is None or start < change.opened_at - ROLL_OUT_S:  # served before its deployment was: not by this clock
        start = event.opened_at
    if start > change.opened_at + ROLL_OUT_S:
        return frozenset()
    facts = [fact for fact in change.details["changed"] if fact != FINGERPRINT] or [FINGERPRINT]
    parts = {cause_of({fact: None}) for fact in facts}
    return None if "unknown" in parts else frozenset(cast("set[Part]", parts))
