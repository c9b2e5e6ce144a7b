"""Quantiles from fixed grids that merge exactly: steps per token, latencies.

A value is rounded to the nearest grid point and counted there. Counts add, so parts merge in any order to the very same
state as the whole, and an error is known beforehand:

- ``Grid.bounded``: points spaced evenly over a closed range, both ends included; error at most half a step. The ends
  are exact, which matters: 1 step per token is a whole atom, of requests that accepted nothing.
- ``Grid.log``: points spaced by a factor (1 + error)^2; a value differs from its point by at most a factor
  1 + ``error`` (the idea of DDSketch, Masson, Rim and Lee 2019, without its growing range). Values outside the range
  count at its ends, and limits there are open.

Intervals come from order statistics and assume nothing of the distribution: X_(l) <= quantile <= X_(u) with l, u from
the tails of Binomial(n, q) (David and Nagaraja, Order Statistics, 2003, section 7.1), then widened by the grid's
error. The item is the request; where sessions cluster the interval is too narrow. A high quantile needs data: 95% on
both sides of p99 takes 368 requests, and with fewer the limit is None.

A short request has an extreme figure by chance, so a request shorter than ``min_length`` is counted apart, and the
share left out is published with the figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from driftwatch.drift.interval import CONFIDENCE

BOUNDED_POINTS = 401
LATENCY_RANGE = (0.0005, 3600.0)
"""Seconds."""
LATENCY_ERROR = 0.01


@dataclass(frozen=True)
class Grid:
    """Where values are counted; two grids merge only if they are equal."""

    kind: Literal["bounded", "log"]
    low: float
    high: float
    points: int

    @classmethod
    def bounded(cls, low: float, high: float, points: int = BOUNDED_POINTS) -> Grid:
        return cls("bounded", low, high, points)

    @classmethod
    def log(cls, low: float, high: float, error: float) -> Grid:
        """As many points as keep every value of the range within a factor 1 + ``error`` of its point."""
        return cls("log", low, high, 1 + math.ceil(math.log(high / low) / (2.0 * math.log1p(error)) - 1e-9))

    @classmethod
    def steps_per_token(cls, gamma: int) -> Grid:
        """A step gives at most gamma + 1 tokens, and at least one."""
        return cls.bounded(1.0 / (1.0 + gamma), 1.0)

    @classmethod
    def latency(cls) -> Grid:
        """Half a millisecond to an hour within 1%: 795 points."""
        return cls.log(*LATENCY_RANGE, LATENCY_ERROR)

    def __post_init__(self) -> None:
        if not (self.low < self.high and self.points >= 2 and (self.kind == "bounded" or self.low > 0.0)):
            raise ValueError(f"no grid of {self.points} points over [{self.low}, {self.high}]")

    @property
    def step(self) -> float:
        """Distance of neighbours: of values, or of their logarithms."""
        span = math.log(self.high / self.low) if self.kind == "log" else self.high - self.low
        return span / (self.points - 1)

    def place(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """The nearest points' positions."""
        clipped = np.clip(values, self.low, self.high)
        offset = np.log(clipped / self.low) if self.kind == "log" else clipped - self.low
        return np.clip(np.rint(offset / self.step), 0, self.points - 1).astype(np.int64)

    def at(self, position: float) -> float:
        """The value at a position, which may lie between points."""
        if self.kind == "log":
            return self.low * math.exp(position * self.step)
        return self.low + position * self.step

    def below(self, position: int) -> float:
        """The least value that is counted at a position."""
        if position == 0:
            return self.low if self.kind == "bounded" else 0.0
        return self.at(position - 0.5)

    def above(self, position: int) -> float | None:
        """The largest; None where it is not known."""
        if position == self.points - 1:
            return self.high if self.kind == "bounded" else None
        return self.at(position + 0.5)


@dataclass(frozen=True)
class Quantile:
    """A quantile of the requests that were long enough; a limit that the data cannot support is None."""

    q: float
    value: float | None
    lower: float | None
    upper: float | None
    requests: int
    left_out: float | None
    """Share of all requests that were too short to count."""


@dataclass(eq=False)
class Quantiles:
    """Counts of one figure of one cell."""

    grid: Grid
    min_length: float = 0.0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    short: int = 0

    def __post_init__(self) -> None:
        if self.counts.shape != (self.grid.points,):
            if self.counts.size:
                raise ValueError(f"{self.counts.size} counts do not fit a grid of {self.grid.points} points")
            self.counts = np.zeros(self.grid.points, np.int64)

    @property
    def requests(self) -> int:
        return int(self.counts.sum())

    @property
    def left_out(self) -> float | None:
        total = self.requests + self.short
        return self.short / total if total else None

    def add(self, value: float, length: float) -> None:
        """One request; ``length`` in whatever ``min_length`` counts (judged tokens). Raises ValueError for NaN."""
        if math.isnan(value):
            raise ValueError("a figure must be a number")
        if length < self.min_length:
            self.short += 1
        else:
            self.counts[self.grid.place(np.array([value]))[0]] += 1

    def __add__(self, other: Quantiles) -> Quantiles:
        if (self.grid, self.min_length) != (other.grid, other.min_length):
            raise ValueError("quantiles merge only on the same grid with the same least length")
        return Quantiles(self.grid, self.min_length, self.counts + other.counts, self.short + other.short)

    def quantile(self, q: float, confidence: float = CONFIDENCE) -> Quantile:
        """X_(ceil(n q)) with its interval."""
        n = self.requests
        if n == 0:
            return Quantile(q, None, None, None, 0, self.left_out)
        reached = np.cumsum(self.counts)

        def position(rank: int) -> int:
            return int(np.searchsorted(reached, rank))

        low, high = order_limits(n, q, confidence)
        value = self.grid.at(position(max(1, math.ceil(n * q - 1e-9))))
        lower = None if low is None else self.grid.below(position(low))
        upper = None if high is None else self.grid.above(position(high))
        return Quantile(q, value, lower, upper, n, self.left_out)

    def share_above(self, limit: float) -> float | None:
        """Share of requests counted at points above a limit: right where the limit lies half-way between points."""
        n = self.requests
        edge = np.array([self.grid.at(k) for k in range(self.grid.points)]) > limit
        return float(self.counts[edge].sum()) / n if n else None

    def to_json(self) -> dict[str, Any]:
        """Counts as [position, count] pairs: most points are empty."""
        g = self.grid
        held = np.flatnonzero(self.counts)
        return {
            "grid": [g.kind, g.low, g.high, g.points],
            "min_length": self.min_length,
            "counts": [[int(k), int(self.counts[k])] for k in held],
            "short": self.short,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Quantiles:
        found = cls(Grid(*data["grid"]), data["min_length"], short=data["short"])
        for position, count in data["counts"]:
            found.counts[position] = count
        return found


def rolled_up(parts: Sequence[tuple[Quantiles, float]], q: float, confidence: float = CONFIDENCE) -> Quantile:
    """Quantile over cells, each with the requests that one of its judged ones stands for (n / k of the sampler).

    Interval: Woodruff (1952), JASA 47, 635-646. The weighted share below a point, p = sum W_s p_s over cells with
    traffic shares W_s, has variance sum W_s^2 p_s (1 - p_s) / n_s; the limits are where the weighted distribution
    reaches q -+ z sd at the estimate. Poor in the far tail of few requests, so a limit beyond all data is None.
    Raises ValueError for nothing, different grids, or weights that are not positive.
    """
    if not parts or not all(weight > 0.0 for _, weight in parts):
        raise ValueError("a roll-up needs at least one cell, and every weight must be positive")
    total = parts[0][0]
    for part, _ in parts[1:]:
        total = total + part
    weighted = sum((weight * part.counts for part, weight in parts), np.zeros(total.grid.points))
    mass = float(weighted.sum())
    every = mass + sum(weight * part.short for part, weight in parts)
    left_out = 1.0 - mass / every if every else None
    if mass == 0.0:
        return Quantile(q, None, None, None, 0, left_out)
    reached = np.cumsum(weighted) / mass
    at = int(np.searchsorted(reached, q - 1e-12))
    variance = 0.0
    for part, weight in parts:
        n = part.requests
        if n:
            below = float(part.counts[: at + 1].sum()) / n
            below = min(max(below, 0.5 / n), 1.0 - 0.5 / n)  # an empty tail is no certainty
            variance += (weight * n / mass) ** 2 * below * (1.0 - below) / n
    reach = NormalDist().inv_cdf(0.5 + confidence / 2.0) * math.sqrt(variance)
    lower = total.grid.below(int(np.searchsorted(reached, q - reach))) if q - reach > 0.0 else None
    upper = total.grid.above(int(np.searchsorted(reached, q + reach))) if q + reach < 1.0 else None
    return Quantile(q, total.grid.at(at), lower, upper, total.requests, left_out)


def order_limits(n: int, q: float, confidence: float = CONFIDENCE) -> tuple[int | None, int | None]:
    """Ranks l and u, 1-based, with P(X_(l) <= quantile) and P(quantile <= X_(u)) each at least 1 - tail.

    l - 1 is the largest j with P(Binomial(n, q) <= j) <= tail, u - 1 the least with P(...) >= 1 - tail; None where
    there is no such rank.
    """
    if not (n >= 1 and 0.0 < q < 1.0 and 0.0 < confidence < 1.0):
        raise ValueError(f"no order statistics for quantile {q} of {n} at confidence {confidence}")
    tail = (1.0 - confidence) / 2.0
    sd = math.sqrt(n * q * (1.0 - q))
    first, last = max(0, math.floor(n * q - 12.0 * sd - 40.0)), min(n, math.ceil(n * q + 12.0 * sd + 40.0))
    j = np.arange(first, last + 1, dtype=np.float64)
    start = math.lgamma(n + 1) - math.lgamma(first + 1) - math.lgamma(n - first + 1)
    start += first * math.log(q) + (n - first) * math.log1p(-q)
    # log pmf(j + 1) - log pmf(j); what lies outside the window is below any tail in use.
    steps = np.log((n - j[:-1]) / (j[:-1] + 1.0)) + math.log(q) - math.log1p(-q)
    reached = np.cumsum(np.exp(start + np.concatenate([[0.0], np.cumsum(steps)])))
    low = first + int(np.searchsorted(reached, tail, side="right"))
    high = first + int(np.searchsorted(reached, 1.0 - tail)) + 1
    return (low if low >= 1 else None), (high if high <= n else None)
