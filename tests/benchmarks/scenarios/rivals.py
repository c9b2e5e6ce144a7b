"""What the detector is measured against: dummies, an oracle that knows both means, and two detectors of river."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from driftwatch.drift.detector import Detector, Opened
from driftwatch.drift.units import Unit


class Rival(Protocol):
    def alarms(self, unit: Unit) -> bool:
        """Take one unit; whether this is an alarm. Starts afresh after one."""


class Always:
    def alarms(self, unit: Unit) -> bool:
        return True


class Never:
    def alarms(self, unit: Unit) -> bool:
        return False


class Oracle:
    """CUSUM (Page 1954) on the detector's own functional, told the means before and after the change.

    S <- max(0, S + w ((before + after) / 2 - rate)); alarm at ``limit``.
    """

    def __init__(self, before: float, after: float, limit: float) -> None:
        self.middle, self.limit, self.sum = (before + after) / 2.0, limit, 0.0

    def alarms(self, unit: Unit) -> bool:
        self.sum = max(0.0, self.sum + unit.weight * (self.middle - unit.rate))
        if self.sum < self.limit:
            return False
        self.sum = 0.0
        return True


class Ours:
    """The detector itself, started afresh after an alarm instead of latched, so that alarms can be counted alike."""

    def __init__(self, lower: float, tolerance: float, threshold: float) -> None:
        self.settings = lower, tolerance, threshold
        self.detector = Detector(*self.settings)

    def alarms(self, unit: Unit) -> bool:
        if not isinstance(self.detector.update(unit), Opened):
            return False
        self.detector = Detector(*self.settings)
        return True


class River:
    """A detector of river on the requests' hit rates; it resets itself."""

    def __init__(self, name: str) -> None:
        self.detector: Any = getattr(importlib.import_module("river.drift"), name)()

    def alarms(self, unit: Unit) -> bool:
        self.detector.update(unit.rate)
        return bool(self.detector.drift_detected)


def has_river() -> bool:
    try:
        importlib.import_module("river.drift")
    except ModuleNotFoundError:
        return False
    return True
