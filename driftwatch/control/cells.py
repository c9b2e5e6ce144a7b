"""One cell while requests pass through it: its sums, its hours, its detector, and what the detector has to tell."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.acceptance import DEFAULT_GAMMA, Weights
from driftwatch.control import counters, events, regressions, tails
from driftwatch.control.conditions import KEY, Conditions
from driftwatch.control.conditions import read as read_conditions
from driftwatch.control.counters import Counters
from driftwatch.control.events import Alarm
from driftwatch.control.terms import DEFINITIONS, Key, Seen, figure, fitted, rules_of
from driftwatch.drift.cell import CellState, DriftClosed, DriftOpened, Rules, Transition
from driftwatch.drift.live import Metric, restated, settle
from driftwatch.drift.quantiles import Quantiles
from driftwatch.drift.sums import Sums
from driftwatch.settings import Model, Settings
from driftwatch.store.schema import Cell, CellHour, Deployment, Event

log = logging.getLogger(__name__)

OF_CELLS = ("drift", events.REGRESSED)
"""Kinds of events that end when another cell takes over; those of other tests end with their own (``monitors``)."""


@dataclass
class Hour:
    """What requests of one hour add to it."""

    sums: Sums
    tail: Quantiles
    conditions: Conditions

    def add(self, one: Seen, gamma: int) -> None:
        self.sums += one.sums
        tails.add(self.tail, one.sums, gamma)
        self.conditions.add(one.served, one.sums.weight)


@dataclass
class CellUpdate:
    """A cell, locked, under the settings of today."""

    session: Session
    settings: Settings
    deployment: Deployment
    model: Model
    cell: Cell
    state: CellState
    sums: Sums
    tail: Quantiles
    now: float
    less: int = 0
    """Requests that said less than what a live cell watches."""
    carried: Counters = field(default_factory=Counters.zero)
    """See ``counters``."""
    relearnt: bool = False
    """Whether a normal was known before the one that is known or learnt now."""

    @classmethod
    def load(
        cls, session: Session, settings: Settings, key: Key, now: float, metric: Metric = "hit_rate"
    ) -> CellUpdate:
        """The cell of a key, made at its first request, whose metric it keeps."""
        where = key._asdict()
        cell = session.scalars(select(Cell).filter_by(**where).with_for_update()).first()
        if cell is None:
            state = CellState.start(rules_of(settings, model_of(session, settings, key.deployment_id), metric))
            sums = Sums.zero(1 if key.channel == "live" else DEFAULT_GAMMA)
            start = {"metric": metric, "gamma": 1, "state": state.to_json(), "sums": sums.to_json()}
            cell = Cell(**where, **start, updated_at=now)
            session.add(cell)
            update = cls.of(session, settings, cell, now)
            update.supersede()
            return update
        return cls.of(session, settings, cell, now)

    @classmethod
    def of(cls, session: Session, settings: Settings, cell: Cell, now: float) -> CellUpdate:
        deployment = session.get_one(Deployment, cell.deployment_id)
        model = settings.model_for(deployment.model) or Model()
        rules = rules_of(settings, model, cell.metric)
        state = CellState.from_json(cell.state)
        sums = Sums.from_json(cell.sums)
        gamma = cell.gamma
        if cell.channel == "shadow":  # a live cell's gamma is the engine's own, a tree's are its steps
            replayed = sums.tally.replayed
            cell.gamma = replayed[0] if len(replayed) == 1 else model.gamma
            sums = sums.widened(max(cell.gamma, model.gamma))
        tail = tails.read(cell.sums, cell.gamma)
        less, carried = cell.sums.get("less", 0), Counters.read(cell.sums)
        relearnt = cell.sums.get("relearnt", False)
        update = cls(session, settings, deployment, model, cell, state, sums, tail, now, less, carried, relearnt)
        if state.rules != rules:
            update.follow(rules)
        if cell.gamma != gamma and sums.requests:
            update.carried += Counters.of(sums, gamma) - Counters.of(sums, cell.gamma)
            update._start_anew(f"the proposal length is now {cell.gamma}: what is normal depends on it")
        return update

    def follow(self, rules: Rules) -> None:
        """Judge by changed settings, against what was normal before: learnt is learnt, what was given is not."""
        before = self.state
        same_test = (before.rules.tolerance, before.rules.threshold, before.rules.given)
        if before.detector is not None and same_test == (rules.tolerance, rules.threshold, rules.given):
            before.rules = rules
            return
        learnt = before.baseline.source == "auto" and rules.given is None
        asked = rules.tolerance, rules.min_requests, rules.min_hours
        self.state = CellState.start(rules, before.baseline.under(*asked) if learnt else None)
        self.state.units = before.units  # open sessions are facts, whatever they are judged by
        self._close_open_events("the settings of detection changed: judged anew")

    def supersede(self) -> None:
        """This cell is new: what was open in the cells that had its name before gets no more traffic."""
        self.session.flush()
        same = {name: getattr(self.cell, name) for name in ("draft", "segment", "split", "channel")}
        before = events.taken_over_from(self.session, self.deployment)
        older = select(Cell).filter_by(**same).where(Cell.deployment_id.in_(before), Cell.id < self.cell.id)
        for cell in self.session.scalars(older.with_for_update()):
            for event in events.open_events(self.session, Event.cell_id == cell.id, Event.kind.in_(OF_CELLS)):
                self._end(event, {"reason": events.TAKEN_OVER})
                if event.kind == "drift":  # if it ever comes back, it may alarm again
                    begin_anew(cell)

    @property
    def metric(self) -> Metric:
        return cast("Metric", self.cell.metric)

    def reach(self, gamma: int) -> int:
        """Make room in a live cell for an engine that proposes so many; the gamma it then has."""
        if gamma > self.sums.gammas and self.metric != "hit_rate" and self.sums.requests:
            self._start_anew(f"the engine proposes {gamma} tokens: {self.metric} depends on that")
        self.sums = restated(self.sums, gamma)
        if self.cell.gamma != self.sums.gammas:
            self.cell.gamma = self.sums.gammas
            self.tail = tails.empty(self.cell.gamma)
        return self.cell.gamma

    def fit(self, weights: Weights) -> None:
        """Take the one proposal length that weights hold for, a tree's steps, as the cell's, whatever is configured.

        Its first request says it: another tree has another fingerprint, and with that a cell of its own.
        """
        gamma = weights.values.shape[1]
        if weights.walked and gamma != self.cell.gamma:
            self.cell.gamma, self.sums, self.tail = gamma, self.sums.widened(gamma), tails.empty(gamma)

    def settle(self, said: Sequence[Metric]) -> None:
        """Watch a coarser metric from here on, and learn it anew, if too many of a live cell's requests say less."""
        metric, less = settle(self.metric, said, self.sums.requests, self.less)
        self.less = less
        if metric != self.metric:
            self.cell.metric = metric
            self._start_anew(f"the engine says less: {metric} is watched from here on")

    def _start_anew(self, reason: str) -> None:
        """Learn what is normal once more; what was open until now can no longer be judged."""
        self.relearnt = self.relearnt or self.state.baseline.frozen is not None
        self.state = CellState.start(rules_of(self.settings, self.model, self.metric))
        self._close_open_events(reason)

    def _close_open_events(self, reason: str) -> None:
        for event in events.open_events(self.session, *self._mine):
            self._end(event, {"reason": reason})

    @property
    def _mine(self) -> tuple[Any, ...]:
        return Event.cell_id == self.cell.id, Event.kind == "drift"

    def _end(self, event: Event, how: dict[str, Any]) -> None:
        events.end(self.session, self.settings, event, how, self.now)

    def take(self, requests: Iterable[Seen]) -> None:
        """Take requests of this cell, in the order of their indices."""
        gamma = self.cell.gamma
        hours: dict[int, Hour] = {}
        for one in sorted(requests, key=lambda one: one.index):
            self.sums += one.sums
            tails.add(self.tail, one.sums, gamma)
            hour = int(one.served_at // 3600)
            hours.setdefault(hour, Hour(Sums.zero(self.sums.gammas), tails.empty(gamma), Conditions())).add(one, gamma)
            for change in self.state.observe(one.served_at, one.index, one.session, one.accepted, one.trials):
                self._tell(change)
        self.cell.updated_at = self.now
        self._store()
        for hour, added in hours.items():
            self._add_hour(hour, added)

    def close_sessions(self) -> None:
        """Judge the sessions that fell silent; nothing was heard, so ``updated_at`` stays."""
        latest = max((unit.index for unit in self.state.units.open.values()), default=0)
        for change in self.state.expire(self.now, latest):
            self._tell(change)
        self._store()

    def _store(self) -> None:
        sums = self.sums.to_json() | {tails.KEY: self.tail.to_json()} | ({"less": self.less} if self.less else {})
        if self.relearnt:
            sums["relearnt"] = True
        if self.carried.counts.any():
            sums[counters.KEY] = self.carried.to_json()
        self.cell.state, self.cell.sums = self.state.to_json(), sums
        self.session.flush()

    def _add_hour(self, hour: int, added: Hour) -> None:
        sums, tail, conditions = added.sums, added.tail, added.conditions
        row = self.session.get(CellHour, (self.cell.id, hour), with_for_update=True)
        if row is None:
            row = CellHour(cell_id=self.cell.id, hour=hour, requests=0, tokens=0, sums={})
            self.session.add(row)
        else:
            sums = fitted(Sums.from_json(row.sums), sums.gammas, self.cell.channel) + sums
            tail = tails.read(row.sums, self.cell.gamma) + tail
            conditions = read_conditions(row.sums) + conditions
        row.sums = sums.to_json() | {tails.KEY: tail.to_json(), KEY: conditions.to_json()}
        row.requests, row.tokens = sums.requests, sums.tokens

    def _tell(self, change: Transition) -> None:
        if isinstance(change, DriftOpened):
            self._open(change)
        elif isinstance(change, DriftClosed):
            self._close(change)
        else:
            log.info("baseline of %s (%s) frozen: %s", self.cell.segment, self.cell.channel, change.estimate)
            self.session.flush()  # a new cell has its id from here on
            baseline, again = self.state.baseline, self.relearnt
            regressions.look(self.session, self.settings, self.deployment, self.cell, baseline, self.now, again=again)

    def _open(self, change: DriftOpened) -> None:
        self.session.flush()
        alarm = Alarm(
            "drift",
            self.metric,
            DEFINITIONS[self.metric],
            change.baseline,
            change.estimate,
            change.floor,
            change.evidence,
            change.index,
            change.start_index,
        )
        event = events.opened(self.session, self.settings, self.deployment, self.model, self.cell, alarm, self.now)
        log.warning("drift in %s (%s): %s %s", event.segment, self.cell.channel, self.metric, change.estimate)

    def _close(self, change: DriftClosed) -> None:
        request = events.request_at(self.session, self.cell.channel, change.index)
        for event in events.open_events(self.session, *self._mine):
            log.warning("drift in %s (%s) is over: %s", self.cell.segment, self.cell.channel, change.estimate)
            recovered = {self.metric: figure(change.estimate)}
            self._end(event, {"request_id": request.request_id if request else None} | recovered)


def begin_anew(cell: Cell) -> None:
    """Go on from what is normal, with no evidence yet; open sessions are facts."""
    state = CellState.from_json(cell.state)
    cell.state = replace(CellState.start(state.rules, state.baseline), units=state.units).to_json()


def model_of(session: Session, settings: Settings, deployment_id: int) -> Model:
    """What the settings say of a deployment's model."""
    return settings.model_for(session.get_one(Deployment, deployment_id).model) or Model()
