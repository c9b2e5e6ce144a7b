"""Evidence that the mean of a bounded figure has fallen below a floor: sums of e-processes, one per size of bet.

With Z <= 1 and, as long as nothing changed, E[Z | past] >= 0, the product of (1 - bet * Z) from any start on is a
non-negative supermartingale: betting against the floor, fairly or worse. The sum over all starts,

    M <- (M + 1) * (1 - bet * Z),

is an e-detector (Shin, Ramdas and Rinaldo, arXiv 2203.03532; for likelihood ratios: Shiryaev-Roberts): M - n is a
supermartingale, hence the mean number of updates before M reaches A is at least A, for any distribution, any
dependence inside a unit and any means above the floor. The same holds for the average over several bets; small ones
find small changes, large ones large changes.

Logarithms are kept, so that no length of input overflows. Plain floats, because seven numbers are too few for numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from driftwatch.drift.interval import EMPTY, Moments

BETS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 0.95)
_LOG_BETS = math.log(len(BETS))


def fall(rate: float, floor: float, weight: float = 1.0) -> float:
    """Z that is negative for a rate below ``floor``: in [-floor / (1 - floor), 1] for rates and weights in [0, 1]."""
    return weight * (rate - floor) / (1.0 - floor)


def rise(rate: float, ceiling: float, weight: float = 1.0) -> float:
    """The mirror image: negative for a rate above ``ceiling``, so that evidence grows for a mean above it."""
    return weight * (ceiling - rate) / ceiling


class Mark(NamedTuple):
    """A possible start of the change: the index of its first unit, and the sums before that unit."""

    at: int
    before: Moments


@dataclass
class Evidence:
    """State of one e-detector: for each bet log M, and the largest single e-process with its start.

    The sum over starts has no start of its own; the largest term has. It follows the CUSUM recursion
    C <- max(C, 1) * (1 - bet * Z), and where C was at most 1 a new start does at least as well.
    """

    logs: list[float] = field(default_factory=lambda: [-math.inf] * len(BETS))
    peaks: list[float] = field(default_factory=lambda: [0.0] * len(BETS))
    marks: list[Mark] = field(default_factory=lambda: [Mark(-1, EMPTY)] * len(BETS))

    def update(self, z: float, mark: Mark) -> float:
        """Take one increment, whose unit ``mark`` describes; return the new :attr:`value`.

        Raises ValueError unless z is finite and at most 1: more could turn a factor negative, and the promise void.
        """
        if not -math.inf < z <= 1.0:
            raise ValueError(f"an increment must be finite and at most 1, not {z}")
        logs, peaks, marks = self.logs, self.peaks, self.marks
        for k, bet in enumerate(BETS):
            factor = math.log1p(-bet * z)
            logs[k] = _softplus(logs[k]) + factor
            peak = peaks[k]
            if peak <= 0.0:
                peak = 0.0
                marks[k] = mark
            peaks[k] = peak + factor
        return self.value

    @property
    def value(self) -> float:
        """Log of the mean of M over the bets; minus infinity before the first update."""
        top = max(self.logs)
        if top == -math.inf:
            return top
        return top + math.log(sum(math.exp(x - top) for x in self.logs)) - _LOG_BETS

    @property
    def start(self) -> Mark | None:
        """Start of the largest e-process of the bet with most evidence; None before the first update."""
        top = max(self.logs)
        return None if top == -math.inf else self.marks[self.logs.index(top)]

    def to_json(self) -> dict[str, Any]:
        return {
            "logs": [None if x == -math.inf else x for x in self.logs],
            "peaks": list(self.peaks),
            "marks": [[mark.at, list(mark.before)] for mark in self.marks],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evidence:
        return cls(
            [-math.inf if x is None else x for x in data["logs"]],
            list(data["peaks"]),
            [Mark(at, Moments(*before)) for at, before in data["marks"]],
        )


def _softplus(x: float) -> float:
    """log(1 + exp(x)) without overflow."""
    return x + math.log1p(math.exp(-x)) if x > 0.0 else math.log1p(math.exp(x))
