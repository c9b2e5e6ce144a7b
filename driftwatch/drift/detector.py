"""Detects that a cell's hit rate has fallen by more than the tolerance, with a promised false-alarm rate.

Per unit, with A of T tested proposals accepted and w = T / (T + 5):

    Z = w * (A / T - m) / (1 - m),     m = baseline lower limit - tolerance

feeds the e-detector of ``evidence``. The hit rate, because it is free of gamma and of where an output ends; w-weighted,
because m is the same weighted mean. As long as the mean of the next unit, given the past, is at least m, an alarm
comes on average once in ``threshold`` units or more rarely, whatever the distribution and whatever the dependence
inside a unit; well above m practically never. (So units must be independent of each other: see ``units``.)

``threshold`` is the wanted number of requests between false alarms, times the number of detectors that each request
feeds (its cell, and roll-ups if they are tested too). Not times the number of cells: cells partition the requests, so
sum M - n over all cells together is a supermartingale, and the same threshold in each gives at most requests /
threshold alarms over all of them.

An alarm opens an event, which stays open until a test of its own closes it. That one bets in the opposite direction on
a mean above m' = lower limit - tolerance / 2: halfway, so neither a rate stuck at the alarm's floor nor one healthy
but at the low end of the baseline's interval lies on its edge. A mean that stays at m' or below closes at most once in
10,000 units (or ``threshold``, if that is less). Less will not do: at 100, a lasting fall of 0.10 closed and opened
again every few hundred requests in simulation; at 10,000 never in 60,000, and a true recovery took some 250 to 500.
Then detection starts afresh. One change so gives one event.

A baseline no higher than the tolerance leaves nothing to fall to: the detector then is ``blind``, never alarming. (With
m merely clipped above zero, a draft that never worked would drift for ever.) Such a draft is the break-even test's
business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from driftwatch.drift.evidence import Evidence, Mark, fall, rise
from driftwatch.drift.interval import EMPTY, Estimate, Moments, ratio
from driftwatch.drift.units import Unit

LEAST, MOST = 0.001, 0.999
"""Floors are kept inside: at 0 or 1 the scale of Z breaks down."""

RECOVERY_THRESHOLD = 10_000.0
"""Units between wrong closings of an event whose mean stays at m' or below."""


@dataclass(frozen=True)
class Opened:
    """An alarm: ``evidence`` is log M, ``start_index`` where the change most likely began.

    ``estimate`` is the hit rate since then, on the baseline's scale. Since the start was chosen where the fall looks
    largest, it leans towards a larger effect, and its interval is descriptive.
    """

    index: int
    start_index: int
    evidence: float
    estimate: Estimate


@dataclass(frozen=True)
class Closed:
    """The end of an open event: the recovery's evidence, start and level, read as in :class:`Opened`."""

    index: int
    start_index: int
    evidence: float
    estimate: Estimate
    opened_index: int


@dataclass
class Detector:
    """State of the test for one cell: the evidence of a fall, and while an event is open that of a recovery."""

    lower: float
    tolerance: float
    threshold: float
    falling: Evidence = field(default_factory=Evidence)
    rising: Evidence | None = None
    totals: Moments = EMPTY
    opened_index: int | None = None

    def __post_init__(self) -> None:
        if not (0.0 <= self.lower <= 1.0 and self.tolerance > 0.0 and self.threshold > 1.0):
            raise ValueError(
                "a detector needs a baseline in [0, 1], a tolerance above 0 and a threshold above 1, "
                f"not {self.lower}, {self.tolerance}, {self.threshold}"
            )

    @property
    def floor(self) -> float:
        """m: a mean below it is drift."""
        return min(max(self.lower - self.tolerance, LEAST), MOST)

    @property
    def blind(self) -> bool:
        """No hit rate is lower than the baseline by more than the tolerance."""
        return self.lower - self.tolerance < LEAST

    @property
    def recovery_floor(self) -> float:
        """m': a mean above it ends an open event."""
        return min(max(self.lower - self.tolerance / 2.0, LEAST), MOST)

    @property
    def recovery_threshold(self) -> float:
        return min(self.threshold, RECOVERY_THRESHOLD)

    @property
    def latched(self) -> bool:
        return self.opened_index is not None

    @property
    def evidence_ratio(self) -> float:
        """log M / log threshold: an alarm at 1; M below 1 counts as no evidence, 0.

        Keeps running while an event is open, so that it shows whether the fall goes on.
        """
        return max(self.falling.value, 0.0) / math.log(self.threshold)

    @property
    def recovery_ratio(self) -> float:
        """The same for closing an open event; 0 while none is open."""
        return 0.0 if self.rising is None else max(self.rising.value, 0.0) / math.log(self.recovery_threshold)

    @property
    def start_index(self) -> int | None:
        """Where a change, if there is one, most likely began."""
        start = self.falling.start
        return None if start is None else start.at

    @property
    def estimate(self) -> Estimate:
        """Hit rate since the start estimate, on the baseline's scale."""
        return self._since(self.falling)

    def update(self, unit: Unit, index: int | None = None) -> Opened | Closed | None:
        """Take one unit; one without tested proposals, or a blind detector, changes nothing.

        ``index`` is the request at which the unit became known, where that is not its first one (sessions).
        """
        if unit.tested <= 0.0 or self.blind:
            return None
        index = unit.index if index is None else index
        rate, weight = unit.rate, unit.weight
        mark = Mark(unit.index, self.totals)
        self.totals = self.totals.with_unit(weight * rate, weight, unit.requests)
        evidence = self.falling.update(fall(rate, self.floor, weight), mark)
        if self.opened_index is None or self.rising is None:
            if evidence < math.log(self.threshold):
                return None
            self.opened_index = index
            self.rising = Evidence()
            return Opened(index, self._start(self.falling), evidence, self.estimate)
        evidence = self.rising.update(rise(rate, self.recovery_floor, weight), mark)
        if evidence < math.log(self.recovery_threshold):
            return None
        closed = Closed(index, self._start(self.rising), evidence, self._since(self.rising), self.opened_index)
        self.falling, self.rising, self.totals, self.opened_index = Evidence(), None, EMPTY, None
        return closed

    def _start(self, evidence: Evidence) -> int:
        start = evidence.start
        return -1 if start is None else start.at

    def _since(self, evidence: Evidence) -> Estimate:
        start = evidence.start
        return ratio(self.totals.since(EMPTY if start is None else start.before))

    def to_json(self) -> dict[str, Any]:
        return {
            "lower": self.lower,
            "tolerance": self.tolerance,
            "threshold": self.threshold,
            "falling": self.falling.to_json(),
            "rising": None if self.rising is None else self.rising.to_json(),
            "totals": list(self.totals),
            "opened_index": self.opened_index,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Detector:
        rising = None if data["rising"] is None else Evidence.from_json(data["rising"])
        kept = {"falling": Evidence.from_json(data["falling"]), "rising": rising, "totals": Moments(*data["totals"])}
        return cls(**{**data, **kept})
