"""How many requests to judge in each cell: budgets that bring all intervals to one width.

The half-width of cell s is proportional to sigma_s / sqrt(n_s), so equal widths take n_s proportional to sigma_s^2.
With t_s tokens a request and a budget of T tokens in a window, a share phi of which is spread evenly,

    n_s = phi T / (S t_s)  +  (1 - phi) T sigma_s^2 / sum_s sigma_s^2 t_s

over S cells, never more than what arrives; what a small cell cannot use goes to the others. sigma_s is not known, so an
upper confidence limit stands for it (Carpentier et al., ALT 2011, with the same aim for the arms of a bandit): the
sample's sd plus sqrt(2 log(1 / delta) / (n - 1)), which is at least the true sd of a figure in an interval of length 1
with probability 1 - delta (Maurer and Pontil 2009, arXiv 0907.3740, theorem 10). New cells so are judged often until
their spread is known, and no cell starves on a lucky first sample.

Budgets change at the edges of windows only, from windows that are over. So they are predictable: inside a window every
request of a cell has the same chance k / n, which detectors need not even know, and which is exact for a bottom-k
sampler. Roll-ups over cells weigh by its inverse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from driftwatch.drift.interval import EMPTY, Moments

UNIFORM_SHARE = 0.1
DELTA = 0.05
MOST_SPREAD = 0.5
"""The largest sd that a figure in [0, 1] can have."""


@dataclass(frozen=True)
class Budget:
    """Requests to judge in one cell in the coming window."""

    requests: int

    def probability(self, arrived: int) -> float:
        """Inclusion probability of each request of the window, once it is known how many came."""
        return min(1.0, self.requests / arrived) if arrived > 0 else 1.0

    def weight(self, arrived: int) -> float:
        """Requests that each judged one stands for; ``inf`` where none was to be judged."""
        chance = self.probability(arrived)
        return 1.0 / chance if chance > 0.0 else math.inf


@dataclass(frozen=True)
class Demand:
    """What decides a cell's budget: its spread, requests expected in the window, and tokens that judging one costs."""

    spread: float
    requests: float
    tokens: float


def spread(moments: Moments, delta: float = DELTA) -> float:
    """Upper limit of a unit's sd around the ratio y / n, on the scale where n is 1 on average.

    Moments are those of a rate with its weight (y = w x, n = w, both at most 1), as baselines keep them. Fewer than two
    units: the most that is possible.
    """
    units, y, n = moments.units, moments.y, moments.n
    if units < 2 or not n > 0.0:
        return MOST_SPREAD
    r = y / n
    residuals = max(moments.yy - 2.0 * r * moments.yn + r * r * moments.nn, 0.0)
    deviation = math.sqrt(residuals / (units - 1))
    # A residual w (x - r) lies in an interval of length 1 at most; dividing by the mean weight puts it on the scale.
    limit = min(deviation + math.sqrt(2.0 * math.log(1.0 / delta) / (units - 1)), MOST_SPREAD)
    return limit * units / n


def allocate(demands: Mapping[str, Demand], tokens: float, *, uniform: float = UNIFORM_SHARE) -> dict[str, Budget]:
    """Budgets of all cells for one window of ``tokens``. Rounded down but never below one request a cell.

    Raises ValueError for a budget or share without meaning, or a cell whose requests cost nothing.
    """
    if not (tokens >= 0.0 and math.isfinite(tokens) and 0.0 <= uniform <= 1.0):
        raise ValueError(f"no allocation of {tokens} tokens with a uniform share of {uniform}")
    if any(not demand.tokens > 0.0 for demand in demands.values()):
        raise ValueError("judging a request costs tokens: give more than 0")
    found: dict[str, Budget] = {}
    open_cells = dict(demands)
    left = tokens
    while open_cells:
        scale = sum(demand.spread**2 * demand.tokens for demand in open_cells.values())
        wanted = {
            name: uniform * left / (len(open_cells) * demand.tokens)
            + ((1.0 - uniform) * left * demand.spread**2 / scale if scale > 0.0 else 0.0)
            for name, demand in open_cells.items()
        }
        full = [name for name, demand in open_cells.items() if wanted[name] >= demand.requests]
        if not full:
            return found | {name: Budget(max(1, math.floor(wanted[name] + 1e-9))) for name in open_cells}
        for name in full:  # judged whole; the rest of its share is the others'
            demand = open_cells.pop(name)
            found[name] = Budget(max(1, math.ceil(demand.requests)))
            left = max(left - demand.requests * demand.tokens, 0.0)
    return found


@dataclass
class _Seen:
    """One cell: moments of the windows that are over, and of the one that is open."""

    past: Moments = EMPTY
    current: Moments = EMPTY
    arrived: int = 0
    tokens: float = 0.0
    tokens_past: float = 0.0
    judged_past: int = 0


@dataclass
class Allocator:
    """Learns spreads as requests are judged, and sets the budgets of a window when the one before it ends."""

    tokens_per_window: float
    uniform: float = UNIFORM_SHARE
    first_tokens: float = 500.0
    """Tokens of a request where a cell has shown none yet."""
    cells: dict[str, _Seen] = field(default_factory=dict)
    budgets: dict[str, Budget] = field(default_factory=dict)

    def arrived(self, cell: str, requests: int = 1) -> None:
        """Count traffic, judged or not."""
        self.cells.setdefault(cell, _Seen()).arrived += requests

    def judged(self, cell: str, rate: float, weight: float, tokens: float) -> None:
        """Take one judged request; it changes no budget before the window's end."""
        seen = self.cells.setdefault(cell, _Seen())
        seen.current = seen.current.with_unit(weight * rate, weight)
        seen.tokens += tokens

    def turn(self) -> dict[str, Budget]:
        """End the window: budgets for the next one, which is expected to bring the same traffic."""
        demands = {}
        for name, seen in self.cells.items():
            seen.tokens_past += seen.tokens
            seen.judged_past += seen.current.units
            seen.past = seen.past.plus(seen.current)
            mean = seen.tokens_past / seen.judged_past if seen.judged_past else self.first_tokens
            demands[name] = Demand(spread(seen.past), float(seen.arrived), max(mean, 1.0))
            seen.current, seen.arrived, seen.tokens = EMPTY, 0, 0.0
        self.budgets = allocate(demands, self.tokens_per_window, uniform=self.uniform)
        return self.budgets

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_per_window": self.tokens_per_window,
            "uniform": self.uniform,
            "first_tokens": self.first_tokens,
            "cells": {
                name: [list(s.past), list(s.current), s.arrived, s.tokens, s.tokens_past, s.judged_past]
                for name, s in self.cells.items()
            },
            "budgets": {name: budget.requests for name, budget in self.budgets.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Allocator:
        cells = {
            name: _Seen(Moments(*past), Moments(*current), *rest)
            for name, (past, current, *rest) in data["cells"].items()
        }
        budgets = {name: Budget(requests) for name, requests in data["budgets"].items()}
        return cls(**{**data, "cells": cells, "budgets": budgets})
