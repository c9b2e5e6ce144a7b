"""The tests beside the hit rate's, in the store: requests in, events out, state kept in the same transaction.

One row a test, draft and segment of a deployment, over all splits. What a test is, and when it alarms, is
:mod:`driftwatch.drift.watch`'s business.

None is over all segments. They are sampled at rates of their own, so the mix of what is judged is not that of the
traffic, and moves with each budget: a test that takes requests as they come would alarm on budgets. Weighted by n / k a
request has no bound, on which the promise rests. So roll-ups are told (``watched.off_share``, the estimated counters,
``mix``), and not tested.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.control import events
from driftwatch.control.events import Alarm
from driftwatch.control.observed import Observed
from driftwatch.control.terms import figure, terms_of
from driftwatch.drift.interval import Estimate
from driftwatch.drift.latch import Closed, Opened
from driftwatch.drift.watch import KINDS, Kind, Terms, Watch
from driftwatch.settings import Model, Settings
from driftwatch.store.schema import Cell, Deployment, Event, Monitor

log = logging.getLogger(__name__)

DEFINITIONS: Mapping[Kind, str] = {
    "off_share": "share of requests off the draft's training distribution",
    "surprise": "share of requests whose served tokens surprise the target more than nine in ten did at first",
    "below_break_even": "acceptance length (bonus included), less what a batch above one adds to break-even; requests "
    "weighted by windows / (windows + 64)",
    "slower": "share of requests that take longer with speculation than without",
    "tail_worse": "share of requests that take longer with speculation than without: above 1 % the p99 is slower",
    "hit_rate_above": "accepted / tested proposals, weighted mean over requests",
    "live_gap": "the engine's hit rate less the replay's, weighted mean over requests",
    "agreement": "share of windows in which engine and replay accept as many proposals, weighted mean over requests",
}

EVENTS: Mapping[Kind, str] = {"agreement": "live_gap"}
"""Kinds of event by test, where they differ: two tests that look for one fault open one event."""


class MonitorKey(NamedTuple):
    deployment_id: int
    draft: str
    fingerprint: str
    segment: str


@dataclass
class MonitorUpdate:
    """A test, locked, under the settings of today."""

    session: Session
    settings: Settings
    deployment: Deployment
    model: Model
    row: Monitor
    watch: Watch
    now: float

    @classmethod
    def load(
        cls, session: Session, settings: Settings, key: MonitorKey, kind: Kind, channel: str, now: float
    ) -> MonitorUpdate:
        """The test of a key, made at its first request."""
        where = key._asdict() | {"kind": kind}
        row = session.scalars(select(Monitor).filter_by(**where).with_for_update()).first()
        if row is not None:
            return cls.of(session, settings, row, now)
        deployment = session.get_one(Deployment, key.deployment_id)
        model = settings.model_for(deployment.model) or Model()
        watch = Watch.start(terms_of(settings, model, key.draft, kind))
        row = Monitor(**where, channel=channel, state=watch.to_json(), updated_at=now)
        session.add(row)
        update = cls(session, settings, deployment, model, row, watch, now)
        update._supersede()
        return update

    @classmethod
    def of(cls, session: Session, settings: Settings, row: Monitor, now: float) -> MonitorUpdate:
        deployment = session.get_one(Deployment, row.deployment_id)
        model = settings.model_for(deployment.model) or Model()
        watch = Watch.from_json(row.state)
        update = cls(session, settings, deployment, model, row, watch, now)
        update._follow(terms_of(settings, model, row.draft, watch.terms.kind))
        return update

    @classmethod
    def retire(cls, session: Session, settings: Settings, row: Monitor, now: float) -> None:
        """Forget a test that the settings no longer ask for; what it had opened can no longer be judged."""
        deployment = session.get_one(Deployment, row.deployment_id)
        model = settings.model_for(deployment.model) or Model()
        update = cls(session, settings, deployment, model, row, Watch.from_json(row.state), now)
        if not update._companions_latched():
            update._end({"reason": "the settings no longer ask for this test"})
        session.delete(row)

    @property
    def kind(self) -> Kind:
        return self.watch.terms.kind

    def take(self, requests: Iterable[Observed]) -> None:
        """Take requests in the order of their indices; one that says nothing to this test is passed over."""
        for one in requests:
            if self.kind == "surprise":
                counts = None if one.surprise is None else self.watch.counts(one.surprise)
            else:
                counts = one.counts.get(self.kind)
            if counts is not None:
                for change in self.watch.observe(one.served_at, one.index, one.session, counts):
                    self._tell(change)
        self.row.updated_at = self.now
        self._store()

    def close_sessions(self) -> None:
        """Judge the sessions that fell silent; nothing was heard, so ``updated_at`` stays."""
        latest = max((unit.index for unit in self.watch.units.open.values()), default=0)
        for change in self.watch.expire(self.now, latest):
            self._tell(change)
        self._store()

    def _store(self) -> None:
        self.row.state = self.watch.to_json()
        self.session.flush()

    def _follow(self, terms: Terms) -> None:
        """Judge by changed settings, against what was normal before."""
        before = self.watch.terms
        if before == terms:
            return
        learning = replace(terms, min_requests=before.min_requests, min_hours=before.min_hours)
        if self.watch.monitor is not None and before == learning:
            self.watch.terms = terms  # how much to learn from is no change of the test
            return
        self._judge_anew(terms, "the settings of detection changed: judged anew")

    def _supersede(self) -> None:
        """This test is new: what is open in those that had its name before gets no more requests."""
        self.session.flush()
        same = {name: getattr(self.row, name) for name in ("draft", "segment", "kind")}
        before = events.taken_over_from(self.session, self.deployment)
        older = select(Monitor).filter_by(**same).where(Monitor.deployment_id.in_(before), Monitor.id < self.row.id)
        for row in self.session.scalars(older.with_for_update()):
            if (watch := Watch.from_json(row.state)).state == "drifting":
                replace(self, row=row, watch=watch).begin_anew(events.TAKEN_OVER)

    def begin_anew(self, reason: str) -> None:
        """End what is open, and gather evidence anew."""
        self._judge_anew(self.watch.terms, reason)

    def forget_untold(self, told: Container[str]) -> None:
        """Gather evidence anew where no event tells of what was found; ``told`` are kinds that others tell."""
        if self.watch.state == "drifting" and self._event_kind not in told and self._open_event() is None:
            self._judge_anew(self.watch.terms, "")

    def _judge_anew(self, terms: Terms, reason: str) -> None:
        """Go on from what is normal; what was open can no longer be judged."""
        self._end({"reason": reason})
        self.watch = Watch.start(terms, self.watch)
        self._store()

    @property
    def _event_kind(self) -> str:
        return EVENTS.get(self.kind, self.kind)

    def _open_event(self) -> Event | None:
        mine = {name: getattr(self.row, name) for name in ("deployment_id", "draft", "segment")}
        where = [getattr(Event, name) == value for name, value in mine.items()]
        found = events.open_events(self.session, Event.kind == self._event_kind, *where)
        return next((one for one in found if one.details.get("fingerprint") == self.row.fingerprint), None)

    def _tell(self, change: Opened | Closed) -> None:
        if isinstance(change, Closed):
            if not self._companions_latched():
                request = events.request_at(self.session, self.row.channel, change.index)
                recovered = figure(told(self.watch.terms, change.estimate))
                self._end({"request_id": request.request_id if request else None, self.kind: recovered})
            return
        alarm = self._alarm(change)
        if (already := self._open_event()) is not None:
            also = {self.kind: figure(alarm.current) | {"log_evidence": alarm.evidence}}
            already.details = already.details | {"also": already.details.get("also", {}) | also}
        elif (cell := self._cell()) is not None:
            events.opened(self.session, self.settings, self.deployment, self.model, cell, alarm, self.now)
            log.warning("%s in %s: %s", self.kind, self.row.segment, alarm.current)

    def _alarm(self, change: Opened) -> Alarm:
        terms, monitor, baseline = self.watch.terms, self.watch.monitor, self.watch.baseline
        assert monitor is not None
        level = told(terms, Estimate(monitor.limit, None, None, 0, 0.0, 0.0)).value
        return Alarm(
            self._event_kind,
            self.kind,
            DEFINITIONS[self.kind],
            None if baseline is None else told(terms, baseline.estimate),
            told(terms, change.estimate),
            monitor.limit if level is None else level,
            change.evidence,
            change.index,
            change.start_index,
        )

    def _end(self, how: dict[str, object]) -> None:
        event = self._open_event()
        if event is not None:
            events.end(self.session, self.settings, event, how, self.now)

    def _companions_latched(self) -> bool:
        """Whether another test that shares this one's kind of event still holds it open."""
        names = [kind for kind in KINDS if kind != self.kind and EVENTS.get(kind, kind) == self._event_kind]
        mine = {name: getattr(self.row, name) for name in MonitorKey._fields}
        rows = self.session.scalars(select(Monitor).filter_by(**mine).where(Monitor.kind.in_(names)))
        return any(Watch.from_json(row.state).state == "drifting" for row in rows)

    def _cell(self) -> Cell | None:
        """The cell that the event is told of: the one off the training distribution for its share, else the largest."""
        mine = {name: getattr(self.row, name) for name in MonitorKey._fields}
        cells = self.session.scalars(select(Cell).filter_by(**mine, channel=self.row.channel).order_by(Cell.id)).all()
        off = self.kind == "off_share"
        return max(cells, key=lambda cell: (off and cell.split == "off", cell.sums["requests"]), default=None)


def told(terms: Terms, estimate: Estimate) -> Estimate:
    """An estimate on the scale that people know: gaps from -1 to 1, acceptance lengths in tokens a window."""
    if terms.kind not in ("live_gap", "below_break_even"):
        return estimate
    factor, shift = (2.0, -1.0) if terms.kind == "live_gap" else (float(terms.gamma), 1.0)
    value, lower, upper = (
        None if x is None else factor * x + shift for x in (estimate.value, estimate.lower, estimate.upper)
    )
    return replace(estimate, value=value, lower=lower, upper=upper)
