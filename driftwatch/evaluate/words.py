"""Figures as people read them."""

from __future__ import annotations

from driftwatch.economics.range import Range
from driftwatch.economics.verdict import Verdict
from driftwatch.evaluate.baseline import Baseline, Source
from driftwatch.evaluate.report import Report

NO_DATA = "not enough data"

SOURCES: dict[Source | None, str] = {
    "measured": "measured on real engines",
    "predicted": "predicted from the cost profile",
    "recorded": "as recorded",
    None: "unknown",
}


def number(x: float | None, digits: int = 2) -> str:
    return NO_DATA if x is None else f"{x:,.{digits}f}"


def share(x: float | None) -> str:
    return NO_DATA if x is None else f"{100 * x:.1f}%"


def seconds(x: float | None) -> str:
    """In the unit that leaves no zeros in front."""
    if x is None:
        return NO_DATA
    return f"{1000 * x:,.2f} ms" if x < 1.0 else f"{x:,.2f} s"


def limits(found: Range, unit: str = "") -> str:
    """A value with its limits; ``unit`` is one of "", "s" and "%"."""
    put = {"": number, "s": seconds, "%": share}[unit]
    if found.value is None:
        return NO_DATA
    if found.lower is None and found.upper is None:
        return f"{put(found.value)} (no limits: too few requests)"
    low, high = ("?" if x is None else put(x) for x in (found.lower, found.upper))
    return f"{put(found.value)} ({low} to {high})"


def costs(report: Report) -> str:
    """Where the costs of a step come from, in one line."""
    profile = report.profile
    if profile is None:
        return "costs of a step are unknown"
    on = " ".join(fact for fact in (profile.bound.device, profile.bound.dtype) if fact)
    fit = "" if profile.error is None else f"; the fit is off by {100.0 * profile.error.rms:.1f}%"
    return f"costs {profile.origin}{f', {on}' if on else ''}{fit}"


def conditions(report: Report) -> str:
    """What was compared, in one line."""
    at = report.conditions
    load = f"batch {at.batch:g}" if at.rate is None else f"{at.rate:g} requests a second and engine"
    return f"gamma {at.gamma} in use, {load}"


def decision(verdict: Verdict) -> str:
    return {
        "use": f"use, gamma {verdict.gamma}",
        "use_with_gamma": f"use with gamma {verdict.gamma}",
        "do_not_use": "do not use",
        "not_enough_data": NO_DATA,
    }[verdict.decision]


def prefill(found: Baseline) -> str:
    if found.prefill_share is None:
        return "how much of a request is decoding is unknown: the records carry no times"
    said = f"decoding is {share(1.0 - found.prefill_share)} of a request's time ({SOURCES[found.prefill_source]})"
    if found.prefill_share == 0.0:
        return said
    return f"{said}: were it free, a request would be {1.0 / found.prefill_share:.2f} times as fast, and no faster"
