"""What an engine itself reports of one request, as counts that a cell can take.

Engines give more or less, and what they do not give stays unknown:

- the accepted proposals of each window, or their histogram: everything, ``hit_rate`` included. A window that accepted
  fewer than it proposed has one rejection;
- windows, drafted and accepted only: no rejected, so ``acceptance_rate`` is what can be watched;
- windows and accepted only (or a mean length): ``acceptance_length``, tested as accepted out of windows x gamma.

These are the engine's own counts, and sums over requests are its own counters. Two things set them apart from a
replay's: proposals behind the last served token are in them (vLLM 0.32 and SGLang 0.5.23 count a window before its
tokens are cut at ``max_tokens`` or a stop), and so is a refusal there. A histogram says no rejection where a window may
have proposed fewer than gamma (n-gram): it then counts as totals only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from driftwatch.acceptance import Tally
from driftwatch.drift.sums import Sums

Metric = Literal["hit_rate", "acceptance_rate", "acceptance_length"]
METRICS: tuple[Metric, ...] = ("hit_rate", "acceptance_rate", "acceptance_length")
"""What a detector may watch, finest first."""

LARGEST_GAMMA = 128
"""vLLM's own limit of proposals (MAX_SPEC_LEN)."""

FEW = 0.05
"""Share of a cell's requests that may say less than the others."""
LARGEST_COUNT = 10_000_000
"""Windows or tokens of one request; more is no figure, and would outgrow the store's columns."""

Reason = Literal["contradictory", "implausible", "gamma_too_large", "says_less"]


class Refused(Exception):
    """Figures that do not go into a cell, with the reason: one of ``Reason``, or what a dialect said."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class LiveCounts:
    """One request; None is unknown."""

    gamma: int
    tokens: int
    """Judged tokens: all but the first. Where the output's length is unknown: what its windows gave."""
    windows: int
    accepted: float
    drafted: float | None
    rejected: int | None
    accepted_at: tuple[int, ...]
    """Windows in which each depth was accepted; empty if unknown."""

    @property
    def metric(self) -> Metric:
        """The finest figure that these counts give; a request without a window stands in the way of none."""
        if not self.windows:
            return "hit_rate"
        if self.rejected is not None and self.accepted_at:
            return "hit_rate"
        return "acceptance_length" if self.drafted is None else "acceptance_rate"

    def gives(self, metric: Metric) -> bool:
        return METRICS.index(self.metric) <= METRICS.index(metric)

    def trials(self, metric: Metric, gamma: int) -> tuple[float, float]:
        """Successes and trials for a detector of this metric, in a cell of this gamma, at least their own.

        Raises ValueError if these counts do not give it.
        """
        if not self.gives(metric):
            raise ValueError(f"counts that give {self.metric} at best do not give {metric}")
        trials = {
            "hit_rate": self.accepted + (self.rejected or 0),
            "acceptance_rate": self.drafted or 0,
            "acceptance_length": self.windows * gamma,
        }
        return float(self.accepted), float(trials[metric])

    def tally(self, gamma: int, metric: Metric) -> Tally:
        """The counts in the column of ``gamma``, which is at least their own; all other columns are empty.

        A coarser metric than ``hit_rate`` means that depths are not told apart: all is kept at depth 0.
        """
        empty = Tally.zero(gamma)
        at: NDArray[np.float64] = np.zeros((gamma, gamma))
        if metric == "hit_rate":
            at[-1, : len(self.accepted_at)] = self.accepted_at
        else:
            at[-1, 0] = self.accepted

        def last(value: float) -> NDArray[np.float64]:
            row = empty.steps.copy()
            row[-1] = value
            return row

        # The tokens that no window gave came from plain steps, one each.
        plain = max(0.0, self.tokens - self.windows - self.accepted)
        return Tally(
            1,
            self.tokens,
            last(self.windows + plain),
            last(self.windows),
            last(self.drafted or 0.0),
            at,
            last(self.rejected or 0.0) if metric == "hit_rate" else last(0.0),
        )


def settle(metric: Metric, said: Sequence[Metric], requests: int, less: int) -> tuple[Metric, int]:
    """What a cell watches from here on, and how many of its requests have said less than that.

    ``said`` is what new requests give at best, ``requests`` and ``less`` count those before. A few that say less are
    left out. More than ``FEW`` of all would select (of a prompt-lookup draft: those with full windows throughout), so
    then the cell watches what they too give.
    """
    for coarser in METRICS[METRICS.index(metric) :]:
        more = sum(METRICS.index(one) > METRICS.index(coarser) for one in said)
        before = less if coarser == metric else 0
        if before + more <= FEW * (requests + before + len(said)):
            return coarser, before + more
    return METRICS[-1], 0


def counts(figures: Mapping[str, Any], configured_gamma: int) -> LiveCounts | None:
    """The counts of a record's ``engine`` figures; None where they say nothing. Raises Refused with the reason."""
    if refused := figures.get("refused"):
        raise Refused(str(refused)[:64])
    windows, accepted, drafted = (figures.get(key) for key in ("windows", "accepted", "drafted"))
    each, made = _list(figures, "accepted_per_window"), _list(figures, "drafted_per_window")
    histogram = _list(figures, "accepted_histogram")
    if max([len(histogram or []) - 1, *(each or []), *(made or [])]) > LARGEST_GAMMA:
        raise Refused("gamma_too_large")
    if each is not None and histogram is None:
        histogram = np.bincount(each).tolist() if each else []
    if histogram is not None:
        windows = _same(windows, sum(histogram))
        accepted = _same(accepted, sum(j * n for j, n in enumerate(histogram)))
    if each is not None:
        windows, accepted = _same(windows, len(each)), _same(accepted, sum(each))
    if made is not None:
        windows, drafted = _same(windows, len(made)), _same(drafted, sum(made))
    if windows is None or accepted is None:
        return None
    output = figures.get("output_tokens")
    if max(windows, accepted, drafted or 0, output if isinstance(output, int) else 0) > LARGEST_COUNT:
        raise Refused("implausible")
    if accepted > (math.inf if drafted is None else drafted) or (accepted and not windows):
        raise Refused("contradictory")
    gamma = _gamma(figures, configured_gamma, windows, accepted, drafted, histogram, made, each)
    tokens = output - 1 if isinstance(output, int) and output > 0 else math.ceil(windows + accepted)
    at = [sum(histogram[d + 1 :]) for d in range(gamma)] if histogram is not None else []
    return LiveCounts(
        gamma, tokens, windows, accepted, drafted, _rejected(gamma, windows, drafted, histogram, each, made), tuple(at)
    )


def _rejected(
    gamma: int,
    windows: int,
    drafted: float | None,
    histogram: list[int] | None,
    each: list[int] | None,
    made: list[int] | None,
) -> int | None:
    if each is not None and made is not None:
        if any(a > d for a, d in zip(each, made, strict=True)):
            raise Refused("contradictory")
        return sum(a < d for a, d in zip(each, made, strict=True))
    if histogram is not None and drafted == gamma * windows:
        return sum(histogram[:gamma])
    return None


def _gamma(
    figures: Mapping[str, Any],
    configured: int,
    windows: int,
    accepted: float,
    drafted: float | None,
    histogram: list[int] | None,
    made: list[int] | None,
    each: list[int] | None,
) -> int:
    """The proposal length that the engine used, as far as it shows; else the configured one."""
    deepest = max([d for d, n in enumerate(histogram or []) if n] + (each or []) + (made or []), default=0)
    stated = figures.get("gamma")
    if isinstance(stated, int) and stated > 0:
        gamma = stated
    elif figures.get("accepted_histogram") and histogram is not None and len(histogram) > 1:
        gamma = len(histogram) - 1  # vLLM: one bin for each number from 0 to its num_speculative_tokens
    elif made:
        gamma = max(made)
    elif drafted and windows and drafted % windows == 0:
        gamma = int(drafted // windows)
    else:
        gamma = configured
    if drafted is None and windows:
        deepest = max(deepest, math.ceil(accepted / windows))
    gamma = max(gamma, deepest, 1)
    if gamma > LARGEST_GAMMA:
        raise Refused("gamma_too_large")
    return gamma


def _list(figures: Mapping[str, Any], key: str) -> list[int] | None:
    value = figures.get(key)
    return value if isinstance(value, list) else None


def _same(stated: Any, counted: int) -> Any:
    if stated is not None and stated != counted:
        raise Refused("contradictory")
    return counted


def restated(sums: Sums, gamma: int) -> Sums:
    """Sums of live counts with the column of another gamma, at least as large: there is only one in use."""
    if gamma <= sums.gammas:
        return sums
    wider = Sums.zero(gamma)
    last = sums.gammas - 1

    def row(values: NDArray[np.float64], like: NDArray[np.float64]) -> NDArray[np.float64]:
        moved = np.zeros_like(like)
        moved[..., -1] = values[..., last]
        return moved

    def square(values: NDArray[np.float64]) -> NDArray[np.float64]:
        moved = np.zeros((gamma, gamma))
        moved[-1, : sums.gammas] = values[last]
        return moved

    t, w = sums.tally, wider.tally
    tally = Tally(
        t.requests,
        t.tokens,
        row(t.steps, w.steps),
        row(t.windows, w.windows),
        row(t.drafted, w.drafted),
        square(t.accepted_at),
        row(t.rejected, w.rejected),
    )
    totals, products = row(sums.totals, wider.totals), row(sums.products, wider.products)
    return Sums(sums.units, tally, sums.weight, totals, square(sums.accepted_at), products)
