"""Candidates: a retrained draft is taken in, replayed beside the incumbent on the same samples, and judged.

The history comes first: the newest samples of the event's deployment that the incumbent was judged on and that were not
in the training data, a sample of fixed size, looked at once when all of it is replayed. If that cannot say, the samples
that come in from then on are judged as they come (``drift.gate`` has both tests).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from sqlalchemy.orm import Session

from driftwatch.drift import gate
from driftwatch.drift.gate import Outcome, Verdict
from driftwatch.errors import DriftwatchError
from driftwatch.retrain.announce import CANDIDATE_VERDICT, announce
from driftwatch.retrain.pairs import CellKey, arrays, counts, names, pair
from driftwatch.retrain.progress import advance
from driftwatch.settings import Model, Settings
from driftwatch.store import candidates, replays, retrains
from driftwatch.store.connection import Store, insert_new
from driftwatch.store.schema import Candidate, Deployment, Event, Pair, Replay, Retrain

log = logging.getLogger(__name__)

BATCH = 500
P99_REPLAYS = 2000

End = Literal["promoted", "rejected", "failed"]

_ENDS: Mapping[Outcome, End] = {"promote": "promoted", "reject": "rejected"}
_SAID: Mapping[End, str] = {"promoted": "promote", "rejected": "reject", "failed": "failed"}


class CandidateError(DriftwatchError):
    """A candidate cannot be taken."""


def submit(
    session: Session, settings: Settings, retrain: Retrain, path: str, details: dict[str, Any], now: float
) -> Candidate:
    """Take a candidate for a locked retrain and queue its replays of the history.

    Raises CandidateError for one that may not or cannot be judged, IllegalTransition where the retrain does not wait
    for any.
    """
    folder = _allowed(settings, path)
    model = settings.model_for(retrain.model) or Model()
    if not any(draft.name == retrain.draft and draft.path is not None for draft in model.drafts):
        raise CandidateError(
            f"the draft {retrain.draft!r} is not replayed, so there is nothing to compare with; give it a path in "
            "`models[].drafts[]`"
        )
    advance(session, retrain, "candidate_ready", now)
    candidate = Candidate(
        id=f"candidate-{uuid.uuid4().hex}",
        retrain_id=retrain.id,
        model=retrain.model,
        incumbent=retrain.draft,
        path=str(folder),
        incumbent_fingerprint=candidates.fingerprint_of(session, retrain.model, retrain.draft),
        state="history",
        history_until=0,
        queued_until=0,
        queued_live=0,
        details=details,
        created_at=now,
        updated_at=now,
    )
    session.add(candidate)
    session.flush()
    event = session.get_one(Event, retrain.event_id)
    trained = candidates.unpack_samples(retrain.trained_on)
    most = settings.retrain.gate.history
    found = candidates.judged_by_incumbent(
        session, candidate, model.gamma, deployment_id=event.deployment_id, after=0, limit=most + len(trained)
    )
    history = [sample for sample in found if sample not in trained][:most]
    candidate.history_until = candidate.queued_until = max((*found, *trained), default=0)
    candidates.queue(session, candidate, history, now)
    advance(session, retrain, "evaluating", now, f"{len(history)} samples of history")
    return candidate


def _allowed(settings: Settings, path: str) -> Path:
    """Paths come over HTTP: only below one folder, symbolic links followed."""
    root = settings.retrain.candidates_dir
    if root is None:
        raise CandidateError("`retrain.candidates_dir` is not set: no candidate is taken over HTTP")
    try:
        folder = Path(path).resolve()
    except (OSError, ValueError, RuntimeError):
        raise CandidateError("path: not a path; give a folder below `retrain.candidates_dir`") from None
    if not folder.is_relative_to(root.resolve()) or folder == root.resolve():
        raise CandidateError(f"{path}: not below `retrain.candidates_dir`; put the candidate there")
    return folder


def judge(store: Store, settings: Settings, now: float) -> int:
    """Take what the shadow has replayed, and decide where that is possible; the number of candidates decided."""
    with store.read() as session:
        waiting = [one.id for one in candidates.undecided(session)]
    decided = 0
    for id in waiting:
        taken = _take(store, settings, id, now)
        fresh = taken > 0
        while taken == BATCH:
            taken = _take(store, settings, id, now)
        with store.write() as session:
            decided += _judge(session, settings, candidates.locked(session, id), now, fresh=fresh)
    return decided


def _take(store: Store, settings: Settings, id: str, now: float) -> int:
    """Turn a batch of replays into pairs; their number."""
    with store.write() as session:
        candidate = candidates.locked(session, id)
        gamma = _gamma(settings, candidate)
        rows = candidates.unpaired(session, candidate, gamma, BATCH)
        before = candidates.count_pairs(session, candidate)
        try:
            found = [pair(candidate, *row, gamma=gamma) | {"taken": before + i} for i, row in enumerate(rows, 1)]
        except ValueError:
            candidates.refuse(session, id, f"its replays do not reach gamma {gamma}, which was set meanwhile")
            return 0
        insert_new(session, Pair, found, "sample_id")
        seen = {own.fingerprint for _, own, _ in rows} | {candidate.fingerprint} - {None}
        if len(seen) > 1:
            candidates.refuse(session, id, "its weights changed while it was judged; hand in what stays as it is")
        if rows:
            candidate.fingerprint, candidate.updated_at = rows[-1][1].fingerprint, now
        return len(rows)


def _judge(session: Session, settings: Settings, candidate: Candidate, now: float, *, fresh: bool) -> bool:
    if candidate.state not in candidates.UNDECIDED:
        return False
    if candidate.reason is not None:  # the shadow's word that it cannot be replayed
        return _finish(session, settings, candidate, "failed", [candidate.reason], now)
    if candidate.updated_at < now - settings.retrain.expire_hours * 3600:
        return _finish(session, settings, candidate, "failed", ["nothing was replayed for too long"], now)
    if candidate.state == "live":
        return _on_live(session, settings, candidate, now, fresh=fresh)
    if candidates.waiting(session, candidate, until=candidate.history_until):
        return False
    return _on_history(session, settings, candidate, now)


def _on_history(session: Session, settings: Settings, candidate: Candidate, now: float) -> bool:
    rows = [row for row in candidates.pairs(session, candidate) if row.sample_id <= candidate.history_until]
    cells, pairs = arrays(rows)
    verdict = gate.fixed(pairs, names(cells), _asked(session, candidate, cells), _rules(settings))
    if verdict.tail.limit is None:
        verdict = replace(verdict, tail=replace(verdict.tail, limit=_p99(session, settings, candidate)))
    candidate.verdict = _told(candidate, verdict, cells)
    if verdict.outcome != "more_data":
        return _finish(session, settings, candidate, _ENDS[verdict.outcome], list(verdict.reasons), now)
    candidate.state, candidate.updated_at = "live", now
    return _on_live(session, settings, candidate, now, fresh=True)


def _on_live(session: Session, settings: Settings, candidate: Candidate, now: float, *, fresh: bool) -> bool:
    most, after, gamma = settings.retrain.gate.live, candidate.queued_until, _gamma(settings, candidate)
    more = candidates.judged_by_incumbent(
        session, candidate, gamma, deployment_id=None, after=after, limit=most - candidate.queued_live
    )
    candidates.queue(session, candidate, more, now)
    candidate.queued_until = max((candidate.queued_until, *more))
    candidate.queued_live += len(more)
    if not fresh and candidate.queued_live < most:
        return False
    rows = [row for row in candidates.pairs(session, candidate) if row.sample_id > candidate.history_until]
    cells, pairs = arrays(rows, sequential=True)
    limit = ((candidate.verdict or {}).get("tail") or {}).get("limit")
    verdict = gate.sequential(pairs, names(cells), _asked(session, candidate, cells), limit, _rules(settings))
    if verdict.outcome != "more_data":
        candidate.verdict = _told(candidate, verdict, cells)
        return _finish(session, settings, candidate, _ENDS[verdict.outcome], list(verdict.reasons), now)
    if candidate.queued_live < most or candidates.waiting(session, candidate):
        return False
    reasons = [f"undecided after {len(rows)} live samples", *verdict.reasons]
    return _finish(session, settings, candidate, "rejected", reasons, now)


def _p99(session: Session, settings: Settings, candidate: Candidate) -> float | None:
    """The incumbent's p99 of steps per token where the history has none: of its own newest replays."""
    gamma = _gamma(settings, candidate)
    own = candidates.by_incumbent(Replay, candidate, gamma)
    newest = replays.newest(session, Deployment.model == candidate.model, *own, limit=P99_REPLAYS)
    steps = np.array([counts(one.weights, gamma)["steps"] for one in newest])
    return gate.p99(steps, np.array([float(one.weights.tokens) for one in newest]))


def _gamma(settings: Settings, candidate: Candidate) -> int:
    return (settings.model_for(candidate.model) or Model()).gamma


def _rules(settings: Settings) -> gate.Rules:
    gates = settings.retrain.gate
    return gate.Rules(gates.margin, gates.tolerance, gates.min_share, gates.tail_tolerance, gates.error)


def _asked(session: Session, candidate: Candidate, cells: list[CellKey]) -> list[int]:
    """The cells that the retrain was asked for: those of its event's segment, and split where the event has one."""
    event = session.get_one(Event, session.get_one(Retrain, candidate.retrain_id).event_id)
    mine = ("on", "off", "none") if event.split == "none" else (event.split,)
    return [i for i, (segment, split) in enumerate(cells) if segment == event.segment and split in mine]


def _told(candidate: Candidate, verdict: Verdict, cells: list[CellKey]) -> dict[str, Any]:
    """A verdict as the API and the webhook show it."""
    where = [
        dict(zip(("segment", "split"), cells[row.cell], strict=True)) for row in verdict.table if row.cell is not None
    ]
    return {
        "outcome": verdict.outcome,
        "phase": candidate.state,
        "reasons": list(verdict.reasons),
        "table": [asdict(row) | cell for row, cell in zip(verdict.table, where, strict=True)],
        "overall": asdict(verdict.overall),
        "tail": asdict(verdict.tail),
    }


def _finish(
    session: Session, settings: Settings, candidate: Candidate, state: End, reasons: list[str], now: float
) -> bool:
    """Close a candidate and its retrain, and tell it; in one transaction."""
    candidate.state, candidate.reason, candidate.updated_at = state, "; ".join(reasons), now
    candidates.drop_work(session, candidate)
    retrain = retrains.locked(session, candidate.retrain_id)
    if retrain is None or retrain.state != "evaluating":
        return True
    advance(session, retrain, state, now, candidate.reason)
    shown = candidate.verdict or {"phase": None, "table": [], "overall": None, "tail": None}
    data = shown | {
        "retrain_id": retrain.id,
        "candidate_id": candidate.id,
        "path": candidate.path,
        "fingerprint": candidate.fingerprint,
        "verdict": _SAID[state],
        "reasons": reasons,
    }
    event = session.get_one(Event, retrain.event_id)
    announce(
        session,
        settings.webhooks,
        id=f"{candidate.id}-verdict",
        type=CANDIDATE_VERDICT,
        subject=event.segment,
        at=now,
        data=data,
    )
    return True
