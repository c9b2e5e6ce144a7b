"""What is normal for a cell: learnt once, frozen, and then left alone.

Never a moving average: it would follow a slow decay and hide it. A new baseline is an explicit act (a new deployment).
A draft that is bad from the start becomes its own normal here; the break-even length is the floor against that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from driftwatch.drift.interval import EMPTY, Estimate, Moments, ratio
from driftwatch.drift.season import HOUR_S, HOURS, LEAST_UNITS, dips, hour_of
from driftwatch.drift.units import HALF_WEIGHT, MAX_AGE_S, Unit

SILENCE_S = MAX_AGE_S
"""No request for longer than this, longer than any session, is a silence."""
LONGEST_SILENCE_S = 12 * HOUR_S
"""What a silence counts at most: a night."""


@dataclass(frozen=True)
class Progress:
    """How far a baseline has come: what is there, and what is needed."""

    requests: int
    min_requests: int
    hours: float
    min_hours: float
    half_width: float | None
    needed_half_width: float | None

    @property
    def missing(self) -> list[str]:
        """For people; empty once nothing is missing."""
        lines = []
        if self.requests < self.min_requests:
            lines.append(f"{self.requests} of {self.min_requests} requests")
        if self.hours < self.min_hours:
            lines.append(f"{self.hours:.1f} of {self.min_hours:g} hours")
        if self.half_width is None:
            lines.append("no interval yet")
        elif self.needed_half_width is not None and self.half_width > self.needed_half_width:
            lines.append(f"interval ±{self.half_width:.4f}, needs ±{self.needed_half_width:.4f}")
        return lines


@dataclass
class Baseline:
    """The weighted mean of units' hit rates, sum w A/T / sum w with w = T / (T + 5).

    This and not the pooled ratio sum A / sum T, because it is what the detector tests: the two differ as soon as long
    requests are easier or harder than short ones, and the difference would read as drift (or hide it).

    Freezes with the first unit at which all three hold: enough requests, enough hours of traffic (a day covers the
    daily swing), and a 95% interval between units whose half-width is at most half the tolerance. Its lower limit then
    is ``lower``, what detectors build on, so that an estimate that came out high causes no alarms.

    With ``narrow`` off any interval will do: for histories that end before it could become narrow. The wide interval's
    lower limit still is what detectors build on, so that this costs power and not false alarms. ``half_weight`` is the
    5 of the weight; figures other than the hit rate have one of their own (see ``monitors``).
    """

    tolerance: float
    min_requests: int = 500
    min_hours: float = 24.0
    state: Literal["learning", "frozen"] = "learning"
    source: Literal["auto", "given"] = "auto"
    moments: Moments = EMPTY
    last_s: float | None = None
    seen_s: float = 0.0
    """Time seen, see ``hours``."""
    frozen: Estimate | None = None
    narrow: bool = True
    half_weight: float = HALF_WEIGHT
    by_hour: dict[int, Moments] = field(default_factory=dict)
    """Of each hour of the day, while learning."""
    dips: list[float] | None = None
    """By how much the floor is lowered in each hour of the day, once frozen; None: never (see ``season``)."""

    @classmethod
    def given(cls, value: float, tolerance: float) -> Baseline:
        """A hit rate that somebody vouches for: frozen at once, at exactly that value."""
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"a baseline is a hit rate between 0 and 1, not {value}")
        frozen = Estimate(value, value, value, 0, 0.0, 0.0)
        return cls(tolerance, 0, 0.0, "frozen", "given", frozen=frozen)

    def under(self, tolerance: float, min_requests: int, min_hours: float) -> Baseline:
        """What was learnt so far, to be judged by other rules: a frozen one stays as it is."""
        return replace(self, tolerance=tolerance, min_requests=min_requests, min_hours=min_hours)

    def add(self, unit: Unit) -> bool:
        """Learn from one unit; return True if that froze the baseline. A frozen one never changes."""
        if self.state == "frozen" or unit.tested <= 0.0:
            return False
        weight = unit.weighed(self.half_weight)
        self.moments = self.moments.with_unit(weight * unit.rate, weight, unit.requests)
        hour = hour_of(unit.first_s)
        self.by_hour[hour] = self.by_hour.get(hour, EMPTY).with_unit(weight * unit.rate, weight, unit.requests)
        self._see(unit)
        # Cheap tests first: the interval is computed only where it decides.
        if self.moments.requests < self.min_requests or self.hours < self.min_hours:
            return False
        if self.progress.missing:
            return False
        self.frozen = self.estimate
        self.state = "frozen"
        if self.hours >= HOURS:
            self.dips = dips(self.by_hour)
        self.by_hour = {}
        return True

    @property
    def estimate(self) -> Estimate:
        """Frozen estimate, or the one so far."""
        return ratio(self.moments) if self.frozen is None else self.frozen

    @property
    def lower(self) -> float | None:
        """Lower limit of the frozen estimate; None while learning."""
        return None if self.frozen is None else self.frozen.lower

    @property
    def hours(self) -> float:
        """Hours of traffic seen, a night's silence included.

        A few wrong clocks must not pass for a day: a silence counts only once ``season.LEAST_UNITS`` units came, and
        half a day at most. (Later clocks that lag count as the latest time seen, see ``units``.)
        """
        return self.seen_s / HOUR_S

    def _see(self, unit: Unit) -> None:
        gone = 0.0 if self.last_s is None else max(unit.last_s - self.last_s, 0.0)
        if gone > SILENCE_S:
            gone = min(gone, LONGEST_SILENCE_S) if self.moments.units > LEAST_UNITS else 0.0
        self.seen_s += gone
        self.last_s = unit.last_s if self.last_s is None else max(self.last_s, unit.last_s)

    @property
    def progress(self) -> Progress:
        return Progress(
            self.moments.requests,
            self.min_requests,
            self.hours,
            self.min_hours,
            self.estimate.half_width,
            self.tolerance / 2.0 if self.narrow else None,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "tolerance": self.tolerance,
            "min_requests": self.min_requests,
            "min_hours": self.min_hours,
            "state": self.state,
            "source": self.source,
            "moments": list(self.moments),
            "last_s": self.last_s,
            "seen_s": self.seen_s,
            "frozen": None if self.frozen is None else self.frozen.to_json(),
            "narrow": self.narrow,
            "half_weight": self.half_weight,
            "by_hour": [[hour, list(moments)] for hour, moments in self.by_hour.items()],
            "dips": self.dips,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Baseline:
        frozen = None if data["frozen"] is None else Estimate.from_json(data["frozen"])
        by_hour = {hour: Moments(*moments) for hour, moments in data.get("by_hour", ())}
        known = {key: value for key, value in data.items() if key != "first_s"}  # kept by an earlier version
        return cls(**{**known, "moments": Moments(*data["moments"]), "frozen": frozen, "by_hour": by_hour})
