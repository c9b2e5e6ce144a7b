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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from driftwatch.drift.interval import Moments

UNIFORM_SHARE = 0.1
DELTA = 0.05
MOST_SPREAD = 0.5
"""The largest sd that a figure in [0, 1] can have."""


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


def allocate(demands: Mapping[str, Demand], tokens: float, *, uniform: float = UNIFORM_SHARE) -> dict[str, int]:
    """Requests to judge of all cells in a window of ``tokens``. Rounded down but never below one request a cell.

    Raises ValueError for a budget or share without meaning, or a cell whose requests cost nothing.
    """
    if not (tokens >= 0.0 and math.isfinite(tokens) and 0.0 <= uniform <= 1.0):
        raise ValueError(f"no allocation of {tokens} tokens with a uniform share of {uniform}")
    if any(not demand.tokens > 0.0 for demand in demands.values()):
        raise ValueError("judging a request costs tokens: give more than 0")
    found: dict[str, int] = {}
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
            return found | {name: max(1, math.floor(wanted[name] + 1e-9)) for name in open_cells}
        for name in full:  # judged whole; the rest of its share is the others'
            demand = open_cells.pop(name)
            found[name] = max(1, math.ceil(demand.requests))
            left = max(left - demand.requests * demand.tokens, 0.0)
    return found


def within(cells: Iterable[tuple[float, Moments]]) -> float:
    """Spread of a segment from its cells, each with its requests: the root of their mean square, by requests.

    What differs between cells does not count: their figures stay apart, or are weighted by known shares.
    """
    pairs = [(requests, spread(moments)) for requests, moments in cells if requests > 0.0]
    total = sum(requests for requests, _ in pairs)
    return math.sqrt(sum(requests * value**2 for requests, value in pairs) / total) if total > 0.0 else MOST_SPREAD


def window_tokens(left: float, per_day: float, window_s: float, left_s: float, day_s: float = 86_400.0) -> float:
    """Tokens for the coming window of ``window_s`` seconds, ``left_s`` before the day's end.

    What is left is spread evenly over the windows to come, but at no more than twice the day's own pace: what a quiet
    day saved is not burnt in its last minutes.
    """
    return max(min(left / max(left_s, window_s), 2.0 * per_day / day_s), 0.0) * window_s
