"""Fit of step times to measured points: least squares of relative errors with coefficients that are never negative.

A point of the target, of the draft and of a whole window (window = gamma draft passes + one verification) are all
linear in the coefficients of the two step times once the knee is fixed, so one regression takes any mixture of them:
what ``profile`` measured apart, and what a live engine exports together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from driftwatch.economics.step import StepTime, Timing

KNEES_PER_GAP = 8
"""Candidate knees between two neighbouring token counts."""

NOISE = 1e-6
"""Relative error below which points agree: rounding must not buy a knee."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class FitError:
    """Relative errors of the fit: (predicted - measured) / measured."""

    points: int
    rms: float
    worst: float
    """The largest, with its sign."""
    left_out: float | None
    """Root mean square error of each point predicted from the others: the honest one, since a fit flatters the points
    it has seen. None where no point can be spared."""
    unchecked: int = 0
    """Points without which a coefficient is not determined: nothing predicts them, so they are not in ``left_out``."""

    def __post_init__(self) -> None:
        for error in (self.rms, self.worst, self.left_out):
            if error is not None and not math.isfinite(error):
                raise ValueError(f"the error of a fit is a number, not {error}")


class Fit(NamedTuple):
    target: StepTime
    draft: StepTime | None
    error: FitError


def fit(timings: Sequence[Timing]) -> Fit:
    """Step times that fit the points best.

    Weight of a point: repeats / seconds^2. Timing noise is roughly proportional to the time, and c and v are ratios, so
    relative errors are what count. The knee is searched on a grid between the measured token counts and kept only
    where it lowers the Bayesian information criterion (Schwarz 1978), R log(SSE / R) + k log R over R points. So are
    stairs, one a measured gamma in place of ``extra``, where each has more than one point.

    ``extra`` enters only where verification was timed apart from drafting, the draft's ``context`` only where contexts
    vary (at one context it is a slope); the target's shows at a single context too, if batches vary, since reading the
    cache costs by the sequence and not by the token. Another context than was measured is reported as outside.

    Raises ValueError without a plain step of the target: without it there is nothing to compare with.
    """
    if not any(point.part == "target" and point.gamma == 0 for point in timings):
        raise ValueError("no plain decode step among the timings: a speedup is relative to it")
    seconds = np.array([point.seconds for point in timings])
    scale = np.sqrt([float(point.repeats) for point in timings]) / seconds
    goal = scale * seconds

    best: tuple[float, float, tuple[int, ...], Matrix, Matrix] | None = None
    for knee, stairs in product([0.0, *_knees(timings)], sorted({(), _stairs(timings)})):
        design = _design(timings, knee, stairs) * scale[:, None]
        solution = nonnegative(design, goal)
        loss = float(np.sum((design @ solution - goal) ** 2)) / len(goal) + NOISE**2
        parameters = np.count_nonzero(solution) + (knee > 0.0)
        score = len(goal) * math.log(loss) + float(parameters) * math.log(len(goal))
        if best is None or score < best[0]:
            best = score, knee, stairs, design, solution
    assert best is not None
    _, knee, stairs, design, solution = best
    floor, slope, roof, extra, context, *rest = (float(x) for x in solution)
    drafting, heights = rest[:3], rest[3:]
    steps = tuple((float(gamma), height) for gamma, height in zip(stairs, heights, strict=True))
    target = StepTime(floor, slope, roof, knee if roof else 0.0, extra, context, steps)
    drafted = any(point.part != "target" for point in timings)
    draft = StepTime(drafting[0], drafting[1], context=drafting[2]) if drafted else None
    return Fit(target, draft, _error(design, goal, solution, seconds * scale))


def _knees(timings: Sequence[Timing]) -> list[float]:
    counts = sorted({point.batch * (1 + point.gamma) for point in timings if point.part != "draft"})
    # Between the two smallest counts, and between the two largest, a knee would be drawn from a single point.
    gaps = list(pairwise(counts[1:-1])) if len(counts) > 4 else []
    return [float(x) for a, b in gaps for x in np.geomspace(a, b, KNEES_PER_GAP, endpoint=False)]


def _stairs(timings: Sequence[Timing]) -> tuple[int, ...]:
    """Gammas that may have a stair of their own; none where one would be drawn from a single point."""
    points = Counter(point.gamma for point in timings if point.part == "target" and point.gamma)
    return tuple(sorted(points)) if len(points) > 1 and min(points.values()) > 1 else ()


def _design(timings: Sequence[Timing], knee: float, stairs: Sequence[int]) -> Matrix:
    """[points, 8 + stairs]: floor, slope, roof, extra and context of the target; floor, slope and context of the draft;
    one column a stair."""
    apart = any(point.part == "target" and point.gamma for point in timings)
    deep_draft = len({point.context for point in timings if point.part == "draft"}) > 1
    # Where every pass reads as many cached tokens, that reading cannot be told from the floor, and is counted there.
    deep = len({point.batch * point.context for point in timings if point.part != "draft"}) > 1
    rows = []
    for point in timings:
        row = [0.0] * 8 + [float(point.part != "draft" and point.gamma == gamma) for gamma in stairs]
        cached = point.batch * point.context
        if point.part != "draft":
            tokens = point.batch * (1 + point.gamma)
            roof = max(knee, tokens) if knee else 0.0
            row[:5] = [1.0, tokens, roof, float(apart and point.gamma > 0 and not stairs), cached * deep]
        if point.part != "target":
            passes = 1 if point.part == "draft" else point.gamma
            row[5:8] = [passes, passes * point.batch, passes * cached * deep_draft]
        rows.append(row)
    return np.array(rows)


def nonnegative(design: Matrix, goal: Matrix) -> Matrix:
    """Least squares with coefficients >= 0 (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23)."""
    norms = np.linalg.norm(design, axis=0)
    used = norms > 0.0
    a = design / np.where(used, norms, 1.0)
    columns = a.shape[1]
    x, active = np.zeros(columns), np.zeros(columns, dtype=bool)
    for _ in range(3 * columns):
        gradient = np.where(active | ~used, -np.inf, a.T @ (goal - a @ x))
        candidate = int(np.argmax(gradient))
        if gradient[candidate] <= 1e-12 * float(np.linalg.norm(goal)):
            break
        active[candidate] = True
        while True:
            trial = np.zeros(columns)
            trial[active] = np.linalg.lstsq(a[:, active], goal, rcond=1e-12)[0]
            bad = active & (trial <= 0.0)
            if not bad.any():
                break
            step = np.min(x[bad] / (x[bad] - trial[bad] + 1e-300))
            x = x + step * (trial - x)
            active &= x > 1e-14
            x[~active] = 0.0
        x = trial
    return np.asarray(x / np.where(used, norms, 1.0))


def _error(design: Matrix, goal: Matrix, solution: Matrix, unit: Matrix) -> FitError:
    """Errors relative to the measured time; left-out ones from the leverages of the columns in use (PRESS)."""
    residuals = design @ solution - goal
    relative = residuals / unit
    q, r = np.linalg.qr(design[:, solution > 0.0])
    independent = np.abs(np.diag(r)) > 1e-10 * np.abs(np.diag(r)).max()
    leverage = np.sum(q[:, independent] ** 2, axis=1)
    spare = leverage < 1.0 - 1e-9
    others = relative[spare] / (1.0 - leverage[spare])
    return FitError(
        points=len(goal),
        rms=float(np.sqrt(np.mean(relative**2))),
        worst=float(relative[np.argmax(np.abs(relative))]),
        left_out=float(np.sqrt(np.mean(others**2))) if len(others) else None,
        unchecked=int(np.count_nonzero(~spare)),
    )
