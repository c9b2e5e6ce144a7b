"""Sufficient statistics of one cell: every ratio of every gamma, with its interval, from sums that merge by addition.

A request enters once, with the number of requests it stands for (its Horvitz-Thompson weight n / k, 1 where all were
judged). Plain counts and weighted ones are kept side by side: the first say what was judged, the second what all
traffic did. Intervals are of the weighted ratio, which with weights of 1 is the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from driftwatch.acceptance import Tally
from driftwatch.drift.interval import CONFIDENCE, Estimate, Moments, ratio

Count = Literal["accepted", "tested", "windows", "drafted", "steps", "tokens"]
Figure = Literal["hit_rate", "acceptance_length", "acceptance_rate", "steps_per_token"]

COUNTS: tuple[Count, ...] = ("accepted", "tested", "windows", "drafted", "steps", "tokens")
"""Rows of ``Sums.totals``."""

PAIRS: tuple[tuple[Count, Count], ...] = (
    ("accepted", "accepted"),
    ("accepted", "tested"),
    ("tested", "tested"),
    ("accepted", "windows"),
    ("windows", "windows"),
    ("accepted", "drafted"),
    ("drafted", "drafted"),
    ("steps", "steps"),
    ("steps", "tokens"),
    ("tokens", "tokens"),
)
"""Rows of ``Sums.products``: the squares and cross-products that the four figures need."""

FIGURES: Mapping[Figure, tuple[Count, Count]] = {
    "hit_rate": ("accepted", "tested"),
    "acceptance_length": ("accepted", "windows"),
    "acceptance_rate": ("accepted", "drafted"),
    "steps_per_token": ("steps", "tokens"),
}
"""Numerator and denominator; the acceptance length is 1 + the ratio (the bonus token)."""

_ROW = {name: row for row, name in enumerate(COUNTS)}
_LEFT = [_ROW[left] for left, _ in PAIRS]
_RIGHT = [_ROW[right] for _, right in PAIRS]
_PAIR_ROW = {pair: row for row, pair in enumerate(PAIRS)}


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over independent units, for every gamma from 1 to G; column g - 1 of an array holds gamma g.

    Addition is commutative, and associative to the last bit as long as the sums are whole numbers below 2^53 (argmax
    rule, whole weights); else up to rounding.
    """

    units: int
    """Independent units: requests, or sessions where their label is known."""
    tally: Tally
    """Plain counts of what was judged."""
    weight: float
    """Sum of weights: the requests that the judged ones stand for."""
    totals: NDArray[np.float64]
    """[counts, G]: sum over requests of weight * count."""
    accepted_at: NDArray[np.float64]
    """[G, G]: the weighted accepted counts by depth, as in ``Tally.accepted_at``."""
    products: NDArray[np.float64]
    """[pairs, G]: sum over units of the product of their two weighted counts."""

    @classmethod
    def zero(cls, gamma: int) -> Sums:
        return cls(
            0,
            Tally.zero(gamma),
            0.0,
            np.zeros((len(COUNTS), gamma)),
            np.zeros((gamma, gamma)),
            np.zeros((len(PAIRS), gamma)),
        )

    @classmethod
    def request(cls, tally: Tally, weight: float = 1.0) -> Sums:
        """One request as its own unit."""
        return cls.session([(tally, weight)])

    @classmethod
    def session(cls, parts: Sequence[tuple[Tally, float]]) -> Sums:
        """All requests of one session, each with its weight, as one unit.

        Raises ValueError for no part, or a weight that is not positive.
        """
        if not parts or not all(weight > 0.0 for _, weight in parts):
            raise ValueError("a unit needs at least one request, and every weight must be positive")
        tally = parts[0][0]
        for other, _ in parts[1:]:
            tally = tally + other
        totals = sum((weight * _counts(part) for part, weight in parts), np.zeros((len(COUNTS), tally.gammas)))
        at = sum((weight * part.accepted_at for part, weight in parts), np.zeros((tally.gammas, tally.gammas)))
        return cls(1, tally, float(sum(weight for _, weight in parts)), totals, at, totals[_LEFT] * totals[_RIGHT])

    @property
    def requests(self) -> int:
        return self.tally.requests

    @property
    def tokens(self) -> int:
        return self.tally.tokens

    @property
    def gammas(self) -> int:
        return self.tally.gammas

    def __add__(self, other: Sums) -> Sums:
        if self.gammas != other.gammas:
            raise ValueError(f"sums for gamma up to {self.gammas} and up to {other.gammas} do not add")
        return Sums(
            self.units + other.units,
            self.tally + other.tally,
            self.weight + other.weight,
            self.totals + other.totals,
            self.accepted_at + other.accepted_at,
            self.products + other.products,
        )

    def widened(self, gammas: int) -> Sums:
        """The same sums with room for larger gammas, of which nothing was counted yet; never narrower."""
        more = gammas - self.gammas
        if more <= 0:
            return self
        t = self.tally

        def row(counts: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.pad(counts, [(0, 0)] * (counts.ndim - 1) + [(0, more)])

        def square(counts: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.pad(counts, (0, more))

        tally = Tally(
            t.requests, t.tokens, row(t.steps), row(t.windows), row(t.drafted), square(t.accepted_at), row(t.rejected)
        )
        return Sums(self.units, tally, self.weight, row(self.totals), square(self.accepted_at), row(self.products))

    def total(self, count: Count, gamma: int) -> float:
        """Weighted count: the estimate for all traffic of the cell."""
        return float(self.totals[_ROW[count], self._column(gamma)])

    def interval(self, figure: Figure, gamma: int, confidence: float = CONFIDENCE) -> Estimate:
        """Weighted ratio with its interval between units (see :func:`driftwatch.drift.interval.ratio`).

        ``numerator`` and ``denominator`` are weighted sums. Fewer than two units: value without limits; nothing in the
        denominator: not even a value. Ranges: rates [0, 1]; acceptance length [1, 1 + gamma]; steps per token
        [1 / (1 + gamma), 1], since one step gives at most gamma + 1 tokens and at least one.
        """
        top, bottom = FIGURES[figure]
        column = self._column(gamma)
        moments = Moments(
            self.units,
            self.requests,
            float(self.totals[_ROW[top], column]),
            float(self.totals[_ROW[bottom], column]),
            *(float(self.products[_PAIR_ROW[pair], column]) for pair in ((top, top), (top, bottom), (bottom, bottom))),
        )
        if figure == "acceptance_length":
            return ratio(moments, low=1.0, high=1.0 + gamma, shift=1.0, confidence=confidence)
        low = 1.0 / (1.0 + gamma) if figure == "steps_per_token" else 0.0
        return ratio(moments, low=low, high=1.0, confidence=confidence)

    def to_json(self) -> dict[str, Any]:
        t = self.tally
        return {
            "units": self.units,
            "requests": t.requests,
            "tokens": t.tokens,
            "steps": t.steps.tolist(),
            "windows": t.windows.tolist(),
            "drafted": t.drafted.tolist(),
            "accepted_at": t.accepted_at.tolist(),
            "rejected": t.rejected.tolist(),
            "weight": self.weight,
            "weighted": self.totals.tolist(),
            "weighted_accepted_at": self.accepted_at.tolist(),
            "products": self.products.tolist(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sums:
        def array(key: str) -> NDArray[np.float64]:
            return np.array(data[key], dtype=np.float64)

        counts = (array(key) for key in ("steps", "windows", "drafted", "accepted_at", "rejected"))
        return cls(
            data["units"],
            Tally(data["requests"], data["tokens"], *counts),
            data["weight"],
            array("weighted"),
            array("weighted_accepted_at"),
            array("products"),
        )

    def _column(self, gamma: int) -> int:
        if not 1 <= gamma <= self.gammas:
            raise ValueError(f"gamma {gamma} asked for, but sums are kept for 1 to {self.gammas}")
        return gamma - 1


def _counts(tally: Tally) -> NDArray[np.float64]:
    tokens = np.full(tally.gammas, float(tally.tokens))
    return np.stack([tally.accepted, tally.tested, tally.windows, tally.drafted, tally.steps, tokens])
