"""Two drafts on the same requests: their counts side by side, and the difference of their hit rates.

The unit is the request, or the session where its label is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from driftwatch.drift.interval import student_quantile
from driftwatch.drift.units import IDLE_S

Finding = Literal["better", "not_better", "kept", "worse", "open", "small"]

HALF_TOKENS = 10.0
"""Judged tokens at which a unit has half its full weight among single differences."""
MIN_UNITS = 30
"""Fewer have no normal mean to speak of."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Pairs:
    """Requests judged by both, one entry each. ``cell`` and ``unit`` are numbers from 0; rates are never stored."""

    cell: NDArray[np.int64]
    unit: NDArray[np.int64]
    """For the sequential test in the order in which units closed, -1 for those still open."""
    weight: Floats
    """Requests that this one stands for, n / k."""
    tokens: Floats
    accepted: Floats
    tested: Floats
    steps: Floats
    incumbent_accepted: Floats
    incumbent_tested: Floats
    incumbent_steps: Floats

    def __len__(self) -> int:
        return len(self.cell)

    def where(self, mask: NDArray[np.bool_]) -> Pairs:
        return Pairs(*(getattr(self, name)[mask] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Row:
    """One cell, or all together: pooled hit rates with the interval of their difference, and what was found."""

    cell: int | None
    requests: int
    units: int
    share: float
    """Of all requests, by weight."""
    incumbent: float | None
    candidate: float | None
    difference: float | None
    lower: float | None
    upper: float | None
    finding: Finding = "open"


def units_in_order(sessions: Sequence[str | None], served_at: Sequence[float]) -> NDArray[np.int64]:
    """Number the units of requests that come in one by one, as they close; -1 while a session is open.

    A session closes when a later request shows that it has been silent for half an hour: what is numbered follows from
    the requests so far, and stays as it is when more come.
    """
    unit = np.full(len(sessions), -1, dtype=np.int64)
    open_: dict[str, tuple[float, list[int]]] = {}
    clock, closed = -math.inf, 0
    for index, (session, at) in enumerate(zip(sessions, served_at, strict=True)):
        clock = max(clock, at)
        for name in [name for name, (last, _) in open_.items() if clock - last >= IDLE_S]:
            unit[open_.pop(name)[1]] = closed
            closed += 1
        if session is None:
            unit[index] = closed
            closed += 1
        else:
            open_[session] = (clock, [*open_.pop(session, (0.0, []))[1], index])
    return unit


def paired(pairs: Pairs, confidence: float, *, cell: int | None = None, share: float = 1.0) -> Row:
    """Pooled hit rates of both and the difference, with its two-sided interval between units; None: not enough data."""
    w = pairs.weight
    t_c, t_i = float((w * pairs.tested).sum()), float((w * pairs.incumbent_tested).sum())
    unit = np.unique(pairs.unit, return_inverse=True)[1] if len(pairs) else pairs.unit
    units = int(unit.max()) + 1 if len(unit) else 0
    if not (t_c > 0.0 and t_i > 0.0):
        return Row(cell, len(pairs), units, share, None, None, None, None, None)
    r_c, r_i = float((w * pairs.accepted).sum()) / t_c, float((w * pairs.incumbent_accepted).sum()) / t_i
    z = w * (pairs.accepted - r_c * pairs.tested) / t_c
    z -= w * (pairs.incumbent_accepted - r_i * pairs.incumbent_tested) / t_i
    reach = _reach(sums_by(unit, z), sums_by(unit, w * pairs.incumbent_tested), confidence)
    d = r_c - r_i
    lower, upper = (None, None) if reach is None else (max(d - reach, -1.0), min(d + reach, 1.0))
    return Row(cell, len(pairs), units, share, r_i, r_c, d, lower, upper)


def sums_by(unit: NDArray[np.int64], values: Floats) -> Floats:
    """Sums of the values over each unit."""
    return np.bincount(unit, values).astype(np.float64)


def _reach(z: Floats, size: Floats, confidence: float) -> float | None:
    """Half-width from the units' influences; units that do not differ at all get that of a share never seen."""
    units = len(z)
    if units < MIN_UNITS:
        return None
    effective = min(max(float(size.sum() ** 2 / (size**2).sum()), 2.0), float(units))
    quantile = student_quantile(max(1, math.floor(effective - 1.0 + 1e-9)), confidence)
    variance = units / (units - 1) * float((z**2).sum())
    unseen = quantile**2 / (effective + quantile**2)  # Wilson's upper limit of a share of nought
    return quantile * math.sqrt(variance) if variance > 1e-18 else unseen


def shares(pairs: Pairs) -> list[float]:
    weights = np.bincount(pairs.cell, pairs.weight) if len(pairs) else np.zeros(0)
    total = float(weights.sum())
    return [float(weight) / total for weight in weights]


def differences(pairs: Pairs) -> tuple[Floats, Floats]:
    """Difference of the hit rates and weight of each unit, in order; units with nothing tested say nothing."""
    if not len(pairs):
        return np.zeros(0), np.zeros(0)
    unit = np.unique(pairs.unit, return_inverse=True)[1]
    sums = [
        sums_by(unit, values)
        for values in (
            pairs.accepted,
            pairs.tested,
            pairs.incumbent_accepted,
            pairs.incumbent_tested,
            pairs.tokens,
        )
    ]
    a_c, t_c, a_i, t_i, n = (values[(sums[1] > 0) & (sums[3] > 0)] for values in sums)
    return np.clip(a_c / t_c, 0, 1) - np.clip(a_i / t_i, 0, 1), n / (n + HALF_TOKENS)
