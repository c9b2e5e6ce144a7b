"""One cell under watch: its units feed the baseline until that is frozen, and the detector from then on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from driftwatch.drift.baseline import Baseline
from driftwatch.drift.detector import Detector, Opened
from driftwatch.drift.interval import Estimate
from driftwatch.drift.units import IDLE_S, MAX_AGE_S, MAX_OPEN, Unit, Units

State = Literal["learning", "watching", "drifting"]


@dataclass(frozen=True)
class Rules:
    """What a cell is judged by. ``threshold`` as in :mod:`driftwatch.drift.detector`; ``given`` is a hit rate."""

    tolerance: float = 0.03
    threshold: float = 100_000.0
    min_requests: int = 500
    min_hours: float = 24.0
    given: float | None = None
    idle_s: float = IDLE_S
    max_age_s: float = MAX_AGE_S
    max_open: int = MAX_OPEN
    narrow: bool = True
    """Whether a learnt baseline waits for a narrow interval."""


@dataclass(frozen=True)
class BaselineFrozen:
    """``index`` is the request at which it happened; ``estimate.lower`` is what the detector builds on."""

    time_s: float
    index: int
    estimate: Estimate


@dataclass(frozen=True)
class DriftOpened:
    """``index`` is the request at which the alarm came, ``start_index`` where the fall most likely began.

    ``evidence`` is log M. ``estimate`` is the hit rate since the start, on the scale of ``baseline``; ``floor`` is what
    it was tested against.
    """

    time_s: float
    index: int
    start_index: int
    evidence: float
    estimate: Estimate
    baseline: Estimate
    floor: float


@dataclass(frozen=True)
class DriftClosed:
    """``start_index`` is where the recovery most likely began; ``opened_index`` is the alarm's ``index``."""

    time_s: float
    index: int
    start_index: int
    evidence: float
    estimate: Estimate
    opened_index: int


Transition = BaselineFrozen | DriftOpened | DriftClosed


@dataclass
class CellState:
    """Everything that has to be stored for one cell. Order matters, and nothing here merges: one writer only.

    The rules travel with the state, so that what was learnt under one set is never judged under another unnoticed; to
    change them, start a new state with the old ``baseline``.
    """

    rules: Rules
    units: Units
    baseline: Baseline
    detector: Detector | None = None

    @classmethod
    def start(cls, rules: Rules, baseline: Baseline | None = None) -> CellState:
        """A new cell, learning unless the rules give a baseline or a frozen one is passed on."""
        if baseline is None:
            baseline = (
                Baseline(rules.tolerance, rules.min_requests, rules.min_hours, narrow=rules.narrow)
                if rules.given is None
                else Baseline.given(rules.given, rules.tolerance)
            )
        cell = cls(rules, Units(rules.idle_s, rules.max_age_s, rules.max_open), baseline)
        cell._watch()
        return cell

    @property
    def state(self) -> State:
        if self.detector is None:
            return "learning"
        return "drifting" if self.detector.latched else "watching"

    @property
    def evidence_ratio(self) -> float:
        """1 = alarm; 0 while learning."""
        return 0.0 if self.detector is None else self.detector.evidence_ratio

    def observe(
        self, time_s: float, index: int, session: str | None, accepted: float, tested: float
    ) -> list[Transition]:
        """Take one request of this cell; ``index`` counts requests, in the order in which they are taken."""
        units = self.units.add(index=index, time_s=time_s, session=session, accepted=accepted, tested=tested)
        return self._take(units, time_s, index)

    def expire(self, time_s: float, index: int) -> list[Transition]:
        """Close silent sessions when no request comes; ``index`` is that of the latest one."""
        return self._take(self.units.expire(time_s), time_s, index)

    def close(self, session: str, time_s: float, index: int) -> list[Transition]:
        """Close one session whose last request is known to have passed."""
        return self._take(self.units.close(session), time_s, index)

    def finish(self, time_s: float, index: int) -> list[Transition]:
        """Close every session: at the end of a history."""
        return self._take(self.units.drain(), time_s, index)

    def _take(self, units: list[Unit], time_s: float, index: int) -> list[Transition]:
        transitions: list[Transition] = []
        for unit in units:
            if self.detector is None:
                if self.baseline.add(unit):
                    self._watch()
                    transitions.append(BaselineFrozen(time_s, index, self.baseline.estimate))
                continue
            change = self.detector.update(unit, index)
            if change is None:
                continue
            facts = (time_s, change.index, change.start_index, change.evidence, change.estimate)
            if isinstance(change, Opened):
                transitions.append(DriftOpened(*facts, self.baseline.estimate, self.detector.floor))
            else:
                transitions.append(DriftClosed(*facts, change.opened_index))
        return transitions

    def _watch(self) -> None:
        lower = self.baseline.lower
        if lower is not None:
            self.detector = Detector(lower, self.rules.tolerance, self.rules.threshold, dips=self.baseline.dips)

    def to_json(self) -> dict[str, Any]:
        return {
            "rules": asdict(self.rules),
            "units": self.units.to_json(),
            "baseline": self.baseline.to_json(),
            "detector": None if self.detector is None else self.detector.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CellState:
        return cls(
            Rules(**data["rules"]),
            Units.from_json(data["units"]),
            Baseline.from_json(data["baseline"]),
            None if data["detector"] is None else Detector.from_json(data["detector"]),
        )
