"""Asking for training: the data is written, then the request goes out with all that a pipeline needs to start."""

from __future__ import annotations

import hashlib
import logging
import secrets
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from driftwatch.errors import DriftwatchError
from driftwatch.records import segment_labels
from driftwatch.retrain import evidence, identity, policy, publish, specforge
from driftwatch.retrain.announce import RETRAIN_REQUESTED, announce
from driftwatch.retrain.export import Export, Source, choose_from, export, source_of
from driftwatch.retrain.progress import advance
from driftwatch.retrain.selection import Occasion
from driftwatch.retrain.states import FOLLOWS, STATES
from driftwatch.settings import Model, Settings
from driftwatch.store import retrains, training
from driftwatch.store.candidates import pack_samples
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, Deployment, Event, Retrain

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
OF_CELLS = ("depths", "out_of_vocabulary")
DAY = 86_400.0


def request(store: Store, settings: Settings, now: float) -> int:
    """Export the data of every proposed retrain that waits for nothing, and announce it; the number announced."""
    with store.read() as session:
        proposed = retrains.in_states(session, ["proposed"])
    asked = 0
    for retrain in proposed:
        try:
            asked += _request(store, settings, retrain.id, now)
        except DriftwatchError as error:  # the others need not wait for it
            log.error("%s: %s", retrain.id, error)
            with suppress(DriftwatchError):  # the store itself may be what failed
                _say(store, retrain.id, f"tried again, since {error}")
    return asked


def _request(store: Store, settings: Settings, id: str, now: float) -> bool:
    rules = settings.retrain.data
    with store.read() as session:
        retrain = session.get_one(Retrain, id)
        event = session.get_one(Event, retrain.event_id)
        source = _source(session, retrain, event, settings)
        arrived = training.count(session, source.deployment_id, event.segment, source.occasion.start)
    wanted = settings.retrain.policy
    waiting = policy.waits(wanted, arrived, now)  # what is cheap to know first: it is asked again and again
    if waiting is None:
        chosen = choose_from(store, source, rules)
        waiting = policy.waits(wanted, chosen.of_the_event, now)
    if waiting is not None:
        _say(store, id, waiting)
        return False
    place = f"{settings.retrain.export_dir.rstrip('/')}/{id}"
    with store.read() as session:
        target, draft = _identities(session, settings, retrain, event)
    run = _run(retrain, target, draft)
    files = {} if run is None else run.files()
    done, trained = export(store, chosen, rules, place=place, beside=files)
    token = secrets.token_urlsafe(32)
    with store.read() as session:  # what takes long holds no lock
        data = _body(session, settings, retrain, event, target, draft, done, run, token, now)
    with store.write() as session:
        locked = retrains.locked(session, id)
        if locked is None or (locked.state, locked.decision) != (retrain.state, retrain.decision):
            publish.remove(place)  # decided otherwise meanwhile: nobody needs this data
            return False
        locked.data, locked.token_sha256 = asdict(done), hashlib.sha256(token.encode()).hexdigest()
        locked.trained_on = pack_samples(trained)
        advance(session, locked, "requested", now)
        announce(session, settings.webhooks, id=id, type=RETRAIN_REQUESTED, subject=event.segment, at=now, data=data)
    return True


def _say(store: Store, id: str, reason: str) -> None:
    with store.write() as session:
        retrain = retrains.locked(session, id)
        if retrain is not None and retrain.state == "proposed" and retrain.reason != reason:
            retrain.reason = reason


def _source(session: Session, retrain: Retrain, event: Event, settings: Settings) -> Source:
    start = evidence.start_of(event)
    earlier = _answer(retrain) != "redistil"
    if event.cell_id is not None:
        cell = session.get_one(Cell, event.cell_id)
        return source_of(cell, start, settings.retrain.data, earlier=earlier)
    assert event.deployment_id is not None
    tenant = segment_labels(event.segment).get(settings.retrain.data.tenant_label)
    split = None if event.split == "none" else event.split
    occasion = Occasion(event.segment, split, start, tenant, earlier)
    return Source(event.deployment_id, event.draft, occasion)


def _answer(retrain: Retrain) -> str:
    return str((retrain.decision or {}).get("answer", "retrain"))


def _identities(
    session: Session, settings: Settings, retrain: Retrain, event: Event
) -> tuple[dict[str, Any], dict[str, Any]]:
    model = settings.model_for(retrain.model) or Model()
    facts = session.get_one(Deployment, event.deployment_id).facts if event.deployment_id is not None else {}
    path = next((draft.path for draft in model.drafts if draft.name == retrain.draft), None)
    cell = session.get(Cell, event.cell_id) if event.cell_id is not None else None
    sha256 = cell.fingerprint or None if cell is not None else None
    return identity.target(model.target, facts), identity.draft(path, facts, sha256)


def _run(retrain: Retrain, target: dict[str, Any], draft: dict[str, Any]) -> specforge.Run | None:
    """None for a draft that SpecForge does not train, or whose files are not known here."""
    where = target["path"] or target["model"]
    if where is None or draft["path"] is None or draft["strategy"] is None:
        return None
    layers = draft["aux_hidden_state_layer_ids"]
    return specforge.Run(retrain.id, where, draft["path"], draft["strategy"], layers, target["lm_head_key"])


def _body(
    session: Session,
    settings: Settings,
    retrain: Retrain,
    event: Event,
    target: dict[str, Any],
    draft: dict[str, Any],
    done: Export,
    run: specforge.Run | None,
    token: str,
    now: float,
) -> dict[str, Any]:
    """What a pipeline is told, so that it need not ask anything back; no text and no tokens."""
    model = settings.model_for(retrain.model) or Model()
    cell = session.get(Cell, event.cell_id) if event.cell_id is not None else None
    sides = None if cell is None else evidence.Sides.of(session, event, cell)
    facts = session.get_one(Deployment, event.deployment_id).facts if event.deployment_id is not None else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "retrain_id": retrain.id,
        "event_id": event.id,
        "idempotency_key": retrain.id,
        "created_at": datetime.fromtimestamp(now, UTC).isoformat(),
        "purpose": _answer(retrain),
        "metrics": evidence.METRICS,
        "reason": event.details,
        "depths": None if sides is None else sides.depths(),
        "out_of_vocabulary": None if sides is None else sides.out_of_vocabulary(),
        "not_known": dict(sides.not_known()) if sides is not None else dict.fromkeys(OF_CELLS, "the event has no cell"),
        "target": target,
        "draft": {"name": retrain.draft} | draft,
        "serving": {
            "engine": facts.get("engine"),
            "version": facts.get("version"),
            "gamma": model.gamma,
            "rule": model.rule,
            "sampling": [] if cell is None else evidence.sampling(session, cell, evidence.start_of(event)),
        },
        "data": asdict(done),
        "specforge": None if run is None else _specforge(run, done),
        "gates": settings.retrain.gate.model_dump(mode="json"),
        "cooldown_s": settings.retrain.cooldown_hours * 3600,
        "callback": {"url": f"{callback_base(settings)}/v1/retrains/{retrain.id}", "token": token},
    }


def _specforge(run: specforge.Run, done: Export) -> dict[str, Any]:
    return {
        "version": specforge.VERSION,
        "run_configuration": run.configuration(),
        "run_configuration_uri": publish.uri(done.place, specforge.RUN),
        "offline_run_configuration": run.configuration(offline=True),
        "placeholders": list(specforge.PLACEHOLDERS),
        "commands": run.commands(done.conversations_uri),
    }


def callback_base(settings: Settings) -> str:
    return settings.retrain.callback_url or f"http://{settings.control.listen}"


def forget(store: Store, *, keep_days: float, now: float) -> int:
    """Delete the exports of retrains that have been over for so long; their number."""
    over = [state for state in STATES if not FOLLOWS[state]]
    with store.read() as session:
        over_now = retrains.in_states(session, over)
    late = [one for one in over_now if _is_due(one, now - keep_days * DAY)]
    for retrain in late:
        publish.remove((retrain.data or {})["place"])
        with store.write() as session:
            locked = retrains.locked(session, retrain.id)
            if locked is not None:
                locked.data = (locked.data or {}) | {"deleted_at": now}
    return len(late)


def _is_due(retrain: Retrain, before: float) -> bool:
    data = retrain.data or {}
    return retrain.updated_at < before and "place" in data and "deleted_at" not in data
