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

Where the baseline knows hours of the day that usually lie below the rest, m and m' are lower in them (``season``).

A baseline no higher than the tolerance leaves nothing to fall to: the detector then is ``blind``, never alarming. (With
m merely clipped above zero, a draft that never worked would drift for ever.) Such a draft is the break-even test's
business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from driftwatch.drift.evidence import Evidence, fall, rise
from driftwatch.drift.interval import EMPTY, Moments
from driftwatch.drift.latch import RECOVERY_THRESHOLD, Closed, Latch, Opened
from driftwatch.drift.season import dip_at
from driftwatch.drift.units import Unit

__all__ = ["LEAST", "MOST", "RECOVERY_THRESHOLD", "Closed", "Detector", "Opened"]

LEAST, MOST = 0.001, 0.999
"""Floors are kept inside: at 0 or 1 the scale of Z breaks down."""


@dataclass
class Detector(Latch):
    """State of the test for one cell: the evidence of a fall, and while an event is open that of a recovery."""

    lower: float
    tolerance: float
    threshold: float
    falling: Evidence = field(default_factory=Evidence)
    rising: Evidence | None = None
    totals: Moments = EMPTY
    opened_index: int | None = None
    dips: list[float] | None = None

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

    def weigh(self, unit: Unit) -> float:
        return unit.weight

    def against(self, unit: Unit, weight: float) -> float:
        return fall(unit.rate, self._lowered(self.floor, unit), weight)

    def recovering(self, unit: Unit, weight: float) -> float:
        return rise(unit.rate, self._lowered(self.recovery_floor, unit), weight)

    def _lowered(self, level: float, unit: Unit) -> float:
        """A level in the unit's hour of the day, which is known before the unit is."""
        return level if self.dips is None else max(level + dip_at(self.dips, unit.first_s), LEAST)

    def to_json(self) -> dict[str, Any]:
        return {
            "lower": self.lower,
            "tolerance": self.tolerance,
            "threshold": self.threshold,
            "falling": self.falling.to_json(),
            "rising": None if self.rising is None else self.rising.to_json(),
            "totals": list(self.totals),
            "opened_index": self.opened_index,
            "dips": self.dips,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Detector:
        rising = None if data["rising"] is None else Evidence.from_json(data["rising"])
        kept = {"falling": Evidence.from_json(data["falling"]), "rising": rising, "totals": Moments(*data["totals"])}
        return cls(**{**data, **kept})
