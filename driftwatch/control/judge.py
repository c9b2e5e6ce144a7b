"""The judge: folds finished replays into their cells, and lets each cell's detector see them, once and in order.

State lies in the store and moves in the same transaction as the fold marks, so a control that dies in the middle goes
on as if nothing had happened.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.acceptance import DEFAULT_GAMMA, tally
from driftwatch.drift.cell import CellState, DriftClosed, DriftOpened, Rules, Transition
from driftwatch.drift.interval import Estimate
from driftwatch.drift.sums import Sums
from driftwatch.records import segment_labels
from driftwatch.retrain.announce import DRIFT_CLOSED, DRIFT_OPENED, announce
from driftwatch.retrain.policy import propose
from driftwatch.settings import Detect, Model, Settings
from driftwatch.store import replays
from driftwatch.store.connection import Store
from driftwatch.store.replays import Judged
from driftwatch.store.schema import Cell, CellHour, Deployment, Event, Replay, Sample

log = logging.getLogger(__name__)

BATCH = 500


def rules_of(detect: Detect) -> Rules:
    """What every cell is judged by."""
    return Rules(
        tolerance=detect.tolerance,
        threshold=detect.requests_between_false_alarms,
        min_requests=detect.baseline.min_requests,
        min_hours=detect.baseline.min_hours,
        given=detect.baseline.value,
    )


def fold(store: Store, settings: Settings, now: float) -> int:
    """Fold everything that is waiting; the number of replays folded."""
    total = 0
    while True:
        with store.write() as session:
            judged = replays.unfolded(session, BATCH)
            for key, group in groupby(sorted(judged, key=_key), key=_key):
                _CellUpdate.load(session, settings, key, now).take(list(group))
            replays.mark_folded(session, [one.replay_id for one in judged], now)
        total += len(judged)
        if len(judged) < BATCH:
            return total


def expire(store: Store, settings: Settings, now: float) -> None:
    """Judge the sessions that fell silent: without a new request nothing else would close them."""
    with store.write() as session:
        for cell in session.scalars(select(Cell).with_for_update()).all():
            if cell.state["units"]["open"]:
                _CellUpdate.of(session, settings, cell, now).close_sessions()


def _key(one: Judged) -> tuple[int, str, str, str]:
    return one.deployment_id, one.draft, one.segment, one.split


@dataclass
class _CellUpdate:
    """One cell while a batch of replays passes through it."""

    session: Session
    settings: Settings
    deployment: Deployment
    model: Model
    cell: Cell
    state: CellState
    sums: Sums
    now: float

    @classmethod
    def load(cls, session: Session, settings: Settings, key: tuple[int, str, str, str], now: float) -> _CellUpdate:
        """The cell of a key, made at its first request."""
        where = dict(zip(("deployment_id", "draft", "segment", "split"), key, strict=True))
        cell = session.scalars(select(Cell).filter_by(**where).with_for_update()).first()
        if cell is None:
            state, sums = CellState.start(rules_of(settings.detect)), Sums.zero(DEFAULT_GAMMA)
            cell = Cell(**where, gamma=0, state=state.to_json(), sums=sums.to_json(), updated_at=now)
            session.add(cell)
        return cls.of(session, settings, cell, now)

    @classmethod
    def of(cls, session: Session, settings: Settings, cell: Cell, now: float) -> _CellUpdate:
        """A cell under the settings of today."""
        deployment = session.get_one(Deployment, cell.deployment_id)
        model = settings.model_for(deployment.model) or Model()
        cell.gamma = model.gamma
        rules = rules_of(settings.detect)
        state = CellState.from_json(cell.state)
        if state.rules != rules:  # settings changed: judge by the new rules, but against what was normal before
            frozen = state.baseline if state.baseline.lower is not None and rules.given is None else None
            state = CellState.start(rules, frozen)
        sums = Sums.from_json(cell.sums).widened(model.gamma)
        return cls(session, settings, deployment, model, cell, state, sums, now)

    def take(self, group: list[Judged]) -> None:
        gammas = self.sums.gammas
        i = self.model.gamma - 1
        hours: dict[int, Sums] = {}
        for one in sorted(group, key=lambda one: one.replay_id):
            counts = tally(one.weights, _gammas(one, gammas))
            request = Sums.request(counts, one.weight).widened(gammas)
            self.sums += request
            hour = int(one.served_at // 3600)
            hours[hour] = hours.get(hour, Sums.zero(gammas)) + request
            # The detector counts by replay ids: they rise, and lead back to the request.
            for change in self.state.observe(
                one.served_at, one.replay_id, one.session, float(counts.accepted[i]), float(counts.tested[i])
            ):
                self._tell(change)
        self._store()
        for hour, sums in hours.items():
            self._add_hour(hour, sums)

    def close_sessions(self) -> None:
        latest = max(unit.index for unit in self.state.units.open.values())
        for change in self.state.expire(self.now, latest):
            self._tell(change)
        self._store()

    def _store(self) -> None:
        self.cell.state, self.cell.sums, self.cell.updated_at = self.state.to_json(), self.sums.to_json(), self.now
        self.session.flush()

    def _add_hour(self, hour: int, sums: Sums) -> None:
        row = self.session.get(CellHour, (self.cell.id, hour), with_for_update=True)
        if row is None:
            row = CellHour(cell_id=self.cell.id, hour=hour, requests=0, tokens=0, sums={})
            self.session.add(row)
        else:
            sums = Sums.from_json(row.sums).widened(sums.gammas) + sums
        row.sums, row.requests, row.tokens = sums.to_json(), sums.requests, sums.tokens

    def _tell(self, change: Transition) -> None:
        if isinstance(change, DriftOpened):
            self._open(change)
        elif isinstance(change, DriftClosed):
            self._close(change)
        else:
            log.info("baseline of %s frozen: %s", self.cell.segment, change.estimate)

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
            request_id=request.request_id,
            start_request_id=start.request_id,
            details=self._evidence(change, start, request),
        )
        self.session.add(event)
        self.session.flush()
        log.warning("drift in %s: hit rate %s", self.cell.segment, change.estimate)
        self._announce(f"{event.id}-opened", DRIFT_OPENED, event.details | {"event_id": event.id})
        propose(self.session, event, cooldown_s=self.settings.retrain.cooldown_hours * 3600)

    def _close(self, change: DriftClosed) -> None:
        still_open = select(Event).where(
            Event.cell_id == self.cell.id, Event.kind == "drift", Event.closed_at.is_(None)
        )
        for event in self.session.scalars(still_open):
            event.closed_at = self.now
            recovered = {"request_id": self._sample(change.index).request_id, "hit_rate": figure(change.estimate)}
            event.details = event.details | {"closed": recovered}
            log.warning("drift in %s is over: hit rate %s", self.cell.segment, change.estimate)
            self._announce(f"{event.id}-closed", DRIFT_CLOSED, event.details | {"event_id": event.id})

    def _announce(self, id: str, type: str, data: dict[str, Any]) -> None:
        webhooks = self.settings.webhooks
        announce(self.session, webhooks, id=id, type=type, subject=self.cell.segment, at=self.now, data=data)

    def _sample(self, replay_id: int) -> Sample:
        found = select(Sample).join(Replay, Replay.sample_id == Sample.id)
        return self.session.scalars(found.where(Replay.id == replay_id)).one()

    def _evidence(self, change: DriftOpened, start: Sample, request: Sample) -> dict[str, Any]:
        return {
            "metric": "hit_rate",
            "definition": "accepted / tested proposals, weighted mean over requests",
            "segment": self.cell.segment,
            "labels": segment_labels(self.cell.segment),
            "split": self.cell.split,
            "draft": self.cell.draft,
            "model": self.deployment.model,
            "deployment": self.deployment.facts,
            "gamma": self.model.gamma,
            "rule": self.model.rule,
            "baseline": figure(change.baseline),
            "current": figure(change.estimate),
            "floor": change.floor,
            "tolerance": self.settings.detect.tolerance,
            "log_evidence": change.evidence,
            "requests_between_false_alarms": self.settings.detect.requests_between_false_alarms,
            "request_id": request.request_id,
            "start_request_id": start.request_id,
            "start_served_at": start.served_at,
            "cause": "unknown",
        }


def _gammas(one: Judged, wanted: int) -> int:
    """Proposal lengths that the replayed depths allow."""
    return wanted if one.weights.depth_free else min(wanted, one.weights.values.shape[1])


def figure(estimate: Estimate) -> dict[str, Any]:
    """An estimate with its denominator and interval, for people and pipelines."""
    return asdict(estimate)
