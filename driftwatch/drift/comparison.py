"""Is a new deployment worse than the old one was? One look at a fixed sample, which is not a test for drift.

A new deployment learns a baseline of its own; when that freezes, it is compared once with the old one. Both are
weighted means of units' rates over independent units. With h0 and h1 the half-widths of their own intervals (see
``interval``), that of the difference r1 - r0 is sqrt(h0^2 + h1^2): each sample keeps the Student quantile of its own
size, close to Cochran's approximation to the Behrens-Fisher test and never narrower. It ``regressed`` if the whole
interval lies below -tolerance. Looked at again and again as data come in, the promise would be void: for that there
is the detector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from driftwatch.drift.baseline import Baseline
from driftwatch.drift.interval import ratio

CONFIDENCE = 0.99
"""A roll-out is compared in every cell, so the error of one comparison is kept at a half per cent on each side."""


@dataclass(frozen=True)
class Comparison:
    """``difference`` is new less old; ``regressed`` and ``improved`` are None where the data cannot say."""

    old: float | None
    new: float | None
    difference: float | None
    lower: float | None
    upper: float | None
    regressed: bool | None
    improved: bool | None


def compare(old: Baseline, new: Baseline, *, tolerance: float, confidence: float = CONFIDENCE) -> Comparison:
    """Compare two frozen baselines; of one that was given its value is taken as exact.

    Raises ValueError while one is learning, since a sample that still grows is not fixed, or where the two weigh
    units differently.
    """
    if old.frozen is None or new.frozen is None:
        raise ValueError("two baselines are compared once both are frozen")
    if old.half_weight != new.half_weight:
        raise ValueError("baselines of different figures do not compare")
    r0, r1 = old.frozen.value, new.frozen.value
    errors = [_error(baseline, confidence) for baseline in (old, new)]
    if r0 is None or r1 is None:
        return Comparison(r0, r1, None, None, None, None, None)
    difference = r1 - r0
    if errors[0] is None or errors[1] is None:
        return Comparison(r0, r1, difference, None, None, None, None)
    reach = math.hypot(errors[0], errors[1])
    lower, upper = max(difference - reach, -1.0), min(difference + reach, 1.0)
    return Comparison(r0, r1, difference, lower, upper, upper < -tolerance, lower > tolerance)


def _error(baseline: Baseline, confidence: float) -> float | None:
    """Half-width of a baseline's own interval; 0 for a value that was given."""
    if baseline.source == "given":
        return 0.0
    return ratio(baseline.moments, confidence=confidence).half_width
