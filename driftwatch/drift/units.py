"""Independent units out of a stream of requests: each request by itself, or each session where its label is known.

Turns of one session share what makes them easy or hard, so their mean may stay low for many requests in a row with no
change at all; a sequential test that takes them one by one alarms several times as often as it promises. A session is
therefore collected and enters once, when it closes.

Memory is bounded. A session closes when it has been silent for ``idle_s``, when it has lasted ``max_age_s``, or, the
least recently seen first, when more than ``max_open`` are open; what comes later under the same label is a new unit.
So: every request enters exactly one unit; a session that fits these bounds is exactly one unit; and since closing
looks at times and labels only, never at acceptance, the sums over closed units are not selected. A longer session is
split into few large parts that lie at least ``max_age_s`` (or many other sessions) apart; ``aged`` and ``evicted``
count how often that may have happened. The price is delay: a session is judged only after it closed.

Times are seconds of any origin. Where a history has none, pass the request's index and give the bounds in requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HALF_WEIGHT = 5.0
"""Tested proposals at which a unit has half its full weight."""

IDLE_S = 1800.0
MAX_AGE_S = 7200.0
MAX_OPEN = 256


@dataclass(frozen=True)
class Unit:
    """Counts of one unit; ``index`` and ``first_s`` are those of its first request."""

    index: int
    first_s: float
    last_s: float
    requests: int
    accepted: float
    tested: float

    @property
    def rate(self) -> float:
        """Hit rate of this unit alone."""
        return self.accepted / self.tested

    @property
    def weight(self) -> float:
        """T / (T + 5): little trust in the rate of a few tokens, no more than 1 in the longest request.

        A cap on length instead would leave typical requests a small fraction of the scale, and with it of the
        evidence.
        """
        return self.weighed(HALF_WEIGHT)

    def weighed(self, half: float) -> float:
        """T / (T + half): 1 for every unit at half 0; close to proportional to T where half is far above T."""
        return self.tested / (self.tested + half) if self.tested > 0.0 else 0.0

    def to_json(self) -> list[Any]:
        return [self.index, self.first_s, self.last_s, self.requests, self.accepted, self.tested]

    @classmethod
    def from_json(cls, data: list[Any]) -> Unit:
        return cls(*data)


@dataclass
class Units:
    """The open sessions of one cell, least recently seen first."""

    idle_s: float = IDLE_S
    max_age_s: float = MAX_AGE_S
    max_open: int = MAX_OPEN
    now_s: float | None = None
    open: dict[str, Unit] = field(default_factory=dict)
    aged: int = 0
    evicted: int = 0

    def add(self, *, index: int, time_s: float, session: str | None, accepted: float, tested: float) -> list[Unit]:
        """Take one request; return the units that closed, in a fixed order.

        A request without tested proposals says nothing and leaves its session as it was. Times that run backwards
        count as the latest time seen. Raises ValueError for counts that are no counts.
        """
        if not (0.0 <= accepted <= tested * (1.0 + 1e-9) and math.isfinite(tested)):
            raise ValueError(f"request {index}: {accepted} accepted of {tested} tested proposals cannot be")
        accepted = min(accepted, tested)  # fractional weights may round a whole acceptance up
        closed = self.expire(time_s)
        now = self._clock(time_s)
        if tested == 0.0:
            return closed
        if session is None:
            closed.append(Unit(index, now, now, 1, accepted, tested))
            return closed
        held = self.open.pop(session, None)
        if held is not None and now - held.first_s >= self.max_age_s:
            closed.append(held)
            self.aged += 1
            held = None
        if held is None:
            held = Unit(index, now, now, 0, 0.0, 0.0)
        # Popped and set again: a dict keeps insertion order, so the first key is the least recently seen session.
        self.open[session] = Unit(
            held.index, held.first_s, now, held.requests + 1, held.accepted + accepted, held.tested + tested
        )
        if len(self.open) > self.max_open:
            closed.append(self.open.pop(next(iter(self.open))))
            self.evicted += 1
        return closed

    def expire(self, time_s: float) -> list[Unit]:
        """Close the sessions that are silent since ``idle_s``.

        Requests alone move the clock: one who looks from outside may be days ahead of a history that still comes in.
        """
        now = time_s if self.now_s is None else max(self.now_s, time_s)
        closed = []
        while self.open:
            session, unit = next(iter(self.open.items()))
            if now - unit.last_s < self.idle_s:
                break
            del self.open[session]
            closed.append(unit)
        return closed

    def close(self, session: str) -> list[Unit]:
        """Close one session now: for histories without times, where it is known which line is its last."""
        held = self.open.pop(session, None)
        return [] if held is None else [held]

    def drain(self) -> list[Unit]:
        """Close every session: at the end of a history."""
        closed = list(self.open.values())
        self.open.clear()
        return closed

    def to_json(self) -> dict[str, Any]:
        return {
            "idle_s": self.idle_s,
            "max_age_s": self.max_age_s,
            "max_open": self.max_open,
            "now_s": self.now_s,
            "open": [[session, unit.to_json()] for session, unit in self.open.items()],
            "aged": self.aged,
            "evicted": self.evicted,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Units:
        held = {session: Unit.from_json(unit) for session, unit in data["open"]}
        return cls(**{**data, "open": held})

    def _clock(self, time_s: float) -> float:
        self.now_s = time_s if self.now_s is None else max(self.now_s, time_s)
        return self.now_s
