"""Deployments: what served a request, as far as it is known, and when that changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.records import Record
from driftwatch.store.connection import lock
from driftwatch.store.schema import Deployment

Part = Literal["target", "draft", "engine"]

PARTS: Mapping[Part, tuple[str, ...]] = {
    "target": ("target", "weight", "quantization", "dtype"),
    "draft": ("draft", "speculative", "gamma", "rule"),
    "engine": ("engine", "version", "kv_cache", "parallelism", "return"),
}
"""Facts by the part of a deployment that they describe: these, and what goes on from them (``draft_quantization``)."""

OF_REQUESTS = frozenset({"tokens", "adapter"})
"""Facts of a request rather than of what serves: they separate figures, but different ones stand side by side."""

FINGERPRINT = "system_fingerprint"
"""A hash over version and settings (vLLM): it changes with any of them, and tells which only if nothing else does."""


@dataclass(frozen=True)
class Change:
    """A deployment that contradicts everything known of its model."""

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
    second that differs by a request's own facts only is none either.
    """
    model, facts = record.model or "", facts_of(record)
    lock(session, f"deployment of {model}")  # or two intakes that meet a new one at once would both create it
    newest_first = select(Deployment).where(Deployment.model == model).order_by(Deployment.id.desc())
    earlier = session.scalars(newest_first).all()
    for deployment in earlier:
        known = deployment.facts
        if _fit(known, facts):
            if now > deployment.last_seen + 1:
                deployment.last_seen = now
            if facts.keys() - known.keys():
                deployment.facts = known | facts
            return deployment.id, None
    deployment = Deployment(model=model, facts=facts, first_seen=now, last_seen=now)
    session.add(deployment)
    session.flush()
    serving = _serving(facts)
    if not earlier or any(_fit(_serving(one.facts), serving) for one in earlier):
        return deployment.id, None
    before = earlier[0]
    changed = {
        key: [before.facts[key], value]
        for key, value in sorted(serving.items())
        if key in before.facts and before.facts[key] != value
    }
    return deployment.id, Change(model, deployment.id, before.id, changed, cause_of(changed), record.id)


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
