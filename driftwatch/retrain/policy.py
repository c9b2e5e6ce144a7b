"""When drift becomes a request to retrain. Every decision is stored with its reasons, the noes too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, time
from fnmatch import fnmatchcase
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from driftwatch.retrain.progress import advance
from driftwatch.retrain.states import OPEN, State
from driftwatch.settings import Answer, Policy
from driftwatch.store import retrains
from driftwatch.store.connection import lock
from driftwatch.store.schema import Deployment, Event, Retrain

ADVICE: Mapping[str, str] = {
    "draft": "roll the draft back, or give it the target that it was trained for",
    "engine": "mend the engine's configuration: the draft is as good as it was",
    "load": "lower gamma, or switch speculation off at this load",
    "target": "roll the target back, or distil the draft anew on its answers",
}
"""What to do about causes that training does not help against (drift/attribution has the table)."""


@dataclass(frozen=True)
class Gain:
    """What a day's tokens would cost less, were they accepted as before, in the currency of the prices."""

    value: float
    lower: float | None
    upper: float | None

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> Gain | None:
        """Of an event; None where costs or prices are not known, or data do not suffice."""
        found = details.get("value_per_day")
        if not isinstance(found, dict) or found["value"] is None:
            return None
        return cls(found["value"], found["lower"], found["upper"])

    def __str__(self) -> str:
        limits = "no limits" if self.lower is None or self.upper is None else f"{self.lower:.2f} to {self.upper:.2f}"
        return f"{self.value:.2f} ({limits})"


@dataclass(frozen=True)
class Question:
    """What is known when an alarm asks for training; None is unknown."""

    segment: str
    split: str
    cause: str
    action: str | None
    fall: float | None
    """Baseline less current of the watched figure."""
    value_per_day: Gain | None
    instead: str | None
    """A reason from outside not to ask."""
    cooling: str | None
    """The earlier retrain of this cell whose cooldown runs."""
    open: str | None
    """The retrain of this draft that is not over."""


@dataclass(frozen=True)
class Decision:
    """``answer`` is what the cause asks for; with any reason against it nothing is asked."""

    answer: Answer
    reasons: tuple[str, ...]

    @property
    def ask(self) -> bool:
        return not self.reasons


def decide(question: Question, policy: Policy) -> Decision:
    """The whole policy but for what a request can wait for (see :func:`waits`)."""
    answer = _answer(question, policy)
    reasons: list[str] = [] if question.instead is None else [question.instead]
    if answer == "none":
        advice = ADVICE.get(question.cause, f"do what the event recommends: {question.action or 'look at it'}")
        reasons.append(f"no training against the cause {question.cause}: {advice}")
    if question.split not in policy.splits:
        reasons.append(f"the split {question.split} is not in retrain.policy.splits")
    if not any(fnmatchcase(question.segment, pattern) for pattern in policy.segments):
        reasons.append(f"the segment {question.segment} is not in retrain.policy.segments")
    if policy.min_fall > 0 and (question.fall is None or question.fall < policy.min_fall):
        fall = "unknown" if question.fall is None else f"{question.fall:.3f}"
        reasons.append(f"the fall is {fall}, retrain.policy.min_fall {policy.min_fall}")
    gain, least = question.value_per_day, policy.min_value_per_day
    if least is not None and (gain is None or gain.value < least):
        said = "unknown" if gain is None else str(gain)
        reasons.append(f"the expected gain a day is {said}, retrain.policy.min_value_per_day {least}")
    if question.cooling is not None:
        reasons.append(f"cooldown since {question.cooling}")
    if question.open is not None:
        reasons.append(f"{question.open} of the same draft is open")
    if policy.dry_run and not reasons:
        reasons.append(f"dry run: would have asked to {answer}")
    return Decision(answer, tuple(reasons))


def _answer(question: Question, policy: Policy) -> Answer:
    if question.cause in policy.causes:
        return policy.causes[question.cause]
    if question.cause == "unknown" and question.action in (None, "retrain"):
        return "retrain"
    return "none"


def waits(policy: Policy, samples: int, now: float) -> str | None:
    """What a decided request still waits for."""
    if samples < policy.min_samples:
        return f"waits for samples: {samples} of {policy.min_samples}"
    if policy.quiet_hours is not None and _within(policy.quiet_hours, now):
        return f"waits for the end of the quiet hours {policy.quiet_hours} UTC"
    return None


def _within(hours: str, now: float) -> bool:
    start, end = (time.fromisoformat(part) for part in hours.split("-"))
    at = datetime.fromtimestamp(now, UTC).time()
    return start <= at < end if start <= end else at >= start or at < end


def propose(
    session: Session,
    event: Event,
    *,
    cooldown_s: float,
    instead: str | None = None,
    policy: Policy | None = None,
    now: float | None = None,
) -> Retrain:
    """Decide, in the event's own transaction; the decision is stored with its reasons either way.

    Asked once more about an event, whose cause is another by now, it changes what was decided as long as nobody was
    told. ``instead`` is a reason not to ask, whatever else holds. Decisions are made one after the other, so that two
    events of one draft never both find none open.
    """
    lock(session, "driftwatch:retrain")
    deployment = session.get(Deployment, event.deployment_id) if event.deployment_id is not None else None
    model = deployment.model if deployment else ""
    cooling = retrains.asked_since(session, event.opened_at - cooldown_s, model, event, "suppressed")
    still_open = retrains.open_of(session, model, event, OPEN)
    question = Question(
        segment=event.segment,
        split=event.split,
        cause=str(event.details.get("cause") or event.cause),
        action=event.details.get("action"),
        fall=_fall(event.details),
        value_per_day=Gain.of(event.details),
        instead=instead,
        cooling=cooling.id if cooling else None,
        open=still_open.id if still_open else None,
    )
    decision = decide(question, policy or Policy())
    state: State = "proposed" if decision.ask else "suppressed"
    reason = "; ".join(decision.reasons) or None
    asked = {"answer": decision.answer, "reasons": list(decision.reasons), "asked": asdict(question)}
    retrain = session.scalars(select(Retrain).where(Retrain.event_id == event.id).with_for_update()).first()
    if retrain is None:
        retrain = Retrain(
            id=f"retrain-{event.id}",
            event_id=event.id,
            cell_id=event.cell_id,
            model=model,
            draft=event.draft,
            state=state,
            reason=reason,
            decision=asked,
            created_at=event.opened_at,
            updated_at=event.opened_at,
        )
        retrains.add(session, retrain)
    elif retrain.state in ("suppressed", "proposed"):
        retrain.decision = asked
        if retrain.state != state:
            advance(session, retrain, state, now or event.opened_at, reason)
    return retrain


def _fall(details: Mapping[str, Any]) -> float | None:
    before, now = (_value(details.get(key)) for key in ("baseline", "current"))
    return None if before is None or now is None else before - now


def _value(figure: Any) -> float | None:
    return figure.get("value") if isinstance(figure, dict) else None
