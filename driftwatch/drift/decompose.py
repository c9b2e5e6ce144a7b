"""What moved a pooled ratio between two periods: the mix of cells, the rates within them, or cells not seen in both.

With R = sum y / sum n over cells k, shares s = n_k / sum n of the **denominator** (tokens for a rate, steps for tokens
per step; with shares of requests the parts do not add up) and rates r = y_k / n_k, over the cells of both periods:

    R1 - R0 = sum (s1 - s0) (r0 + r1) / 2  +  sum (r1 - r0) (s0 + s1) / 2
                       mix                             rate

(Kitagawa 1955, Journal of the American Statistical Association 50, 1168-1194). The symmetric form, because taking
either period alone as the reference can reverse the conclusion. A cell of one period only has no rate in the other,
so it enters neither part: with C the ratio over the cells of both periods, N over the new ones (share u1 of the second
period) and G over the gone ones (share u0 of the first),

    R1 - R0 = (C1 - C0)  +  u1 (N1 - C1)  -  u0 (G0 - C0),
              mix + rate      arrived          departed

which is exact as well. Cell parts of the mix are measured from the average C: a growing cell below it pulls down.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from driftwatch.drift.interval import CONFIDENCE

Array = NDArray[np.float64]
PARTS = ("change", "mix", "rate", "arrived", "departed")


class Row(NamedTuple):
    """One request in the ratio: the cell it fell in, its independent unit (request or session), numerator, denominator.

    With sampling weights multiply both counts by the weight.
    """

    cell: str
    unit: Hashable
    y: float
    n: float


@dataclass(frozen=True)
class Part:
    """One part of the change, with the bootstrap's interval where one was asked for and can be had."""

    value: float
    lower: float | None = None
    upper: float | None = None


@dataclass(frozen=True)
class CellPart:
    """One cell's own shares, rates and contributions; a rate where it was not seen is None."""

    share_before: float
    share_after: float
    rate_before: float | None
    rate_after: float | None
    mix: float
    rate: float


@dataclass(frozen=True)
class Split:
    """``change`` = ``mix`` + ``rate`` + ``arrived`` + ``departed``, exactly (up to rounding)."""

    before: float
    after: float
    change: Part
    mix: Part
    rate: Part
    arrived: Part
    departed: Part
    cells: Mapping[str, CellPart] = field(default_factory=dict)


def split(before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> Split:
    """Split the change between two periods, each given as (sum y, sum n) by cell.

    Raises ValueError where a period has nothing in the denominator, or the periods share no cell.
    """
    names = sorted({*before, *after})
    y0, n0 = _columns(before, names)
    y1, n1 = _columns(after, names)
    _check(n0, n1)
    parts = _parts(y0, n0, y1, n1, (n0 > 0.0) & (n1 > 0.0))
    mix, rate = _cell_parts(y0, n0, y1, n1)
    s0, s1 = n0 / n0.sum(), n1 / n1.sum()
    cells = {
        name: CellPart(
            float(s0[k]),
            float(s1[k]),
            float(y0[k] / n0[k]) if n0[k] else None,
            float(y1[k] / n1[k]) if n1[k] else None,
            float(mix[k]),
            float(rate[k]),
        )
        for k, name in enumerate(names)
    }
    found = {part: Part(float(x)) for part, x in zip(PARTS, parts, strict=True)}
    return Split(float(y0.sum() / n0.sum()), float(y1.sum() / n1.sum()), **found, cells=cells)


def bootstrap(
    before: Sequence[Row], after: Sequence[Row], *, seed: int, draws: int = 1000, confidence: float = CONFIDENCE
) -> Split:
    """The same from rows, with percentile intervals over resampled units of each period (Efron 1979).

    Whole units are drawn, with all their rows, since rows of one unit depend on each other. The seed is the caller's,
    so that the same data give the same interval. Which cells count as seen in both periods is fixed by the data; where
    a resample misses such a cell in one period, its rate there is taken from the other one (no change within it).
    Fewer than two units in a period: no intervals.
    """
    names = sorted({row.cell for row in (*before, *after)})
    whole = split(_sums(before), _sums(after))
    rng = np.random.default_rng(seed)
    resampled = [_resample(rows, names, rng, draws) for rows in (before, after)]
    if resampled[0] is None or resampled[1] is None:
        return whole
    (y0, n0), (y1, n1) = resampled[0], resampled[1]
    seen_before, seen_after = {row.cell for row in before if row.n > 0}, {row.cell for row in after if row.n > 0}
    common = np.array([name in seen_before and name in seen_after for name in names])
    # A resample may consist of new or gone cells alone; it then says nothing of the others and is left out.
    usable = (n0[:, common].sum(axis=1) > 0.0) & (n1[:, common].sum(axis=1) > 0.0)
    parts = _parts(y0[usable], n0[usable], y1[usable], n1[usable], common)
    tail = (1.0 - confidence) / 2.0
    limits = {name: np.quantile(part, (tail, 1.0 - tail)) for name, part in zip(PARTS, parts, strict=True)}
    found = {name: Part(getattr(whole, name).value, float(at[0]), float(at[1])) for name, at in limits.items()}
    return Split(whole.before, whole.after, **found, cells=whole.cells)


def _columns(sums: Mapping[str, tuple[float, float]], names: Sequence[str]) -> tuple[Array, Array]:
    table = np.array([sums.get(name, (0.0, 0.0)) for name in names], dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _sums(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        y, n = found.get(row.cell, (0.0, 0.0))
        found[row.cell] = (y + row.y, n + row.n)
    return found


def _check(n0: Array, n1: Array) -> None:
    if not (n0.sum() > 0.0 and n1.sum() > 0.0):
        raise ValueError("a change needs a denominator above zero in both periods")
    if not ((n0 > 0.0) & (n1 > 0.0)).any():
        raise ValueError("no cell was seen in both periods: there is nothing to compare")


def _rates(y0: Array, n0: Array, y1: Array, n1: Array) -> tuple[Array, Array]:
    """Rates by cell; one that is undefined in one period is taken from the other, 0 where in neither."""
    with np.errstate(divide="ignore", invalid="ignore"):
        r0, r1 = y0 / n0, y1 / n1
    filled0 = np.where(n0 > 0.0, r0, np.where(n1 > 0.0, r1, 0.0))
    return filled0, np.where(n1 > 0.0, r1, filled0)


def _parts(y0: Array, n0: Array, y1: Array, n1: Array, common: NDArray[np.bool_]) -> tuple[Array, ...]:
    """The five parts along the last axis (cells); leading axes are resamples."""
    totals = [x.sum(axis=-1) for x in (y0, n0, y1, n1)]
    c = [np.where(common, x, 0.0) for x in (y0, n0, y1, n1)]
    sums = [x.sum(axis=-1) for x in c]
    r0, r1 = _rates(*c)
    s0, s1 = c[1] / sums[1][..., None], c[3] / sums[3][..., None]
    mix = ((s1 - s0) * (r0 + r1) / 2.0).sum(axis=-1)
    rate = ((r1 - r0) * (s0 + s1) / 2.0).sum(axis=-1)
    before, after = totals[0] / totals[1], totals[2] / totals[3]
    # u1 (N1 - C1) is what the new cells moved the pooled ratio by, and so for the gone ones.
    arrived, departed = after - sums[2] / sums[3], sums[0] / sums[1] - before
    return after - before, mix, rate, arrived, departed


def _cell_parts(y0: Array, n0: Array, y1: Array, n1: Array) -> tuple[Array, Array]:
    common = (n0 > 0.0) & (n1 > 0.0)
    y0, n0, y1, n1 = (np.where(common, x, 0.0) for x in (y0, n0, y1, n1))
    r0, r1 = _rates(y0, n0, y1, n1)
    s0, s1 = n0 / n0.sum(), n1 / n1.sum()
    centre = (y0.sum() / n0.sum() + y1.sum() / n1.sum()) / 2.0
    return (s1 - s0) * ((r0 + r1) / 2.0 - centre), (r1 - r0) * (s0 + s1) / 2.0


def _resample(
    rows: Sequence[Row], names: Sequence[str], rng: np.random.Generator, draws: int
) -> tuple[Array, Array] | None:
    """Sums by resample and cell of one period; None for fewer than two units."""
    units: dict[Hashable, int] = {}
    of = np.array([units.setdefault(row.unit, len(units)) for row in rows], dtype=np.int64)
    if len(units) < 2:
        return None
    at = {name: k for k, name in enumerate(names)}
    cell = np.array([at[row.cell] for row in rows], dtype=np.int64)
    y, n = (np.array([getattr(row, key) for row in rows], dtype=np.float64) for key in ("y", "n"))
    found = np.zeros((2, draws, len(names)))
    for draw in range(draws):
        times = np.bincount(rng.integers(0, len(units), len(units)), minlength=len(units))[of]
        found[0, draw] = np.bincount(cell, times * y, len(names))
        found[1, draw] = np.bincount(cell, times * n, len(names))
    return found[0], found[1]
