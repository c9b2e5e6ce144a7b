"""One event a change: evidence opens it, evidence of the opposite closes it, and detection starts afresh.

What is tested, and against which level, is up to the subclass; this is the part that all tests share. An alarm opens an
event at log M >= log ``threshold``; it stays open until a test of its own, betting the other way against a level on
the healthy side of the alarm's, reaches min(``threshold``, 10,000).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from driftwatch.drift.evidence import Evidence, Mark
from driftwatch.drift.interval import EMPTY, Estimate, Moments, ratio
from driftwatch.drift.units import Unit

RECOVERY_THRESHOLD = 10_000.0
"""Units between wrong closings of an event whose mean stays at the recovery level or on the alarm's side of it."""


@dataclass(frozen=True)
class Opened:
    """An alarm: ``evidence`` is log M, ``start_index`` where the change most likely began.

    ``estimate`` is the figure since then, on the baseline's scale. Since the start was chosen where the change looks
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


class Latch:
    """Evidence of a change, and while an event is open that of its end. Subclasses are dataclasses with these fields;
    ``falling`` and ``rising`` are named after the hit rate, whose fall is the alarm."""

    threshold: float
    falling: Evidence
    rising: Evidence | None
    totals: Moments
    opened_index: int | None

    @property
    @abstractmethod
    def blind(self) -> bool:
        """Nothing lies on the alarm's side of the level tested."""

    @abstractmethod
    def weigh(self, unit: Unit) -> float:
        """Weight of a unit in [0, 1], a function of its denominator alone."""

    @abstractmethod
    def against(self, unit: Unit, weight: float) -> float:
        """Z of the alarm: at most 1, with a mean of at least 0 as long as nothing changed."""

    @abstractmethod
    def recovering(self, unit: Unit, weight: float) -> float:
        """Z of the closing test: the same for as long as the change lasts."""

    @property
    def recovery_threshold(self) -> float:
        return min(self.threshold, RECOVERY_THRESHOLD)

    @property
    def latched(self) -> bool:
        return self.opened_index is not None

    @property
    def evidence_ratio(self) -> float:
        """log M / log threshold: an alarm at 1; M below 1 counts as no evidence, 0.

        Keeps running while an event is open, so that it shows whether the change goes on.
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
        """The figure since the start estimate, on the baseline's scale."""
        return self._since(self.falling)

    def update(self, unit: Unit, index: int | None = None) -> Opened | Closed | None:
        """Take one unit; one with nothing in its denominator, or a blind test, changes nothing.

        ``index`` is the request at which the unit became known, where that is not its first one (sessions).
        """
        if unit.tested <= 0.0 or self.blind:
            return None
        index = unit.index if index is None else index
        weight = self.weigh(unit)
        mark = Mark(unit.index, self.totals)
        self.totals = self.totals.with_unit(weight * unit.rate, weight, unit.requests)
        evidence = self.falling.update(self.against(unit, weight), mark)
        if self.opened_index is None or self.rising is None:
            if evidence < math.log(self.threshold):
                return None
            self.opened_index = index
            self.rising = Evidence()
            return Opened(index, self._start(self.falling), evidence, self.estimate)
        evidence = self.rising.update(self.recovering(unit, weight), mark)
        if evidence < math.log(self.recovery_threshold):
            return None
        closed = Closed(index, self._start(self.rising), evidence, self._since(self.rising), self.opened_index)
        self.falling, self.rising, self.totals, self.opened_index = Evidence(), None, EMPTY, None
        return closed

    def unlatch(self) -> None:
        """Take the alarm back; the evidence stays, and may alarm again at the next unit."""
        self.opened_index, self.rising = None, None

    def _start(self, evidence: Evidence) -> int:
        start = evidence.start
        return -1 if start is None else start.at

    def _since(self, evidence: Evidence) -> Estimate:
        start = evidence.start
        return ratio(self.totals.since(EMPTY if start is None else start.before))
