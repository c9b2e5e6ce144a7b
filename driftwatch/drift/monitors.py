"""The other figures under watch: the hit rate's test with a level, a side and a weight of their own.

Each takes units whose counts are a part of a whole (``Unit.accepted`` of ``Unit.tested``), so that sessions are
collected as everywhere, and tests the mean of the rates x = part / whole, weighted by w = whole / (whole + half):

    below:  H0: E[w (x - limit) | past] >= 0        above:  H0: E[w (limit - x) | past] >= 0

with the e-detector of ``evidence``: under its null, for any distribution, at most one alarm in ``threshold`` units on
average. Each is latched and closed as :mod:`driftwatch.drift.latch` says. Every test that a request feeds takes its
share of the false alarms: with k of them, give each k times the threshold wanted for all.

| test | part / whole of a request | half | null |
| --- | --- | --- | --- |
| ``hit_rate_above`` | accepted / tested | 5 | mean hit rate <= baseline's upper limit + tolerance |
| ``below_break_even`` | accepted / (gamma x windows) | 64 gamma | mean acceptance length >= break-even - tolerance |
| ``share_above`` | 1 / 1 if it is so, else 0 / 1 | 0 | share <= baseline's upper limit + tolerance |
| ``tail_worse`` | 1 / 1 if the request is made slower, else 0 / 1 | 0 | share <= 1 %: the p99 is not slower |
| ``live_below_shadow`` | T (1 + live - shadow) / 2 of T | 5 | mean gap >= its own baseline's lower limit - tolerance |
| ``agreement_below`` | agreeing windows / windows | 5 | mean agreement >= baseline's lower limit - tolerance |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from driftwatch.drift.baseline import Baseline
from driftwatch.drift.evidence import Evidence, fall, rise
from driftwatch.drift.interval import EMPTY, Moments
from driftwatch.drift.latch import Latch
from driftwatch.drift.units import HALF_WEIGHT, Unit

Side = Literal["below", "above"]
Counts = tuple[float, float]
"""Part and whole."""

EDGE = 0.001
"""Levels nearer to 0 or 1 are blind on that side: no figure lies clearly beyond them."""

BREAK_EVEN_HALF = 64.0
"""Windows at which a request has half its weight in the break-even test. Cost adds up over windows, so the weight
must be near proportional to them for all but the longest requests."""

TAIL = 0.01
"""Share of requests beyond the p99."""

HYSTERESIS = 0.02
"""Least distance between the alarm's level and the one that ends an event, on the scale of x."""


@dataclass
class Monitor(Latch):
    """State of one test. ``limit`` is the edge of the null, ``recovery`` the level that a mean must pass to close."""

    side: Side
    limit: float
    recovery: float
    threshold: float
    half: float = HALF_WEIGHT
    falling: Evidence = field(default_factory=Evidence)
    rising: Evidence | None = None
    totals: Moments = EMPTY
    opened_index: int | None = None

    def __post_init__(self) -> None:
        inside = self.recovery > self.limit if self.side == "below" else self.recovery < self.limit
        if not (inside and self.threshold > 1.0 and self.half >= 0.0):
            raise ValueError(
                f"recovery {self.recovery} must lie on the healthy side of limit {self.limit}, with a threshold above "
                f"1 and a half weight of at least 0, not {self.threshold} and {self.half}"
            )

    @property
    def blind(self) -> bool:
        """No figure can lie beyond the limit."""
        return self.limit < EDGE if self.side == "below" else self.limit > 1.0 - EDGE

    def weigh(self, unit: Unit) -> float:
        return unit.weighed(self.half)

    def against(self, unit: Unit, weight: float) -> float:
        return (fall if self.side == "below" else rise)(unit.rate, _inside(self.limit), weight)

    def recovering(self, unit: Unit, weight: float) -> float:
        return (rise if self.side == "below" else fall)(unit.rate, _inside(self.recovery), weight)

    def to_json(self) -> dict[str, Any]:
        return {
            "side": self.side,
            "limit": self.limit,
            "recovery": self.recovery,
            "threshold": self.threshold,
            "half": self.half,
            "falling": self.falling.to_json(),
            "rising": None if self.rising is None else self.rising.to_json(),
            "totals": list(self.totals),
            "opened_index": self.opened_index,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Monitor:
        rising = None if data["rising"] is None else Evidence.from_json(data["rising"])
        kept = {"falling": Evidence.from_json(data["falling"]), "rising": rising, "totals": Moments(*data["totals"])}
        return cls(**{**data, **kept})


def hit_rate_above(baseline: Baseline, threshold: float) -> Monitor | None:
    """Hit rate above normal: repetition loops are easy to draft. None while the baseline learns, as for all below."""
    return _above(baseline, threshold)


def share_above(baseline: Baseline, threshold: float) -> Monitor | None:
    """A share of requests above normal: off the draft's training distribution, or made slower by speculation.

    The baseline (a ``half_weight`` of 0) is learnt, that of the off-share too. The sketch's calibration promises its
    epsilon for prompts that are exchangeable with the training data. Production hardly ever is, so that a null of
    epsilon would alarm at once, never close, and say nothing of a change. How much is off from the start is told by
    the share itself, with its purity.
    """
    return _above(baseline, threshold)


def live_below_shadow(baseline: Baseline, threshold: float) -> Monitor | None:
    """The engine accepts less than the replay of the same request says it should, beyond the usual gap.

    Paired, so that easy and hard requests cancel. On the scale (1 + gap) / 2 of :func:`gap_counts`, in which the
    baseline's tolerance counts too: half of that in hit rate.
    """
    return _below(baseline, threshold)


def agreement_below(baseline: Baseline, threshold: float) -> Monitor | None:
    """Fewer windows than usual in which engine and replay accept the same number of proposals."""
    return _below(baseline, threshold)


def below_break_even(break_even: float, gamma: int, threshold: float, *, tolerance: float = 0.0) -> Monitor:
    """Acceptance length (bonus included) below what speculation costs, from the first request on: no baseline.

    The null is about the mean weighted by windows / (windows + 64): the pooled ratio but for the longest requests.
    Raises ValueError for a break-even that no draft of this gamma can reach.
    """
    if not 1.0 < break_even <= 1.0 + gamma:
        raise ValueError(f"a break-even of {break_even} tokens a window cannot be met or missed at gamma {gamma}")
    limit = (break_even - tolerance - 1.0) / gamma
    return Monitor("below", limit, limit + HYSTERESIS, threshold, BREAK_EVEN_HALF * gamma)


def tail_worse(threshold: float) -> Monitor:
    """More than one request in a hundred is made slower, so that the p99 is: from the first request on, no baseline.

    Whether the median is faster meanwhile is for the caller to see: by its limit, since that is what the event is
    about, and the promise on false alarms rests on this test alone. It closes at half of the share.
    """
    return Monitor("above", TAIL, TAIL / 2.0, threshold, 0.0)


def length_counts(accepted: float, windows: float, gamma: int) -> Counts:
    """One request for :func:`below_break_even`: the share accepted of what gamma allows."""
    return accepted, gamma * windows


def share_counts(happened: bool) -> Counts:
    """One request for :func:`share_above`."""
    return float(happened), 1.0


def gap_counts(live: Counts, shadow: Counts) -> Counts:
    """One request for :func:`live_below_shadow`, from (accepted, tested) of both; (0, 0) where one tested nothing."""
    whole = min(live[1], shadow[1])
    if whole <= 0.0:
        return 0.0, 0.0
    gap = live[0] / live[1] - shadow[0] / shadow[1]
    return min(max(whole * (1.0 + gap) / 2.0, 0.0), whole), whole


def agreement_counts(live: list[int], shadow: list[int]) -> Counts:
    """One request for :func:`agreement_below`, from accepted proposals by window.

    Windows are matched by where they start in the output: behind a disagreement the two walks differ, and comparing by
    number would call everything after it wrong. The last window of each is left out, since engines count proposals
    beyond the last served token.
    """
    theirs, ours = _starts(live), _starts(shadow)
    same = sum(1 for at, accepted in theirs.items() if ours.get(at) == accepted)
    return float(same), float(len(theirs))


def _starts(windows: list[int]) -> dict[int, int]:
    found, at = {}, 0
    for accepted in windows[:-1]:
        found[at] = accepted
        at += accepted + 1
    return found


def _below(baseline: Baseline, threshold: float) -> Monitor | None:
    if baseline.frozen is None or baseline.frozen.lower is None:
        return None
    limit = baseline.frozen.lower - baseline.tolerance
    return Monitor("below", limit, limit + baseline.tolerance / 2.0, threshold, baseline.half_weight)


def _above(baseline: Baseline, threshold: float) -> Monitor | None:
    if baseline.frozen is None or baseline.frozen.upper is None:
        return None
    limit = baseline.frozen.upper + baseline.tolerance
    return Monitor("above", limit, limit - baseline.tolerance / 2.0, threshold, baseline.half_weight)


def _inside(level: float) -> float:
    return min(max(level, EDGE), 1.0 - EDGE)
