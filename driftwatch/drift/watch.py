"""One test of :mod:`driftwatch.drift.monitors` from its first request on: it learns what is normal, then watches.

A :class:`Watch` is to a monitor what :class:`driftwatch.drift.cell.CellState` is to the hit rate's detector: the open
sessions, the baseline, and the monitor that the frozen baseline gives. The tests for break-even and for the tail have
no baseline and watch from the first request on.

Surprise is a number and not a share, so its cut comes first: the 90% quantile of the first ``min_requests`` values.
What is tested from then on is the share of requests above the cut, against a baseline of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from driftwatch.drift.baseline import Baseline
from driftwatch.drift.cell import State
from driftwatch.drift.interval import Estimate
from driftwatch.drift.latch import Closed, Opened
from driftwatch.drift.monitors import (
    Counts,
    Monitor,
    agreement_below,
    below_break_even,
    hit_rate_above,
    live_below_shadow,
    share_above,
    share_counts,
    tail_worse,
)
from driftwatch.drift.units import HALF_WEIGHT, IDLE_S, MAX_AGE_S, MAX_OPEN, Unit, Units

Kind = Literal[
    "off_share", "surprise", "below_break_even", "slower", "tail_worse", "hit_rate_above", "live_gap", "agreement"
]
KINDS: tuple[Kind, ...] = get_args(Kind)

SHARE_TOLERANCE = 0.05
"""Least tolerance of a share of requests. A share of .10 within half of .03 would take 1,500 requests to learn."""

CUT = 0.9
"""Quantile of the first surprises above which a request counts as surprising."""

_MAKERS = {
    "off_share": share_above,
    "surprise": share_above,
    "slower": share_above,
    "hit_rate_above": hit_rate_above,
    "live_gap": live_below_shadow,
    "agreement": agreement_below,
}
_SHARES = frozenset({"off_share", "surprise", "slower"})


@dataclass(frozen=True)
class Terms:
    """What one test is judged by. ``tolerance`` is on the scale of hit rates; ``break_even`` in tokens a window."""

    kind: Kind
    tolerance: float
    threshold: float
    min_requests: int
    min_hours: float
    gamma: int = 1
    break_even: float | None = None

    def baseline(self) -> Baseline | None:
        """An empty one on this test's own scale; None for a test against a level that is given."""
        if self.kind in ("below_break_even", "tail_worse"):
            return None
        if self.kind in _SHARES:
            tolerance, half = max(self.tolerance, SHARE_TOLERANCE), 0.0
        else:  # the gap's scale is (1 + gap) / 2
            tolerance, half = self.tolerance / (2.0 if self.kind == "live_gap" else 1.0), HALF_WEIGHT
        return Baseline(tolerance, self.min_requests, self.min_hours, half_weight=half)

    def monitor(self, baseline: Baseline | None) -> Monitor | None:
        """The test itself; None while the baseline learns."""
        if self.kind == "below_break_even":
            return below_break_even(self.break_even or 0.0, self.gamma, self.threshold)
        if self.kind == "tail_worse":
            return tail_worse(self.threshold)
        return None if baseline is None else _MAKERS[self.kind](baseline, self.threshold)


@dataclass
class Watch:
    """Everything that has to be stored for one test. Order matters, and nothing here merges: one writer only."""

    terms: Terms
    units: Units
    baseline: Baseline | None
    monitor: Monitor | None
    cut: float | None = None
    values: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, terms: Terms, before: Watch | None = None) -> Watch:
        """A new test; what ``before`` had learnt under other terms goes on being normal, as do its open sessions.

        Not where proposals, or what they cost, are others: then its figure is another one.
        """
        if before is None:
            baseline = terms.baseline()
            return cls(terms, Units(IDLE_S, MAX_AGE_S, MAX_OPEN), baseline, terms.monitor(baseline))
        if (before.terms.gamma, before.terms.break_even) != (terms.gamma, terms.break_even):
            return cls.start(terms)
        baseline = terms.baseline()
        if baseline is not None and before.baseline is not None:
            baseline = before.baseline.under(baseline.tolerance, baseline.min_requests, baseline.min_hours)
        return cls(terms, before.units, baseline, terms.monitor(baseline), before.cut, before.values)

    @property
    def state(self) -> State:
        if self.monitor is None:
            return "learning"
        return "drifting" if self.monitor.latched else "watching"

    @property
    def evidence_ratio(self) -> float:
        """1 = alarm; 0 while learning."""
        return 0.0 if self.monitor is None else self.monitor.evidence_ratio

    def counts(self, value: float) -> Counts:
        """A number as part and whole of a share: whether it lies above the cut; nothing while the cut is unknown.

        Raises ValueError for what is no number.
        """
        if not math.isfinite(value):
            raise ValueError(f"a surprise must be a finite number, not {value}")
        if self.cut is not None:
            return share_counts(value > self.cut)
        self.values.append(value)
        if len(self.values) >= self.terms.min_requests:
            self.cut = sorted(self.values)[min(int(CUT * len(self.values)), len(self.values) - 1)]
            self.values = []
        return 0.0, 0.0

    def observe(self, time_s: float, index: int, session: str | None, counts: Counts) -> list[Opened | Closed]:
        """Take one request; ``index`` rises, and leads back to it."""
        part, whole = counts
        return self._take(
            self.units.add(index=index, time_s=time_s, session=session, accepted=part, tested=whole), index
        )

    def expire(self, time_s: float, index: int) -> list[Opened | Closed]:
        """Close silent sessions when no request comes; ``index`` is that of the latest one."""
        return self._take(self.units.expire(time_s), index)

    def _take(self, units: list[Unit], index: int) -> list[Opened | Closed]:
        changes: list[Opened | Closed] = []
        for unit in units:
            if self.monitor is not None:
                change = self.monitor.update(unit, index)
                if isinstance(change, Opened) and self.terms.kind == "tail_worse" and not _few(change.estimate):
                    self.monitor.unlatch()  # not the tail alone: the median is slower too, or nobody can tell yet
                    change = None
                changes += [] if change is None else [change]
            elif self.baseline is not None and self.baseline.add(unit):
                self.monitor = self.terms.monitor(self.baseline)
        return changes

    def to_json(self) -> dict[str, Any]:
        return {
            "terms": asdict(self.terms),
            "units": self.units.to_json(),
            "baseline": None if self.baseline is None else self.baseline.to_json(),
            "monitor": None if self.monitor is None else self.monitor.to_json(),
            "cut": self.cut,
            "values": self.values,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Watch:
        return cls(
            Terms(**data["terms"]),
            Units.from_json(data["units"]),
            None if data["baseline"] is None else Baseline.from_json(data["baseline"]),
            None if data["monitor"] is None else Monitor.from_json(data["monitor"]),
            data["cut"],
            list(data["values"]),
        )


def _few(share: Estimate) -> bool:
    """Less than half of the requests, so that the median is not among them."""
    return share.upper is not None and share.upper < 0.5
