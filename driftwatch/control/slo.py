"""Is the p99 of what users wait for within its limit? Multi-window, multi-burn-rate, as the Prometheus rules ask it.

A p99 under a limit is at most 1 % of requests over it: that share is the budget, and the burn rate is the share that
was over, in budgets (Beyer et al., The Site Reliability Workbook, 2018, chapter 5). It must be exceeded in a long
window, so that it matters, and in a short one, so that it still lasts:

    page:    14.4 budgets over 1 h and 5 min, or 6 over 6 h and 30 min        ticket:  1 over 3 d and 6 h

Of fewer than 100 requests a p99 says nothing: a long window that has fewer does not count. The shares are of all
traffic, by the samples' weights; where these differ, requests are the effective ones.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sqlalchemy.orm import Session

from driftwatch.control import events
from driftwatch.records import segment_labels
from driftwatch.settings import Settings, Slo
from driftwatch.store import latencies
from driftwatch.store.connection import Store
from driftwatch.store.latencies import Figure, Over
from driftwatch.store.schema import Event

log = logging.getLogger(__name__)

Severity = Literal["page", "ticket"]
State = Literal["page", "ticket", "ok", "not enough data"]

ENOUGH = 100
"""Requests of a long window."""


class Burn(NamedTuple):
    severity: Severity
    rate: float
    long_s: int
    short_s: int


BURNS = (
    Burn("page", 14.4, 3600, 300),
    Burn("page", 6.0, 6 * 3600, 1800),
    Burn("ticket", 1.0, 3 * 24 * 3600, 6 * 3600),
)
WINDOWS = sorted({seconds for burn in BURNS for seconds in (burn.long_s, burn.short_s)})

KINDS: Mapping[Figure, str] = {"ttft": "ttft_slo", "tpot": "tpot_slo"}
"""Kinds of event."""
DEFINITIONS: Mapping[Figure, str] = {
    "ttft": "share of requests whose first token came later than the limit",
    "tpot": "share of requests whose time per output token was over the limit",
}


@dataclass(frozen=True)
class Verdict:
    """Of one segment and figure at one time."""

    figure: Figure
    segment: str
    limit_s: float
    share: float
    windows: Mapping[int, Over]
    """By length in seconds."""

    @property
    def burning(self) -> Burn | None:
        """The first that is exceeded."""
        return next((burn for burn in BURNS if self._told(burn) and self._exceeded(burn)), None)

    @property
    def state(self) -> State:
        if (burn := self.burning) is not None:
            return burn.severity
        return "ok" if any(self._told(burn) for burn in BURNS) else "not enough data"

    def _told(self, burn: Burn) -> bool:
        return self.windows[burn.long_s].requests >= ENOUGH - 1e-6

    def _exceeded(self, burn: Burn) -> bool:
        found = (self.windows[seconds].share for seconds in (burn.long_s, burn.short_s))
        return all(share is not None and share > burn.rate * self.share for share in found)

    @property
    def burn_rates(self) -> dict[int, float]:
        """By window, the share that was over in budgets; only where enough requests came in the long one beside it."""
        told = {seconds for burn in BURNS if self._told(burn) for seconds in (burn.long_s, burn.short_s)}
        shares = {seconds: self.windows[seconds].share for seconds in sorted(told)}
        return {seconds: share / self.share for seconds, share in shares.items() if share is not None}

    def as_dict(self) -> dict[str, Any]:
        burn = self.burning
        return {
            "figure": f"{self.figure}_s",
            "limit_s": self.limit_s,
            "share": self.share,
            "state": self.state,
            "burn": None if burn is None else burn._asdict(),
            "windows": {
                str(seconds): {"requests": found.requests, "over": found.share}
                for seconds, found in self.windows.items()
            },
        }


def window_name(seconds: int) -> str:
    """Whole minutes as Prometheus writes a duration, in its largest unit: ``5m``, ``6h``, ``3d``."""
    units = (("d", 24 * 3600), ("h", 3600), ("m", 60))
    return next(f"{seconds // size}{unit}" for unit, size in units if seconds % size == 0)


def limits(slo: Slo) -> dict[Figure, float]:
    """Those that are set."""
    found: dict[Figure, float | None] = {"ttft": slo.ttft_s, "tpot": slo.tpot_s}
    return {figure: limit for figure, limit in found.items() if limit is not None}


def verdicts(session: Session, slo: Slo, now: float, segment: str | None = None) -> list[Verdict]:
    """Of every segment that had a request in the longest window, or of one, for each limit that is set."""
    found = []
    for figure, limit_s in limits(slo).items():
        windows = {seconds: latencies.over(session, figure, limit_s, seconds, now, segment) for seconds in WINDOWS}
        for name in sorted(windows[WINDOWS[-1]]):
            mine = {seconds: by_segment.get(name, Over()) for seconds, by_segment in windows.items()}
            found.append(Verdict(figure, name, limit_s, slo.share, mine))
    return found


def judge(store: Store, settings: Settings, now: float) -> None:
    """Open, sharpen and close the events of all segments."""
    with store.write() as session:
        still_open = {(one.kind, one.segment): one for one in _open(session)}
        for verdict in verdicts(session, settings.slo, now):
            event = still_open.pop((KINDS[verdict.figure], verdict.segment), None)
            _tell(session, settings, verdict, event, now)
        for event in still_open.values():
            events.end(session, settings, event, {"reason": "no requests, or the limit is no longer set"}, now)


def _open(session: Session) -> list[Event]:
    return list(events.open_events(session, Event.kind.in_(list(KINDS.values()))))


def _tell(session: Session, settings: Settings, verdict: Verdict, event: Event | None, now: float) -> None:
    burn = verdict.burning
    if burn is None:
        if event is not None:
            events.end(session, settings, event, {"slo": verdict.as_dict()}, now)
        return
    if event is None:
        log.warning("%s of %s: over its limit %s times too often", verdict.figure, verdict.segment, f"{burn.rate:g}")
        event = _event(verdict, burn, now)
        session.add(event)
        events.introduce(session, settings, event)
    elif event.details["severity"] == "ticket" and burn.severity == "page":
        event.details = event.details | _figures(verdict, burn)
        events.update(session, settings, event, now)


def _figures(verdict: Verdict, burn: Burn) -> dict[str, Any]:
    found = verdict.windows[burn.long_s]
    current = {"value": found.share, "lower": None, "upper": None, "requests": round(found.requests)}
    weighed = {"numerator": found.over, "denominator": found.weight}
    return {"severity": burn.severity, "current": current | weighed, "slo": verdict.as_dict()}


def _event(verdict: Verdict, burn: Burn, now: float) -> Event:
    kind = KINDS[verdict.figure]
    details = {
        "kind": kind,
        "segment": verdict.segment,
        "labels": segment_labels(verdict.segment),
        "metric": kind,
        "definition": DEFINITIONS[verdict.figure],
        "limit": burn.rate * verdict.share,
        "action": "none",
        "evidence": [],
        "against": [],
    }
    return Event(
        id=uuid.uuid4().hex,
        kind=kind,
        cell_id=None,
        deployment_id=None,
        segment=verdict.segment,
        split="none",
        draft="",
        cause="unknown",
        opened_at=now,
        closed_at=None,
        request_id="",
        start_request_id=None,
        details=details | _figures(verdict, burn),
    )
