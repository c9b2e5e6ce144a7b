"""The judge: folds what is known of each request into its cells, and lets their detectors see it, once and in order.

Two channels stand side by side: finished replays feed shadow cells, the engine's own figures live cells. State lies in
the store and moves in the same transaction as the fold marks, so a control that dies in the middle goes on as if
nothing had happened.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.acceptance import tally
from driftwatch.control import causes, leftovers, observed
from driftwatch.control.cells import CellUpdate, model_of
from driftwatch.control.conditions import Served
from driftwatch.control.monitors import MonitorKey, MonitorUpdate
from driftwatch.control.observed import Observed
from driftwatch.control.terms import Key, Seen, kinds_of
from driftwatch.drift.live import METRICS, LiveCounts, Metric, Refused, counts
from driftwatch.drift.sums import Sums
from driftwatch.drift.watch import KINDS
from driftwatch.settings import Model, Settings
from driftwatch.store import live, replays
from driftwatch.store.connection import Store
from driftwatch.store.live import Reported
from driftwatch.store.replays import Judged
from driftwatch.store.samples import count_outcome
from driftwatch.store.schema import Cell, Monitor

BATCH = 500
REFUSED = "live_refused"
"""Outcome under which engine figures are counted that went into no cell."""


def fold(store: Store, settings: Settings, now: float) -> int:
    """Fold everything that is waiting; the number of replays and of engine figures folded."""
    return _fold_replays(store, settings, now) + _fold_live(store, settings, now)


def _fold_replays(store: Store, settings: Settings, now: float) -> int:
    total = 0
    while True:
        with store.write() as session:
            judged = replays.unfolded(session, BATCH)
            beside: dict[MonitorKey, list[Observed]] = {}
            for key, group in groupby(sorted(judged, key=_key), key=_key):
                update = CellUpdate.load(session, settings, key, now)
                kinds = kinds_of(settings, update.model, key.draft)
                pairs = [(one, _replayed(update, one)) for one in group]
                update.take([seen for _, seen in pairs])
                also = beside.setdefault(_monitored(key), [])
                also += [observed.of_replay(one, seen, update.model, kinds) for one, seen in pairs]
            for monitored, requests in sorted(beside.items()):
                _watch(session, settings, monitored, requests, "shadow", now)
            if judged:
                _conclude(session, settings, now)
            replays.mark_folded(session, [one.replay_id for one in judged], now)
        total += len(judged)
        if len(judged) < BATCH:
            return total


def _fold_live(store: Store, settings: Settings, now: float) -> int:
    total = 0
    while True:
        with store.write() as session:
            reported = live.unfolded(session, BATCH)
            keyed = sorted(((_live_key(settings, one), one) for one in reported), key=lambda pair: pair[0])
            for key, group in groupby(keyed, key=lambda pair: pair[0]):
                _take_live(session, settings, key, [one for _, one in group], now)
            if reported:
                _conclude(session, settings, now)
            live.mark_folded(session, [one.sample_id for one in reported], now)
        total += len(reported)
        if len(reported) < BATCH:
            return total


def _take_live(session: Session, settings: Settings, key: Key, group: list[Reported], now: float) -> None:
    """Fold one cell's requests. What cannot go into it is counted with its reason."""
    configured = (settings.model_for(group[0].model) or Model()).gamma
    usable: list[tuple[Reported, LiveCounts]] = []
    refused: Counter[str] = Counter()
    for one in group:
        try:
            if (found := counts(one.engine, configured)) is not None:
                usable.append((one, found))
        except Refused as error:
            refused[error.reason] += 1
    if usable:
        said = [found.metric for _, found in usable]
        update = CellUpdate.load(session, settings, key, now, min(said, key=METRICS.index))
        update.settle(said)
        telling = [(one, found) for one, found in usable if found.gives(update.metric)]
        refused["says_less"] += len(usable) - len(telling)
        gamma = update.reach(max((found.gamma for _, found in telling), default=1))
        pairs = [(_reported(update.metric, gamma, one, found), found) for one, found in telling]
        update.take([seen for seen, _ in pairs])
        if not _is_replayed(update.model):
            kinds = kinds_of(settings, update.model, key.draft)
            requests = [observed.of_engine(seen, found, update.model, kinds) for seen, found in pairs]
            _watch(session, settings, _monitored(key), requests, "live", now)
    for reason, count in sorted((+refused).items()):
        count_outcome(session, key.segment, REFUSED, reason, by=count)


def _watch(
    session: Session, settings: Settings, key: MonitorKey, requests: list[Observed], channel: str, now: float
) -> None:
    """Let the tests beside the hit rate's see requests of one draft and segment, those that they say something to."""
    requests.sort(key=lambda one: one.index)
    for kind in KINDS:
        if any(kind in one.counts or (kind == "surprise" and one.surprise is not None) for one in requests):
            MonitorUpdate.load(session, settings, key, kind, channel, now).take(requests)


def expire(store: Store, settings: Settings, now: float) -> None:
    """Judge the sessions that fell silent, and end events: without a new request nothing else would close them."""
    with store.write() as session:
        for cell in session.scalars(select(Cell).with_for_update()).all():
            if cell.state["units"]["open"]:
                CellUpdate.of(session, settings, cell, now).close_sessions()
        for row in session.scalars(select(Monitor).with_for_update()).all():
            if not _is_asked_for(session, settings, row):
                MonitorUpdate.retire(session, settings, row, now)
            elif row.state["units"]["open"]:
                MonitorUpdate.of(session, settings, row, now).close_sessions()
        leftovers.end(session, settings, now)
        _conclude(session, settings, now)


def _conclude(session: Session, settings: Settings, now: float) -> None:
    """What follows from the events that all tests have opened and ended."""
    leftovers.told_by(session, settings, now)
    causes.review(session, settings, now)


def _key(one: Judged) -> Key:
    return Key(one.deployment_id, one.draft, one.segment, one.split, "shadow", one.fingerprint)


def _monitored(key: Key) -> MonitorKey:
    return MonitorKey(key.deployment_id, key.draft, key.fingerprint, key.segment)


def _is_asked_for(session: Session, settings: Settings, row: Monitor) -> bool:
    return row.kind in kinds_of(settings, model_of(session, settings, row.deployment_id), row.draft)


def _is_replayed(model: Model) -> bool:
    """Whether the incumbent is: then the tests take a replay's counts, which are exact, and not the engine's."""
    return bool(model.drafts) and model.drafts[0].path is not None


def _live_key(settings: Settings, one: Reported) -> Key:
    """The engine runs the incumbent, under whatever name; what it reports has no split."""
    drafts = (settings.model_for(one.model) or Model()).drafts
    return Key(one.deployment_id, drafts[0].name if drafts else "incumbent", one.segment, "none", "live", "")


def _reported(metric: Metric, gamma: int, one: Reported, found: LiveCounts) -> Seen:
    sums = Sums.request(found.tally(gamma, metric), one.weight)
    served = Served.of(one.engine, one.timing, one.total_tokens, found.tokens)
    return Seen(one.sample_id, one.served_at, one.session, sums, *found.trials(metric, gamma), served)


def _replayed(update: CellUpdate, one: Judged) -> Seen:
    update.fit(one.weights)
    gammas = update.sums.gammas
    # Proposal lengths that the replayed depths allow.
    depths = gammas if one.weights.depth_free else min(gammas, one.weights.values.shape[1])
    found = tally(one.weights, depths)
    i = update.cell.gamma - 1
    sums = Sums.request(found, one.weight).widened(gammas)
    accepted, tested = float(found.accepted[i]), float(found.tested[i])
    served = Served.of(one.engine, one.timing, one.total_tokens, found.tokens)
    return Seen(one.replay_id, one.served_at, one.session, sums, accepted, tested, served)
