"""Figures and names as people read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from driftwatch.control.reports import rfc3339
from driftwatch.drift.interval import Estimate
from driftwatch.drift.quantiles import Quantile
from driftwatch.economics.range import Range

UNKNOWN = "not enough data"

KINDS: Mapping[str, str] = {
    "drift": "acceptance fell",
    "off_share": "more requests are off the training distribution",
    "surprise": "the target finds what it serves unlikely",
    "live_gap": "the engine accepts less than the replay",
    "below_break_even": "acceptance is below break-even",
    "slower": "more requests are made slower",
    "tail_worse": "the median gets faster, the tail slower",
    "hit_rate_above": "acceptance rose",
    "ttft_slo": "the first token comes too late too often",
    "tpot_slo": "tokens come too slowly too often",
    "canary": "the target answers otherwise",
    "deployment_changed": "the deployment changed",
    "deployment_regressed": "acceptance is worse since the deployment changed",
}
METRICS: Mapping[str, str] = {
    "hit_rate": "hit rate",
    "acceptance_rate": "acceptance rate",
    "acceptance_length": "acceptance length",
    "steps_per_token": "steps a token",
    "off_share": "share of requests off the training distribution",
    "below_break_even": "acceptance length",
    "slower": "share of requests made slower",
    "tail_worse": "share of requests made slower",
    "live_gap": "engine less replay",
    "agreement": "windows in which engine and replay agree",
    "surprise": "share of requests that surprise the target",
    "hit_rate_above": "hit rate",
    "ttft_slo": "share of requests over the limit",
    "tpot_slo": "share of requests over the limit",
    "differ": "share of canary prompts answered otherwise",
}
ACTIONS: Mapping[str, str] = {
    "retrain": "train the draft on what is served now",
    "rollback_target": "roll the target back, or distil the draft anew on its answers",
    "rollback_draft": "roll the draft back",
    "fix_engine": "look at the engine's version and flags: the draft is as good as it was",
    "lower_gamma": "propose fewer tokens",
    "disable_speculation": "switch speculation off here",
    "none": "look at it",
}


def kind(name: str) -> str:
    """What an event says happened."""
    return KINDS.get(name, plain(name))


def metric(name: str) -> str:
    return METRICS.get(name, plain(name))


def action(name: str | None) -> str:
    """What is recommended."""
    return ACTIONS.get(name or "none", plain(name or "none"))


def plain(name: object) -> str:
    """A name of programs without its underscores."""
    return str(name).replace("_", " ")


def number(value: float | None, digits: int = 3) -> str:
    """Rounded; what is not known says so."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def capitalize_first(text: str) -> str:
    """As the beginning of a sentence; names further on stay as they are written."""
    return text[:1].upper() + text[1:]


def count(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}"


def estimate(found: Estimate | Quantile | Range | Mapping[str, Any] | None, digits: int = 3) -> Markup:
    """``value (lower to upper)``, the limits smaller; without either it says so. Stored events hold mappings."""
    get = (found or {}).get if found is None or isinstance(found, Mapping) else vars(found).get
    value, lower, upper = (get(name) for name in ("value", "lower", "upper"))
    if value is None:
        return Markup('<span class="open">{}</span>').format(UNKNOWN)
    if lower is None or upper is None:
        return Markup("{} <small>too few requests for limits</small>").format(number(value, digits))
    limits = f"{number(lower, digits)} to {number(upper, digits)}"
    return Markup('{} <small class="limits">{}</small>').format(number(value, digits), limits)


def time(seconds: float | None, format: str = "%d %b %H:%M") -> Markup:
    """A moment, UTC."""
    if seconds is None:
        return Markup("not known")
    shown = datetime.fromtimestamp(seconds, UTC).strftime(format)
    return Markup('<time datetime="{}">{}</time>').format(rfc3339(seconds), shown)


def pretty(value: Any) -> str:
    """Anything stored, as indented JSON."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def duration(seconds: float) -> str:
    """About how long: the largest unit that fits."""
    for name, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            whole = int(seconds // size)
            return f"{whole} {name}{'' if whole == 1 else 's'}"
    return f"{int(seconds)} s"
