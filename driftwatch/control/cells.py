"""One cell while requests pass through it: its sums, its hours, its detector, and what the detector has to tell."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.acceptance import DEFAULT_GAMMA
from driftwatch.control.terms import DEFINITIONS, Key, Seen, figure, fitted, rules_of
from driftwatch.drift.cell import CellState, DriftClosed, DriftOpened, Rules, Transition
from driftwatch.drift.live import Metric, restated, settle
from driftwatch.drift.sums import Sums
from driftwatch.records import segment_labels
from driftwatch.retrain.announce import DRIFT_CLOSED, DRIFT_OPENED, announce
from driftwatch.retrain.policy import propose
from driftwatch.settings import Model, Settings
from driftwatch.store.schema import Cell, CellHour, Deployment, Event, Replay, Sample

log = logging.getLogger(__name__)


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
    now: float
    less: int = 0
    """Requests that said less than what a live cell watches."""

    @classmethod
    def load(
        cls, session: Session, settings: Settings, key: Key, now: float, metric: Metric = "hit_rate"
    ) -> CellUpdate:
        """The cell of a key, made at its first request, whose metric it keeps."""
        where = key._asdict()
        cell = session.scalars(select(Cell).filter_by(**where).with_for_update()).first()
        if cell is None:
            state = CellState.start(rules_of(settings.detect, metric))
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
        rules = rules_of(settings.detect, cell.metric)
        state = CellState.from_json(cell.state)
        sums = Sums.from_json(cell.sums)
        if cell.channel == "shadow":  # a live cell's gamma is the engine's own
            cell.gamma = model.gamma
            sums = sums.widened(model.gamma)
        update = cls(session, settings, deployment, model, cell, state, sums, now, cell.sums.get("less", 0))
        if state.rules != rules:
            update.follow(rules)
        return update

    def follow(self, rules: Rules) -> None:
        """Judge by changed settings, against what was normal before: learnt is learnt, what was given is not."""
        before = self.state
        same_test = (before.rules.tolerance, before.rules.threshold, before.rules.given)
        if before.detector is not None and same_test == (rules.tolerance, rules.threshold, rules.given):
            before.rules = rules
            return
        learnt = before.baseline.source == "auto" and before.baseline.lower is not None and rules.given is None
        self.state = CellState.start(rules, before.baseline if learnt else None)
        self.state.units = before.units  # open sessions are facts, whatever they are judged by
        self._close_open_events("the settings of detection changed: judged anew")

    def supersede(self) -> None:
        """This cell is new: what was open in the cells that had its name before gets no more traffic."""
        self.session.flush()
        same = {name: getattr(self.cell, name) for name in ("draft", "segment", "split", "channel")}
        older = (
            select(Cell)
            .join(Deployment, Deployment.id == Cell.deployment_id)
            .filter_by(**same)
            .where(Deployment.model == self.deployment.model, Cell.id < self.cell.id)
        )
        for cell in self.session.scalars(older):
            for event in open_events(self.session, cell.id):
                self._end(event, {"reason": "another deployment or draft has taken over"})

    @property
    def metric(self) -> Metric:
        return cast("Metric", self.cell.metric)

    def reach(self, gamma: int) -> int:
        """Make room in a live cell for an engine that proposes so many; the gamma it then has."""
        if gamma > self.sums.gammas and self.metric == "acceptance_length" and self.sums.requests:
            self._start_anew(f"the engine proposes {gamma} tokens: lengths are compared on another scale")
        self.sums = restated(self.sums, gamma)
        self.cell.gamma = self.sums.gammas
        return self.cell.gamma

    def settle(self, said: Sequence[Metric]) -> None:
        """Watch a coarser metric from here on, and learn it anew, if too many of a live cell's requests say less."""
        metric, less = settle(self.metric, said, self.sums.requests, self.less)
        self.less = less
        if metric != self.metric:
            self.cell.metric = metric
            self._start_anew(f"the engine says less: {metric} is watched from here on")

    def _start_anew(self, reason: str) -> None:
        """Learn what is normal once more; what was open until now can no longer be judged."""
        self.state = CellState.start(rules_of(self.settings.detect, self.metric))
        self._close_open_events(reason)

    def _close_open_events(self, reason: str) -> None:
        for event in open_events(self.session, self.cell.id):
            self._end(event, {"reason": reason})

    def _end(self, event: Event, how: dict[str, Any]) -> None:
        event.closed_at = self.now
        event.details = event.details | {"closed": how}
        self._announce(f"{event.id}-closed", DRIFT_CLOSED, event.details | {"event_id": event.id})

    def take(self, requests: Iterable[Seen]) -> None:
        """Take requests of this cell, in the order of their indices."""
        hours: dict[int, Sums] = {}
        for one in sorted(requests, key=lambda one: one.index):
            self.sums += one.sums
            hour = int(one.served_at // 3600)
            hours[hour] = hours[hour] + one.sums if hour in hours else one.sums
            for change in self.state.observe(one.served_at, one.index, one.session, one.accepted, one.trials):
                self._tell(change)
        self._store()
        for hour, sums in hours.items():
            self._add_hour(hour, sums)

    def close_sessions(self) -> None:
        """Judge the sessions that fell silent."""
        latest = max((unit.index for unit in self.state.units.open.values()), default=0)
        for change in self.state.expire(self.now, latest):
            self._tell(change)
        self._store()

    def _store(self) -> None:
        sums = self.sums.to_json() | ({"less": self.less} if self.less else {})
        self.cell.state, self.cell.sums, self.cell.updated_at = self.state.to_json(), sums, self.now
        self.session.flush()

    def _add_hour(self, hour: int, sums: Sums) -> None:
        row = self.session.get(CellHour, (self.cell.id, hour), with_for_update=True)
        if row is None:
            row = CellHour(cell_id=self.cell.id, hour=hour, requests=0, tokens=0, sums={})
            self.session.add(row)
        else:
            sums = fitted(Sums.from_json(row.sums), sums.gammas, self.cell.channel) + sums
        row.sums, row.requests, row.tokens = sums.to_json(), sums.requests, sums.tokens

    def _tell(self, change: Transition) -> None:
        if isinstance(change, DriftOpened):
            self._open(change)
        elif isinstance(change, DriftClosed):
            self._close(change)
        else:
            log.info("baseline of %s (%s) frozen: %s", self.cell.segment, self.cell.channel, change.estimate)

    def _open(self, change: DriftOpened) -> None:
        self.session.flush()  # a new cell has its id from here on
        start, request = self._sample(change.start_index), self._sample(change.index)
        event = Event(
            id=uuid.uuid4().hex,
            kind="drift",
            cell_id=self.cell.id,
            deployment_id=self.cell.deployment_id,
            segment=self.cell.segment,
            split=self.cell.split,
            draft=self.cell.draft,
            cause="unknown",
            opened_at=self.now,
            request_id=request.request_id if request else "",
            start_request_id=start.request_id if start else None,
            details=self._evidence(change, start, request),
        )
        self.session.add(event)
        self.session.flush()
        log.warning("drift in %s (%s): %s %s", event.segment, self.cell.channel, self.metric, change.estimate)
        self._announce(f"{event.id}-opened", DRIFT_OPENED, event.details | {"event_id": event.id})
        cooldown_s = self.settings.retrain.cooldown_hours * 3600
        propose(self.session, event, cooldown_s=cooldown_s, instead=self._shadow_decides())

    def _shadow_decides(self) -> str | None:
        """Why a fall that the engine reports asks for no training itself: a replay of the same requests stands by.

        If the replay falls too, it asks; if it does not, the draft is as good as ever and the engine is at fault.
        """
        if self.cell.channel == "shadow":
            return None
        key = {name: getattr(self.cell, name) for name in ("deployment_id", "draft", "segment")}
        shadow = self.session.scalars(select(Cell.id).filter_by(**key, channel="shadow")).first()
        return None if shadow is None else "the replay of the same requests decides"

    def _close(self, change: DriftClosed) -> None:
        request = self._sample(change.index)
        for event in open_events(self.session, self.cell.id):
            log.warning("drift in %s (%s) is over: %s", self.cell.segment, self.cell.channel, change.estimate)
            recovered = {self.metric: figure(change.estimate)}
            self._end(event, {"request_id": request.request_id if request else None} | recovered)

    def _announce(self, id: str, type: str, data: dict[str, Any]) -> None:
        webhooks = self.settings.webhooks
        announce(self.session, webhooks, id=id, type=type, subject=self.cell.segment, at=self.now, data=data)

    def _sample(self, index: int) -> Sample | None:
        """The request of an index; None once retention has deleted it."""
        if self.cell.channel == "live":
            return self.session.get(Sample, index)
        found = select(Sample).join(Replay, Replay.sample_id == Sample.id)
        return self.session.scalars(found.where(Replay.id == index)).first()

    def _evidence(self, change: DriftOpened, start: Sample | None, request: Sample | None) -> dict[str, Any]:
        return {
            "channel": self.cell.channel,
            "metric": self.metric,
            "definition": DEFINITIONS[self.metric],
            "segment": self.cell.segment,
            "labels": segment_labels(self.cell.segment),
            "split": self.cell.split,
            "draft": self.cell.draft,
            "model": self.deployment.model,
            "deployment": self.deployment.facts,
            "gamma": self.cell.gamma,
            "rule": self.model.rule,
            "baseline": figure(change.baseline),
            "current": figure(change.estimate),
            "floor": change.floor,
            "tolerance": self.settings.detect.tolerance,
            "log_evidence": change.evidence,
            "requests_between_false_alarms": self.settings.detect.requests_between_false_alarms,
            "request_id": request.request_id if request else None,
            "start_request_id": start.request_id if start else None,
            "start_served_at": start.served_at if start else None,
            "cause": "unknown",
        }


def open_events(session: Session, cell_id: int) -> Sequence[Event]:
    """Drift events of a cell that are not over."""
    mine = (Event.cell_id == cell_id, Event.kind == "drift", Event.closed_at.is_(None))
    return session.scalars(select(Event).where(*mine)).all()
