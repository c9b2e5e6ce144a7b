"""Interval of a ratio of sums over independent units, and the Student quantile that it needs.

A token is no unit: tokens of one request are strongly dependent, so the spread is taken between units (requests, or
sessions). Means, squares and cross-products are all that has to be kept for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A ratio with its two-sided interval; a limit that the data cannot support is None, never a guess."""

    value: float | None
    lower: float | None
    upper: float | None
    requests: int
    numerator: float
    denominator: float

    @property
    def half_width(self) -> float | None:
        """The longer arm, so that clipping at the end of the range does not make an interval look tighter."""
        if self.value is None or self.lower is None or self.upper is None:
            return None
        return max(self.upper - self.value, self.value - self.lower)

    def to_json(self) -> list[Any]:
        return [self.value, self.lower, self.upper, self.requests, self.numerator, self.denominator]

    @classmethod
    def from_json(cls, data: list[Any]) -> Estimate:
        return cls(*data)


class Moments(NamedTuple):
    """Sums over units of a numerator y and a denominator n, with squares and the cross-product."""

    units: int = 0
    requests: int = 0
    y: float = 0.0
    n: float = 0.0
    yy: float = 0.0
    yn: float = 0.0
    nn: float = 0.0

    def with_unit(self, y: float, n: float, requests: int = 1) -> Moments:
        units, total, ys, ns, yy, yn, nn = self
        return Moments(units + 1, total + requests, ys + y, ns + n, yy + y * y, yn + y * n, nn + n * n)

    def plus(self, other: Moments) -> Moments:
        """Both together."""
        return Moments(
            self.units + other.units,
            self.requests + other.requests,
            self.y + other.y,
            self.n + other.n,
            self.yy + other.yy,
            self.yn + other.yn,
            self.nn + other.nn,
        )

    def since(self, earlier: Moments) -> Moments:
        """What was added after ``earlier``, a former state of the same sums."""
        return Moments(
            self.units - earlier.units,
            self.requests - earlier.requests,
            self.y - earlier.y,
            self.n - earlier.n,
            self.yy - earlier.yy,
            self.yn - earlier.yn,
            self.nn - earlier.nn,
        )


EMPTY = Moments()


def ratio(
    moments: Moments, *, low: float = 0.0, high: float = 1.0, shift: float = 0.0, confidence: float = CONFIDENCE
) -> Estimate:
    """Estimate ``shift + sum y / sum n``, whose possible range is [low, high] (shift included).

    Standard error: sqrt(R / (R - 1) * sum (y - r n)^2) / sum n over R units, the linearised (delta method) variance of
    a ratio under cluster sampling (Cochran, Sampling Techniques, 1977, section 6.3; with Horvitz-Thompson weights
    inside y and n the same expression, Sarndal, Swensson and Wretman 1992, section 5.6, without finite correction).

    The Student quantile has F - 1 degrees of freedom, rounded down, with F = (sum n)^2 / sum n^2 the effective number
    of units (Kish 1965): R for equal units, fewer where some outweigh the others.

    If the units do not differ at all (every one accepted everything, or nothing), the formula gives zero width, which
    is a lie. Then the Wilson (1927) score interval on F observations is used: each unit counts as one single draw, the
    most that its tokens may depend on each other. At rate zero its upper limit is near 3.8 / F (rule of three: 3 / F).
    """
    units, requests, y, n, yy, yn, nn = moments
    if not n > 0.0:
        return Estimate(None, None, None, requests, y, n)
    r = y / n
    value = min(max(r + shift, low), high)
    if units < 2 or not nn > 0.0:
        return Estimate(value, None, None, requests, y, n)
    effective = min(max(n * n / nn, 1.0), float(units))
    # The small addition keeps equal units at R - 1 when the division above rounds down.
    quantile = student_quantile(max(1, math.floor(effective - 1.0 + 1e-9)), confidence)
    residuals = yy - 2.0 * r * yn + r * r * nn
    # Rounding leaves about 1e-16 of the largest term where the exact sum is zero.
    if residuals <= 1e-12 * (yy + r * r * nn) or residuals <= 0.0:
        share = (value - low) / (high - low)
        below, above = wilson(share, effective, quantile)
        lower, upper = low + (high - low) * below, low + (high - low) * above
    else:
        reach = quantile * math.sqrt(units / (units - 1) * residuals) / n
        lower, upper = value - reach, value + reach
    return Estimate(value, min(max(lower, low), value), max(min(upper, high), value), requests, y, n)


def wilson(share: float, observations: float, quantile: float) -> tuple[float, float]:
    """Score interval of a share (Wilson 1927)."""
    q = quantile * quantile / observations
    centre = (share + q / 2.0) / (1.0 + q)
    reach = math.sqrt(q * share * (1.0 - share) + q * q / 4.0) / (1.0 + q)
    return centre - reach, centre + reach


def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Half-width, in standard errors, of a two-sided Student interval: about 2 for 0.95.

    Closed forms for one and two degrees of freedom; else the two expansions of Hill (1970), Algorithm 396,
    Communications of the ACM 13(10): one for the far tail, one around the normal quantile. Relative error below 2e-4
    from three degrees of freedom on, for any confidence in use.
    """
    tail = 1.0 - confidence
    if freedom < 1 or not 0.0 < tail < 1.0:
        raise ValueError(f"no Student quantile for {freedom} degrees of freedom at confidence {confidence}")
    if freedom == 1:
        return 1.0 / math.tan(tail * math.pi / 2.0)
    if freedom == 2:
        return math.sqrt(2.0 / (tail * (2.0 - tail)) - 2.0)
    k = float(freedom)
    a = 1.0 / (k - 0.5)
    b = 48.0 / (a * a)
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * math.sqrt(a * math.pi / 2.0) * k
    y = (d * tail) ** (2.0 / k)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(tail / 2.0)
        y = x * x
        if freedom < 5:
            c += 0.3 * (k - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5.0) * x - 7.0) * x - 2.0) * x + b
        y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * x
        y = math.expm1(a * y * y)
    else:
        y = ((1.0 / (((k + 6.0) / (k * y) - 0.089 * d - 0.822) * (k + 2.0) * 3.0) + 0.5 / (k + 4.0)) * y - 1.0) * (
            k + 1.0
        ) / (k + 2.0) + 1.0 / y
    return math.sqrt(k * y)
