"""Deployments: what served a request, as far as it is known, and when that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.records import Record
from driftwatch.store.connection import lock
from driftwatch.store.schema import Deployment, Event, Sample

CHANGED = "deployment_changed"
"""Kind of the events that changes are told as."""

Part = Literal["target", "draft", "engine"]

PARTS: Mapping[Part, tuple[str, ...]] = {
    "target": ("target", "weight", "quantization", "dtype"),
    "draft": ("draft", "speculative", "gamma", "rule", "verification"),
    "engine": ("engine", "version", "kv_cache", "parallelism", "return"),
}
"""Facts by the part of a deployment that they describe: these, and what goes on from them (``draft_quantization``)."""

OF_REQUESTS = frozenset({"tokens", "adapter"})
"""Facts of a request rather than of what serves: they separate figures, but different ones stand side by side."""

FINGERPRINT = "system_fingerprint"
"""A hash over version and settings (vLLM): it changes with any of them, and tells which only if nothing else does."""


SEEN_S = 1.0
"""How exactly it is known when a deployment was last seen."""
TAKEN_OVER = 30
"""After so many samples of a model without one of a deployment, that one has gone. In a roll-out both have samples; a
pool with a tenth of the traffic is missed in 4 % of such stretches, one with half of it in none."""


@dataclass(frozen=True)
class Change:
    """A deployment that contradicts what served its model before: a new one, or an earlier one that is back."""

    model: str
    deployment_id: int
    before_id: int
    facts: dict[str, list[Any]]
    """What changed: before and after of each fact."""
    cause: Part | Literal["unknown"]
    request_id: str


def facts_of(record: Record) -> dict[str, str]:
    """Known facts of what served a record.

    Whether token ids were served or made again from text is one of them: results on retokenised text are not exact
    and never pooled with exact ones.
    """
    facts = dict(record.deployment)
    if record.adapter is not None:
        facts["adapter"] = record.adapter
    return facts | {"tokens": "served" if record.has_ids else "retokenised"}


def find_or_create(session: Session, record: Record, now: float) -> tuple[int, Change | None]:
    """The newest deployment that no known fact contradicts; facts that were unknown are learned.

    A new one is a change if no earlier deployment of the model could be the same server: so the first is none, and a
    second that differs by a request's own facts only is none either. One that was there before is a change if another
    had taken over meanwhile: it is rolled back to, and no remainder of a roll-out.
    """
    model, facts = record.model or "", facts_of(record)
    newest_first = select(Deployment).where(Deployment.model == model).order_by(Deployment.id.desc())
    earlier = session.scalars(newest_first).all()
    same = next((one for one in earlier if _fit(one.facts, facts)), None)
    known = same is not None and not facts.keys() - same.facts.keys() and now <= same.last_seen + SEEN_S
    if same is not None and known and _taken_over(session, same, earlier) is None:
        return same.id, None  # the common case: intakes need not wait for each other
    lock(session, f"deployment of {model}")  # or two intakes that meet a new one at once would both create it
    earlier = session.scalars(newest_first.execution_options(populate_existing=True)).all()
    for deployment in earlier:
        if _fit(deployment.facts, facts):
            if now > deployment.last_seen + SEEN_S:
                deployment.last_seen = now
            if facts.keys() - deployment.facts.keys():
                deployment.facts = deployment.facts | facts
            before = _taken_over(session, deployment, earlier)
            return deployment.id, _change(before, deployment, facts, record) if before is not None else None
    deployment = Deployment(model=model, facts=facts, first_seen=now, last_seen=now)
    session.add(deployment)
    session.flush()
    serving = _serving(facts)
    if not earlier or any(_fit(_serving(one.facts), serving) for one in earlier):
        return deployment.id, None
    return deployment.id, _change(earlier[0], deployment, facts, record)


def is_gone(session: Session, deployment: Deployment) -> bool:
    """Whether its model is served by another by now."""
    known = session.scalars(select(Deployment).where(Deployment.model == deployment.model)).all()
    return _taken_over(session, deployment, known) is not None


def since(session: Session) -> dict[int, float]:
    """When each deployment last began to serve: when it was first seen, or went back to.

    One that was rolled back to so comes after the one that it replaced.
    """
    known = {one.id: one for one in session.scalars(select(Deployment))}
    found = {one.id: one.first_seen for one in known.values()}
    back = (
        select(Event.deployment_id, Event.opened_at)
        .join(Deployment, Deployment.id == Event.deployment_id)
        .where(Event.kind == CHANGED, Event.opened_at > Deployment.first_seen)
    )
    for row in session.execute(back):
        to = known[row.deployment_id]
        for one in known.values():  # other adapters on the same server as well
            if one.model == to.model and _fit(_serving(to.facts), _serving(one.facts)):
                found[one.id] = max(found[one.id], row.opened_at)
    return found


def _taken_over(session: Session, deployment: Deployment, known: Sequence[Deployment]) -> Deployment | None:
    """What served in place of this deployment until now; None if it has served all along."""
    last = session.scalars(
        select(Event.deployment_id)
        .join(Deployment, Deployment.id == Event.deployment_id)
        .where(Event.kind == CHANGED, Deployment.model == deployment.model)
        .order_by(Event.opened_at.desc())
        .limit(1)
    ).first()
    by_id = {one.id: one for one in known}
    serving = _serving(deployment.facts)
    if last not in by_id or _fit(_serving(by_id[last].facts), serving):
        return None  # nothing ever took over, or this is what did
    recent = session.scalars(
        select(Sample.deployment_id).where(Sample.deployment_id.in_(by_id)).order_by(Sample.id.desc()).limit(TAKEN_OVER)
    ).all()
    if len(recent) < TAKEN_OVER or any(_fit(_serving(by_id[id].facts), serving) for id in set(recent)):
        return None
    return by_id[recent[0]]


def _change(before: Deployment, after: Deployment, facts: Mapping[str, Any], record: Record) -> Change:
    changed = {
        key: [before.facts[key], value]
        for key, value in sorted(_serving(facts).items())
        if key in before.facts and before.facts[key] != value
    }
    return Change(after.model, after.id, before.id, changed, cause_of(changed), record.id)


def cause_of(changed: Mapping[str, Any]) -> Part | Literal["unknown"]:
    """The one part that all changed facts describe, else ``unknown``."""
    if set(changed) == {FINGERPRINT}:
        return "engine"
    parts = {_part(key) for key in changed if key != FINGERPRINT}
    return parts.pop() if len(parts) == 1 else "unknown"


def _part(key: str) -> Part | Literal["unknown"]:
    for part, keys in PARTS.items():
        if any(key == one or key.startswith((f"{one}_", f"{one}.")) for one in keys):
            return part
    return "unknown"


def _fit(known: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return all(known.get(key, value) == value for key, value in facts.items())


def _serving(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if key not in OF_REQUESTS}
