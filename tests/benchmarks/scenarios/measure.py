"""False alarms on stable traffic, delays beside rivals, coverage of intervals, cost of an update."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from driftwatch.drift.baseline import Baseline
from driftwatch.drift.cell import CellState, DriftOpened, Rules
from driftwatch.drift.interval import EMPTY, ratio
from driftwatch.drift.units import Unit
from tests.benchmarks.scenarios.rivals import Always, Never, Oracle, Ours, Rival, River, has_river
from tests.benchmarks.scenarios.traffic import DAY_REQUESTS, Floats, Request, Shape, requests

BASE = Shape()
ONE = Shape(tenants=(("a", 1.0, 0.0),))
"""One cell: one tenant, and no split."""
Figures = dict[str, Any]
CHUNK = 100_000
TOLERANCE, THRESHOLD = 0.03, 100_000.0


def lower(shape: Shape, fall: float) -> Shape:
    """The same traffic with a match probability less by ``fall`` within every cell."""
    return replace(shape, match_on=shape.match_on - fall, match_off=shape.match_off - fall)


def chunks(rng: np.random.Generator, shape: Shape, count: int, first: int = 0) -> Iterator[Request]:
    for start in range(0, count, CHUNK):
        yield from requests(rng, shape, min(CHUNK, count - start), first=first + start)


STABLE = {
    "plain": BASE,
    "sessions": replace(BASE, turns=5.0, session_sd=0.12),
    "swing .02": replace(BASE, swing=0.02),
    "swing .05": replace(BASE, swing=0.05),
}


def stable(count: int, seed: int, names: Iterable[str] = tuple(STABLE)) -> Figures:
    """Alarms of the cells on traffic that does not change, against what was promised. Baselines learn for a day."""
    found = {}
    for name in names:
        shape = STABLE[name]
        rules = Rules(tolerance=TOLERANCE, threshold=THRESHOLD, min_requests=500, min_hours=24.0)
        cells: dict[tuple[str, bool], CellState] = {}
        alarms = watched = 0
        for one in chunks(np.random.default_rng(seed), shape, count):
            cell = cells.setdefault((one.tenant, one.flagged), CellState.start(rules))
            watched += cell.detector is not None
            changes = cell.observe(one.time_s, one.at, one.session, one.accepted, one.tested)
            alarms += sum(isinstance(change, DriftOpened) for change in changes)
        found[name] = {"requests": count, "watched": watched, "alarms": alarms, "promised": round(watched / 1e5, 1)}
    return found


def units(rng: np.random.Generator, shape: Shape, count: int, first: int = 0) -> list[Unit]:
    return [Unit(r.at, 0.0, 0.0, 1, r.accepted, r.tested) for r in chunks(rng, shape, count, first)]


class Quiet(NamedTuple):
    """Stable requests, as the oracles' limits are set on them."""

    weights: Floats
    rates: Floats

    @classmethod
    def of(cls, found: Iterable[Unit]) -> Quiet:
        pairs = np.array([(unit.weight, unit.rate) for unit in found])
        return cls(pairs[:, 0], pairs[:, 1])

    @property
    def mean(self) -> float:
        """The functional that is tested."""
        return float((self.weights * self.rates).sum() / self.weights.sum())

    def limit(self, middle: float, alarms: int) -> float:
        """The CUSUM's limit with so many alarms here."""
        steps = self.weights * (middle - self.rates)
        high = float(_reflected(steps).max()) * (1.0 + 1e-9)
        if alarms == 0:
            return high
        low = 0.0
        for _ in range(30):
            limit = (low + high) / 2.0
            low, high = (limit, high) if _more_alarms(steps, limit, alarms) else (low, limit)
        return high


def _reflected(steps: Floats) -> Floats:
    """S <- max(0, S + step), all at once: the walk less its least value so far."""
    walk = np.cumsum(steps)
    return walk - np.minimum(np.minimum.accumulate(walk), 0.0)


def _more_alarms(steps: Floats, limit: float, alarms: int) -> bool:
    """Whether a CUSUM that starts afresh after each alarm has more than so many."""
    at = 0
    for _ in range(alarms + 1):
        over = _reflected(steps[at:]) >= limit
        if not over.any():
            return False
        at += int(over.argmax()) + 1
    return True


FALLS = (0.02, 0.05, 0.10, 0.20)
"""In match probability."""


def delays(runs: int, quiet_requests: int, seed: int, falls: Iterable[float] = FALLS) -> Figures:
    """Requests from a fall to the first alarm, 4,000 stable requests before it; and alarms before it.

    The oracle's limits: as few alarms as ours in the stable requests (none), and one in 100,000. Its peer has our
    tolerance in its null, and one alarm in 100,000 where the mean lies on the floor: what we promise, and no more.
    """
    rng = np.random.default_rng(seed)
    stable = units(rng, ONE, quiet_requests)
    quiet = Quiet.of(stable)
    before = quiet.mean
    ours = Ours(before - 0.01, TOLERANCE, THRESHOLD)
    quiet_alarms = {"ours": sum(map(ours.alarms, stable))}
    if has_river():
        for name in ("ADWIN", "PageHinkley"):
            quiet_alarms[name] = sum(map(River(name).alarms, stable[:300_000]))
    promised = quiet_requests // 100_000
    report: Figures = {"stable requests": quiet_requests, "alarms on them": quiet_alarms, "falls": {}}
    for fall in falls:
        after = Quiet.of(units(rng, lower(ONE, fall), max(quiet_requests // 20, 5000))).mean
        middle = (before + after) / 2.0
        limits = [quiet.limit(middle, alarms) for alarms in (quiet_alarms["ours"], promised)]
        # Stable requests with all rates less by the tolerance are traffic on the floor.
        peer = quiet.limit(middle + TOLERANCE / 2.0, promised)
        taken: dict[str, list[int | None]] = {}
        early: dict[str, int] = {}
        for _ in range(runs):
            history = units(rng, ONE, 4000) + units(rng, lower(ONE, fall), 3000, 4000)
            baseline = Baseline(TOLERANCE, 500, 0.0)
            frozen = next(i for i, unit in enumerate(history, 1) if baseline.add(unit))
            day = Baseline(TOLERANCE, min(DAY_REQUESTS, quiet_requests), 0.0)
            start = int(rng.integers(0, quiet_requests - day.min_requests + 1))
            for unit in stable[start : start + day.min_requests]:
                day.add(unit)
            assert baseline.lower is not None
            assert day.lower is not None
            rivals: dict[str, Rival] = {
                "ours": Ours(baseline.lower, TOLERANCE, THRESHOLD),
                "ours, learnt over a day": Ours(day.lower, TOLERANCE, THRESHOLD),
                "ours, true mean": Ours(before, TOLERANCE, THRESHOLD),
                "ours, true mean, tolerance .01": Ours(before, 0.01, THRESHOLD),
                "oracle, same run length": Oracle(before, after, limits[0]),
                "oracle, 100,000": Oracle(before, after, limits[1]),
                "oracle with the tolerance": Oracle(before - TOLERANCE, after, peer),
                "always": Always(),
                "never": Never(),
            }
            if has_river():
                rivals |= {name: River(name) for name in ("ADWIN", "PageHinkley")}
            for name, rival in rivals.items():
                early[name] = early.get(name, 0) + sum(map(rival.alarms, history[frozen:4000]))
                found = (at for at, unit in enumerate(history[4000:], 1) if rival.alarms(unit))
                taken.setdefault(name, []).append(next(found, None))
        report["falls"][str(fall)] = {
            "hit rate": [round(before, 4), round(after, 4)],
            **{name: delay_of(values) | {"early": early[name]} for name, values in taken.items()},
        }
    return report


def delay_of(values: list[int | None]) -> Figures:
    seen = sorted(x for x in values if x is not None)
    return {
        "found": f"{len(seen)}/{len(values)}",
        "median": float(np.median(seen)) if seen else None,
        "p90": float(np.quantile(seen, 0.9)) if seen else None,
    }


def small_segment(runs: int, seed: int) -> Figures:
    """A fall of .10 in a tenant of 1% of the traffic, after 100,000 requests; in requests of that tenant."""
    tenants = (("a", 0.69, 0.0), ("b", 0.30, -0.05))
    taken: list[int | None] = []
    others = early = 0
    for run in range(runs):
        rng = np.random.default_rng([seed, run])
        rules = Rules(tolerance=TOLERANCE, threshold=THRESHOLD, min_requests=500, min_hours=24.0)
        cells: dict[str, CellState] = {}
        mine = 0
        delay = None
        before = chunks(rng, replace(BASE, tenants=(*tenants, ("c", 0.01, 0.0))), 100_000)
        # The rest of the traffic stays; the tenant's own requests match less often.
        after = chunks(rng, replace(BASE, tenants=(*tenants, ("c", 0.01, -0.10))), 100_000, 100_000)
        for stream in (before, after):
            for one in stream:
                cell = cells.setdefault(one.tenant, CellState.start(rules))
                mine += one.tenant == "c" and one.at >= 100_000
                for change in cell.observe(one.time_s, one.at, None, one.accepted, one.tested):
                    if isinstance(change, DriftOpened):
                        others += one.tenant != "c"
                        early += one.at < 100_000
                        delay = mine if one.tenant == "c" and delay is None and mine else delay
        taken.append(delay)
    return {"runs": runs, "early": early, "in other cells": others, "delay in its own requests": delay_of(taken)}


def coverage(runs: int, seed: int) -> Figures:
    """How often the 95% interval of the pooled hit rate holds the truth, 150 requests a run; sessions as units too."""
    report = {}
    for name, shape in (("requests", ONE), ("sessions", replace(ONE, turns=5.0, session_sd=0.12))):
        rng = np.random.default_rng(seed)
        every = list(chunks(rng, shape, 150 * runs))
        # The truth is taken from the runs themselves and four times as many requests again.
        more = list(chunks(rng, shape, 600 * runs))
        truth = sum(r.accepted for r in (*every, *more)) / sum(r.tested for r in (*every, *more))
        held = 0
        for run in range(runs):
            totals: dict[str, list[float]] = {}
            for r in every[150 * run : 150 * (run + 1)]:
                sums = totals.setdefault(r.session or str(r.at), [0.0, 0.0])
                sums[0], sums[1] = sums[0] + r.accepted, sums[1] + r.tested
            moments = EMPTY
            for y, n in totals.values():
                moments = moments.with_unit(y, n)
            found = ratio(moments)
            assert found.lower is not None
            assert found.upper is not None
            held += found.lower <= truth <= found.upper
        report[name] = {"runs": runs, "truth": round(truth, 4), "covered": round(held / runs, 4)}
    return report


def cost(count: int, seed: int) -> Figures:
    """CPU microseconds of one request at 1,000 cells, and the ratio to adding its counts in a dict of lists."""
    rng = np.random.default_rng(seed)
    history = list(requests(rng, ONE, count))
    names = [f"cell-{i}" for i in rng.integers(0, 1000, count).tolist()]
    cells = {f"cell-{i}": CellState.start(Rules(given=0.65)) for i in range(1000)}
    best: dict[str, float] = {}
    for _ in range(3):
        plain: dict[str, list[float]] = {name: [0.0, 0.0, 0.0] for name in cells}
        started = time.process_time()
        for name, one in zip(names, history, strict=True):
            sums = plain[name]
            sums[0] += 1
            sums[1] += one.accepted
            sums[2] += one.tested
        middle = time.process_time()
        for name, one in zip(names, history, strict=True):
            cells[name].observe(one.time_s, one.at, one.session, one.accepted, one.tested)
        ended = time.process_time()
        for key, taken in (("dict", middle - started), ("cell", ended - middle)):
            best[key] = min(best.get(key, taken), taken)
    micro = {key: round(1e6 * taken / count, 2) for key, taken in best.items()}
    return {**micro, "ratio": round(best["cell"] / best["dict"], 1)}
