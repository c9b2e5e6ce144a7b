"""Quantiles of requests with limits that assume no distribution."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from driftwatch.drift.interval import CONFIDENCE
from driftwatch.economics.range import Range


def ranks(observations: int, q: float, confidence: float = CONFIDENCE) -> tuple[int | None, int | None]:
    """1-based ranks l and u whose order statistics enclose the q-quantile with at least ``confidence``.

    The number of n observations below the quantile is Binomial(n, q), whatever the distribution: l is the largest rank
    with P(Bin <= l - 1) <= alpha / 2, u the smallest with P(Bin >= u) <= alpha / 2 (David and Nagaraja, Order
    Statistics, 2003, section 7.1). Ties only widen coverage. None: not even the extreme suffices. The largest value
    bounds a 99th percentile from n = 299 on at one-sided 95 %, from n = 368 on in a two-sided interval of 95 %.
    """
    n = observations
    if n < 0 or not 0.0 < q < 1.0 or not 0.0 < confidence < 1.0:
        raise ValueError(f"no {q} quantile of {n} observations at confidence {confidence}")
    if n == 0:
        return None, None
    tail = 0.5 * (1.0 - confidence)
    # Twelve standard deviations and a constant for small counts hold all but 1e-30 of the mass.
    reach = 12.0 * math.sqrt(n * q * (1.0 - q)) + 40.0
    first, last = max(0, math.floor(n * q - reach)), min(n, math.ceil(n * q + reach))
    k = np.arange(first, last)
    start = math.lgamma(n + 1) - math.lgamma(first + 1) - math.lgamma(n - first + 1)
    start += first * math.log(q) + (n - first) * math.log1p(-q)
    steps = np.log((n - k) / (k + 1.0)) + math.log(q) - math.log1p(-q)
    mass = np.exp(start + np.concatenate([[0.0], np.cumsum(steps)]))
    # A sum from each end keeps both tails exact to rounding of their own size.
    at_most, at_least = np.cumsum(mass), np.cumsum(mass[::-1])[::-1]
    # A hair of slack: 1 - confidence is itself rounded.
    slack = tail * (1.0 + 1e-9)
    below = int(np.count_nonzero(at_most <= slack))
    above = int(np.count_nonzero(at_least > slack))
    lower = first + below if below else None
    upper = first + above if first + above <= n else None
    return lower, upper


def effective(weights: NDArray[np.float64]) -> float:
    """Requests that unequal weights are worth (Kish 1965): (sum w)^2 / sum w^2."""
    return float(weights.sum() ** 2 / np.sum(weights**2)) if len(weights) else 0.0


def quantile(values: ArrayLike, q: float, weights: ArrayLike | None = None, confidence: float = CONFIDENCE) -> Range:
    """The smallest value with at least the share q of the weight at or below it, between two order statistics.

    With weights n / k the limits are those of the effective number of requests, read off the weighted distribution
    (Woodruff 1952). With equal weights that is the order statistics themselves, and exact. The values must be of
    independent requests: inside sessions limits are too narrow.
    """
    x = np.asarray(values, dtype=np.float64)
    w = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=np.float64)
    if len(w) != len(x) or not np.all(w > 0.0) or not np.all(np.isfinite(x)):
        raise ValueError("a quantile needs finite values, each with a positive weight")
    if not len(x):
        return Range()
    order = np.argsort(x, kind="stable")
    x, share = x[order], np.cumsum(w[order]) / w.sum()
    n = max(1, math.floor(effective(w) + 1e-9))

    def at(level: float) -> float:
        return float(x[min(int(np.searchsorted(share, level - 1e-12)), len(x) - 1)])

    lower, upper = ranks(n, q, confidence)
    return Range(at(q), None if lower is None else at(lower / n), None if upper is None else at(upper / n))
