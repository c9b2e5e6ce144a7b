"""Does the sketch tell anything about acceptance? The hit rate by tenth of the p-value, and a verdict on it.

A sketch is informative when stranger prompts are accepted less: the hit rate of the highest group of tenths is above
that of the lowest, with the 95% interval of the difference clear of zero, and over all groups it tends to rise
(Spearman's rank correlation above zero). A group is one tenth, or neighbouring ones that only together have requests
enough; that looks at p alone, so it selects nothing. Requests are the units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from driftwatch.drift.interval import EMPTY, Estimate, Moments, ratio, student_quantile

TENTHS = 10
LEAST = 10
"""Requests of a group that is compared."""

Answer = Literal["informative", "uninformative", "not enough data"]


@dataclass(frozen=True)
class Tenth:
    """Requests with p in (lower, upper], and their pooled hit rate, accepted / tested."""

    lower: float
    upper: float
    hit_rate: Estimate


@dataclass(frozen=True)
class Usefulness:
    """``difference``: hit rate of the highest group less that of the lowest one, with its interval; None where there
    are not two. ``trend``: Spearman's correlation over the groups."""

    answer: Answer
    tenths: tuple[Tenth, ...]
    difference: tuple[float, float, float] | None
    trend: float | None

    def as_dict(self) -> dict[str, Any]:
        limits = self.difference and dict(zip(("value", "lower", "upper"), self.difference, strict=True))
        tenths = [asdict(tenth) for tenth in self.tenths]
        return {"answer": self.answer, "difference": limits, "trend": self.trend, "tenths": tenths}


def usefulness(requests: Iterable[tuple[float, float, float]]) -> Usefulness:
    """From (p, accepted, tested) of each request, the counts perhaps weighted; what has nothing tested is left out."""
    sums = [EMPTY] * TENTHS
    for p, accepted, tested in requests:
        if tested > 0.0:
            at = min(max(math.ceil(p * TENTHS - 1e-9), 1), TENTHS) - 1
            sums[at] = sums[at].with_unit(accepted, tested)
    tenths = tuple(Tenth(i / TENTHS, (i + 1) / TENTHS, ratio(moments)) for i, moments in enumerate(sums))
    groups = _groups(sums)
    if len(groups) < 2:
        return Usefulness("not enough data", tenths, None, None)
    difference = _difference(groups[0], groups[-1])
    trend = _spearman([group.y / group.n for group in groups])
    useful = difference[1] > 0.0 and trend > 0.0
    return Usefulness("informative" if useful else "uninformative", tenths, difference, trend)


def _groups(sums: list[Moments]) -> list[Moments]:
    """Neighbours together until each group has ``LEAST`` requests; what is left at the end joins the last one."""
    groups = [EMPTY]
    for moments in sums:
        if groups[-1].units >= LEAST:
            groups.append(EMPTY)
        groups[-1] = groups[-1].plus(moments)
    if len(groups) > 1 and groups[-1].units < LEAST:
        rest = groups.pop()
        groups[-1] = groups[-1].plus(rest)
    return groups if groups[0].units >= LEAST else []


def _difference(low: Moments, high: Moments) -> tuple[float, float, float]:
    """high - low with limits: variances of two independent ratios add, with the fewer units' degrees of freedom."""
    (a, va), (b, vb) = _mean(low), _mean(high)
    reach = student_quantile(min(low.units, high.units) - 1) * math.sqrt(va + vb)
    return b - a, b - a - reach, b - a + reach


def _mean(moments: Moments) -> tuple[float, float]:
    """A ratio and its variance between units, as in :func:`interval.ratio`. Units that are all alike would give zero:
    the rule of three's standard error stands for that."""
    units, _, y, n, yy, yn, nn = moments
    r = y / n
    residuals = max(yy - 2.0 * r * yn + r * r * nn, 0.0)
    error = math.sqrt(units / (units - 1) * residuals) / n
    return r, max(error, 0.0 if residuals > 1e-12 * (yy + r * r * nn) else 1.5 / units) ** 2


def _spearman(values: list[float]) -> float:
    """Rank correlation of values with their own order, ties at their mean rank."""
    n = len(values)
    ranks = [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]
    middle = (n + 1) / 2
    spread = math.sqrt(sum((rank - middle) ** 2 for rank in ranks) * sum((i + 1 - middle) ** 2 for i in range(n)))
    return sum((rank - middle) * (i + 1 - middle) for i, rank in enumerate(ranks)) / spread if spread > 0.0 else 0.0
