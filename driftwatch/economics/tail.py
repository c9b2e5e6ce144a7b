"""What speculation does to single requests: time per output token relative to plain decoding, up to the p99.

A request that takes ``steps`` for its ``tokens`` judged tokens, ``windows`` of them with proposals, needs

    relative time = (windows (gamma c + v) + (steps - windows)) / tokens

times the plain time. Requests in one batch share step times but not acceptance: the mean can gain while some lose.
Steps per token cannot exceed 1, so a p99 of 1 says only that one request in a hundred gets nothing accepted; p95 and
the share made slower move first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from driftwatch.acceptance import Tally
from driftwatch.drift.interval import CONFIDENCE, wilson
from driftwatch.economics.quantile import effective, quantile
from driftwatch.economics.range import Range
from driftwatch.economics.value import Value

QUANTILES = (0.5, 0.95, 0.99)

MINIMUM_TOKENS = 32
"""Judged tokens below which a request's own ratio is mostly noise: short ones would own the tail."""

Shape = Literal["better", "worse", "split", "undecided"]
"""``split``: p50 is better and p99 worse, each by its limit. ``better``, ``worse``: both are. Else ``undecided``."""


@dataclass(frozen=True)
class Tail:
    requests: int
    """Judged: long enough."""
    left_out: float | None
    """Share of requests (weighted) that were too short; None without any request."""
    minimum_tokens: int
    relative: dict[float, Range]
    """Quantile -> predicted time per output token / the plain one."""
    steps_per_token: dict[float, Range]
    slower: Range
    """Share of judged requests whose relative time is above 1."""
    confidence: float = CONFIDENCE

    @property
    def shape(self) -> Shape:
        """At level alpha / 2: "split" needs both of two one-sided tests to reject, so its own level is that of each
        (intersection-union, Berger 1982) and no correction is due."""
        middle, end = self.relative[0.5], self.relative[0.99]
        if middle.upper is not None and middle.upper < 1.0:
            if end.lower is not None and end.lower > 1.0:
                return "split"
            if end.upper is not None and end.upper <= 1.0:
                return "better"
        if middle.lower is not None and middle.lower > 1.0:  # then p99, which is no smaller, is worse too
            return "worse"
        return "undecided"

    @property
    def evidence(self) -> str:
        """The figures behind :attr:`shape`, in one line."""
        if not self.requests:
            return f"no request of {self.minimum_tokens} judged tokens or more"
        parts = [f"p{q * 100:g} {_words(self.relative[q])}" for q in QUANTILES]
        return (
            f"time per output token relative to plain decoding: {', '.join(parts)}; share of requests made slower "
            f"{_words(self.slower)}; {self.requests} requests, {self.left_out or 0.0:.0%} left out as shorter than "
            f"{self.minimum_tokens} tokens"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "left_out": self.left_out,
            "minimum_tokens": self.minimum_tokens,
            "relative": {f"{q:g}": found.to_json() for q, found in self.relative.items()},
            "steps_per_token": {f"{q:g}": found.to_json() for q, found in self.steps_per_token.items()},
            "slower": self.slower.to_json(),
            "shape": self.shape,
            "evidence": self.evidence,
        }


def tail(
    steps: ArrayLike,
    tokens: ArrayLike,
    *,
    window: float,
    plain: float = 1.0,
    windows: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    minimum_tokens: int = MINIMUM_TOKENS,
    confidence: float = CONFIDENCE,
) -> Tail:
    """From one entry a request. ``windows`` defaults to ``steps``: every step has proposals.

    ``window`` and ``plain``: cost of a window and of a plain step while speculating, in units of the plain step that
    is compared with. At equal batch they are gamma c + v and 1; at equal arrival rate the batches differ.
    """
    s, n = np.asarray(steps, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    v = s if windows is None else np.asarray(windows, dtype=np.float64)
    w = np.ones(len(s)) if weights is None else np.asarray(weights, dtype=np.float64)
    if not len(s) == len(n) == len(v) == len(w) or not np.all(w > 0.0):
        raise ValueError("steps, tokens, windows and weights need one entry a request, and weights are positive")
    if minimum_tokens < 1 or not window > 0.0 or not plain > 0.0:
        raise ValueError(f"window {window}, plain {plain} and minimum_tokens {minimum_tokens} must be positive")
    judged = n >= minimum_tokens
    left_out = float(w[~judged].sum() / w.sum()) if len(w) else None
    s, n, v, w = s[judged], n[judged], v[judged], w[judged]
    relative, per_token = (v * window + (s - v) * plain) / n, s / n
    return Tail(
        int(judged.sum()),
        left_out,
        minimum_tokens,
        {q: quantile(relative, q, w, confidence) for q in QUANTILES},
        {q: quantile(per_token, q, w, confidence) for q in QUANTILES},
        share(relative > 1.0 + 1e-12, w, confidence),
        confidence,
    )


def of_tallies(
    tallies: Sequence[Tally],
    value: Value,
    *,
    weights: ArrayLike | None = None,
    minimum_tokens: int = MINIMUM_TOKENS,
    confidence: float = CONFIDENCE,
) -> Tail:
    """From one tally a request: at equal arrival rate where ``value`` has one that both carry, else at equal batch.

    With a coverage of 1 every step costs a window, whatever the tallies call it (lookahead decoding).
    """
    column = value.gamma - 1
    load = value.at_rate
    window, plain = value.cost.window, 1.0
    if load is not None and load.window is not None and load.plain_step is not None:
        window, plain = load.window, load.plain_step
    return tail(
        [float(t.steps[column]) for t in tallies],
        [t.tokens for t in tallies],
        window=window,
        plain=plain,
        windows=None if value.coverage == 1.0 else [float(t.windows[column]) for t in tallies],
        weights=weights,
        minimum_tokens=minimum_tokens,
        confidence=confidence,
    )


def share(hits: ArrayLike, weights: ArrayLike, confidence: float = CONFIDENCE) -> Range:
    """Weighted share of requests with the Wilson (1927) interval of their effective number; nothing of no request."""
    mask, w = np.asarray(hits, dtype=np.bool_), np.asarray(weights, dtype=np.float64)
    if not len(mask):
        return Range()
    found = float(w[mask].sum() / w.sum())
    low, high = wilson(found, effective(w), NormalDist().inv_cdf(0.5 + 0.5 * confidence))
    return Range(found, min(max(low, 0.0), found), max(min(high, 1.0), found))


def _words(found: Range) -> str:
    lower, upper = ("?" if x is None else f"{x:.2f}" for x in (found.lower, found.upper))
    return "?" if found.value is None else f"{found.value:.2f} ({lower} to {upper})"
