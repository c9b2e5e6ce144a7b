"""Is a candidate better than the incumbent? Both were judged on the same requests, so what is tested are differences.

A candidate is promoted when all of this is shown: where the gain was asked for its hit rate is higher by more than the
margin; in no cell that carries traffic is it lower by more than the tolerance (forgetting is how retraining fails); and
the share of requests slower than the incumbent's p99 of steps per token has not grown by more than the tail tolerance.
Since everything must be shown, each part is tested at the full error (an intersection-union test, Berger 1982): a
candidate for which one part is false passes with that probability at most, whatever the number of cells. It is rejected
when the contrary of any part is shown; there the error is divided by the number of parts (Bonferroni). Else: more data.

Two tests, each with half of the error, so that both together keep it:

- :func:`fixed`, one look at a history of fixed size. The difference of two pooled ratios, R_c - R_i, has the linearised
  variance R / (R - 1) sum z^2 over R units, z = w (a_c - R_c t_c) / T_c - w (a_i - R_i t_i) / T_i summed over a unit
  (Cochran 1977, sections 6.3 and 9A: the delta method under cluster sampling), and the Student quantile of the
  effective number of units.
- :func:`sequential`, any number of looks while requests come in. For a claim on the mean of a bounded difference D, the
  product of 1 + bet w (D - m) / (1 + m) is a non-negative supermartingale while the claim is false, so it exceeds
  1 / error with probability at most error, ever (Ville 1939; betting: Waudby-Smith and Ramdas 2024). D is the
  difference of a unit's two hit rates, w = n / (n + 10) for n judged tokens: little weight to the rates of a few.

The unit is the request, or the session where its label is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from driftwatch.drift.evidence import BETS
from driftwatch.drift.interval import student_quantile
from driftwatch.drift.paired import MIN_UNITS, Finding, Floats, Pairs, Row, differences, paired, shares, sums_by

Outcome = Literal["promote", "reject", "more_data"]

MIN_TOKENS = 16
"""Shorter answers have extreme steps per token by chance."""
TAIL = 0.99


@dataclass(frozen=True)
class Rules:
    """Margin and tolerance in hit rate, absolute; tail tolerance and least share of requests; error a probability."""

    margin: float = 0.01
    tolerance: float = 0.03
    min_share: float = 0.01
    tail_tolerance: float = 0.01
    error: float = 0.01


@dataclass(frozen=True)
class Tail:
    """Requests that take more steps per token than ``limit``, the incumbent's p99; shares of the requests looked at."""

    requests: int
    limit: float | None
    incumbent_p99: float | None
    candidate_p99: float | None
    incumbent_share: float | None
    candidate_share: float | None
    lower: float | None
    upper: float | None
    finding: Finding = "open"


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    reasons: tuple[str, ...]
    table: tuple[Row, ...]
    overall: Row
    tail: Tail


def fixed(pairs: Pairs, cells: Sequence[str], asked: Sequence[int] | None, rules: Rules) -> Verdict:
    """Judge a sample whose size was fixed beforehand, once.

    ``cells`` are the names of the cells by number, ``asked`` are those that need the gain, together; None: all.
    """
    error = rules.error / 2.0
    by_cell = shares(pairs)
    carrying = [cell for cell, share in enumerate(by_cell) if share >= rules.min_share]
    parts = len(carrying) + 2
    shown, refuted = 1.0 - 2.0 * error, 1.0 - 2.0 * error / parts
    rows = []
    for cell, share in enumerate(by_cell):
        part = pairs.where(pairs.cell == cell)
        row = paired(part, shown, cell=cell, share=share)
        wide = paired(part, refuted, cell=cell, share=share)
        rows.append(
            _judged(row, wide, -rules.tolerance, "kept", "worse") if cell in carrying else replace(row, finding="small")
        )
    overall = paired(pairs, shown)
    gain_pairs = pairs if asked is None else pairs.where(np.isin(pairs.cell, asked))
    gain = _judged(paired(gain_pairs, shown), paired(gain_pairs, refuted), rules.margin, "better", "not_better").finding
    return _verdict(
        rows, overall, gain, _name(cells, asked), cells, _tail(pairs, shown, refuted, rules.tail_tolerance), rules
    )


def sequential(
    pairs: Pairs, cells: Sequence[str], asked: Sequence[int] | None, limit: float | None, rules: Rules
) -> Verdict:
    """Judge what has come in so far; may be asked again whenever more has. ``limit`` is the p99 that history gave.

    The interval in the rows is that of a single look: it describes, the finding decides.
    """
    error = rules.error / 2.0
    pairs = pairs.where(pairs.unit >= 0)
    by_cell = shares(pairs)
    carrying = [cell for cell, share in enumerate(by_cell) if share >= rules.min_share]
    needed, contrary = math.log(1.0 / error), math.log((len(carrying) + 2) / error)
    rows = []
    for cell, share in enumerate(by_cell):
        part = pairs.where(pairs.cell == cell)
        row = paired(part, 0.95, cell=cell, share=share)
        if cell not in carrying:
            rows.append(replace(row, finding="small"))
        else:
            finding = _claim(*differences(part), -rules.tolerance, needed, contrary, "kept", "worse")
            rows.append(replace(row, finding=finding))
    overall = paired(pairs, 0.95)
    gain_pairs = pairs if asked is None else pairs.where(np.isin(pairs.cell, asked))
    gain = _claim(*differences(gain_pairs), rules.margin, needed, contrary, "better", "not_better")
    tail = _tail_figures(pairs, 0.95, limit)
    slower = _slower(pairs, limit)
    finding = _claim(-slower, np.ones(len(slower)), -rules.tail_tolerance, needed, contrary, "kept", "worse")
    return _verdict(rows, overall, gain, _name(cells, asked), cells, replace(tail, finding=finding), rules)


def _judged(row: Row, wide: Row, least: float, yes: Finding, no: Finding) -> Row:
    """Whether the difference is shown to be above ``least``, or, on the wider interval, below."""
    if row.lower is not None and row.lower > least:
        return replace(row, finding=yes)
    return replace(row, finding=no if wide.upper is not None and wide.upper < least else "open")


def _tail(pairs: Pairs, shown: float, refuted: float, tolerance: float) -> Tail:
    limit = p99(pairs.incumbent_steps, pairs.tokens)
    tail, wide = _tail_figures(pairs, shown, limit), _tail_figures(pairs, refuted, limit)
    if tail.upper is not None and tail.upper < tolerance:
        return replace(tail, finding="kept")
    return replace(tail, finding="worse" if wide.lower is not None and wide.lower > tolerance else "open")


def p99(steps: Floats, tokens: Floats) -> float | None:
    """Steps per token that one request in a hundred exceeds; None without any that is long enough."""
    long = tokens >= MIN_TOKENS
    return float(np.quantile(steps[long] / tokens[long], TAIL, method="higher")) if long.any() else None


def _slower(pairs: Pairs, limit: float | None) -> Floats:
    """For each unit in order: share of its requests that the candidate makes slower than the limit, less those that
    the incumbent does."""
    long = pairs.tokens >= MIN_TOKENS
    if limit is None or not long.any():
        return np.zeros(0)
    tokens, edge = pairs.tokens[long], limit * (1.0 + 1e-9)
    more = (pairs.steps[long] / tokens > edge).astype(float) - (pairs.incumbent_steps[long] / tokens > edge)
    unit = np.unique(pairs.unit[long], return_inverse=True)[1]
    return sums_by(unit, more) / np.bincount(unit)


def _tail_figures(pairs: Pairs, confidence: float, limit: float | None) -> Tail:
    """Shares beyond the limit; one request more than was seen keeps a tail that nobody saw from being no tail."""
    long = pairs.tokens >= MIN_TOKENS
    more = _slower(pairs, limit)
    candidate, incumbent = p99(pairs.steps, pairs.tokens), p99(pairs.incumbent_steps, pairs.tokens)
    if limit is None or len(more) < MIN_UNITS:
        return Tail(int(long.sum()), limit, incumbent, candidate, None, None, None, None)
    edge, tokens = limit * (1.0 + 1e-9), pairs.tokens[long]
    shares = [float((steps[long] / tokens > edge).mean()) for steps in (pairs.incumbent_steps, pairs.steps)]
    reach = student_quantile(len(more) - 1, confidence) * math.sqrt(float((more**2).sum()) + 1.0) / len(more)
    d = float(more.mean())
    return Tail(int(long.sum()), limit, incumbent, candidate, shares[0], shares[1], d - reach, d + reach)


def _claim(
    differences: Floats, weights: Floats, least: float, needed: float, contrary: float, yes: Finding, no: Finding
) -> Finding:
    """Whether evidence that the mean is above ``least`` has ever reached what is needed, or that it is below."""
    x = weights * (differences - least)
    if _evidence(x / (1.0 + least)) >= needed:
        return yes
    return no if _evidence(-x / (1.0 - least)) >= contrary else "open"


def _evidence(x: Floats) -> float:
    """Largest log of the mean over bets of the products of 1 + bet x, x at least -1; 0 before the first."""
    if not len(x):
        return 0.0
    logs = np.cumsum(np.log1p(np.multiply.outer(np.array(BETS), x)), axis=1)
    top = logs.max(axis=0)
    mixed = top + np.log(np.exp(logs - top).mean(axis=0))
    return max(0.0, float(mixed.max()))


def _name(cells: Sequence[str], asked: Sequence[int] | None) -> str:
    return "all requests" if asked is None else " and ".join(cells[cell] for cell in asked) or "a cell without requests"


def _verdict(
    rows: list[Row], overall: Row, gain: Finding, asked: str, cells: Sequence[str], tail: Tail, rules: Rules
) -> Verdict:
    def named(finding: Finding) -> list[str]:
        return [cells[row.cell] for row in rows if row.finding == finding and row.cell is not None]

    against = [f"worse by more than {rules.tolerance} in {name}" for name in named("worse")]
    if gain == "not_better":
        against.append(f"no gain of {rules.margin} in {asked}")
    if tail.finding == "worse":
        against.append(f"more requests are slower than the incumbent's p99, by more than {rules.tail_tolerance} of all")
    missing = [f"not shown: no worse by more than {rules.tolerance} in {name}" for name in named("open")]
    if gain == "open":
        missing.append(f"not shown: a gain of {rules.margin} in {asked}")
    if tail.finding == "open":
        missing.append("not shown: a tail that is no worse")
    if against:
        return Verdict("reject", tuple(against), tuple(rows), overall, tail)
    if missing:
        return Verdict("more_data", tuple(missing), tuple(rows), overall, tail)
    return Verdict("promote", (f"better in {asked}, and worse nowhere",), tuple(rows), overall, tail)
