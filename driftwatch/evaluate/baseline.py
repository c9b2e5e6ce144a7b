"""Section 1: the target alone. How long a token takes, what a million of them cost, how much of it is decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from driftwatch.economics.load import Load, settle
from driftwatch.economics.price import per_million
from driftwatch.economics.profile import CostProfile
from driftwatch.economics.quantile import quantile
from driftwatch.economics.range import Range
from driftwatch.economics.tail import QUANTILES
from driftwatch.evaluate.request import Clock, Request

Source = Literal["measured", "predicted", "recorded"]
"""``measured``: by sending requests to engines, now. ``predicted``: from a cost profile. ``recorded``: in the files."""

Percentiles = Mapping[float, Range]


@dataclass(frozen=True)
class Conditions:
    """Under which both ways to decode are compared."""

    gamma: int
    """Proposal length in use, or meant to be."""
    batch: float = 1.0
    """Running sequences."""
    rate: float | None = None
    """Requests per second and engine: then the batch follows from it, in either mode its own."""
    per_gpu_hour: float | None = None
    gpus: int = 1
    """Of one engine."""
    slower_limit: float = 0.1
    """Share of requests made slower that is tolerated."""


@dataclass(frozen=True)
class Baseline:
    requests: int
    tokens: int
    context: float
    """Mean tokens in the cache half-way through an answer."""
    source: Source | None = None
    """None: neither a profile nor an engine says anything."""
    batch: float | None = None
    """That a running request shares, itself included; None: unknown, or the rate saturates it."""
    per_token: Percentiles = field(default_factory=dict)
    """Seconds an output token after the first, over requests."""
    per_request: Percentiles = field(default_factory=dict)
    """Seconds of decoding a request."""
    ttft: Percentiles = field(default_factory=dict)
    per_million: float | None = None
    """Price of a million output tokens, for decoding."""
    prefill_share: float | None = None
    """Of a request's time, of those that say it."""
    prefill_source: Source | None = None
    recorded: Percentiles = field(default_factory=dict)
    """Seconds an output token, as the records say of whatever served them."""

    def to_json(self) -> dict[str, Any]:
        named = ("per_token", "per_request", "ttft", "recorded")
        rest = {name: value for name, value in vars(self).items() if name not in named}
        return rest | {f"{name}_s": percentiles_json(getattr(self, name)) for name in named}


def baseline(requests: Sequence[Request], profile: CostProfile | None, at: Conditions) -> Baseline:
    """Measured where requests were sent to a plain engine, else predicted where there is a profile."""
    context, tokens = mean(requests, lambda one: one.context), sum(one.tokens for one in requests)
    clocks = [(one.weight, one.plain) for one in requests if one.plain is not None]
    served = [(one.weight, one.recorded) for one in requests if one.recorded is not None]
    share, told = prefill_share(clocks), "measured"
    if share is None:
        share, told = prefill_share(served), "recorded"
    known: dict[str, Any] = {
        "prefill_share": share,
        "prefill_source": None if share is None else told,
        "recorded": percentiles((weight, clock.token_s) for weight, clock in served),
    }
    if clocks:
        total = sum(weight * clock.tokens for weight, clock in clocks)
        token_s = sum(weight * clock.decode_s for weight, clock in clocks) / total
        return Baseline(
            len(requests),
            tokens,
            context,
            "measured",
            at.batch,
            percentiles((weight, clock.token_s) for weight, clock in clocks),
            percentiles((weight, clock.decode_s) for weight, clock in clocks),
            percentiles((weight, clock.ttft_s) for weight, clock in clocks),
            None if at.per_gpu_hour is None else per_million(token_s, at.batch, at.per_gpu_hour, at.gpus),
            **known,
        )
    if profile is None:
        return Baseline(len(requests), tokens, context, **known)
    seen = running = at.batch
    if at.rate is not None:
        load = settled(requests, profile, at.rate, context)
        if load.batch is None or load.seen is None:
            return Baseline(len(requests), tokens, context, "predicted", **known)
        seen, running = load.seen, load.batch
    times = [(one.weight, profile.plain_s(seen, one.context), one.tokens) for one in requests]
    return Baseline(
        len(requests),
        tokens,
        context,
        "predicted",
        seen,
        percentiles((weight, token_s) for weight, token_s, _ in times),
        percentiles((weight, token_s * count) for weight, token_s, count in times),
        {},
        None
        if at.per_gpu_hour is None
        else per_million(profile.plain_s(seen, context), running, at.per_gpu_hour, at.gpus),
        **known,
    )


def settled(requests: Sequence[Request], profile: CostProfile, rate: float, context: float) -> Load:
    """Where plain decoding settles at an arrival rate."""
    return settle(lambda batch: profile.plain_s(batch, context), rate, mean(requests, lambda one: one.tokens))


def percentiles(weighted: Iterable[tuple[float, float]]) -> Percentiles:
    """p50, p95 and p99 over requests, of (weight, figure) each; empty without requests."""
    found = list(weighted)
    if not found:
        return {}
    weights, values = zip(*found, strict=True)
    return {q: quantile(values, q, weights) for q in QUANTILES}


def mean(requests: Iterable[Request], figure: Callable[[Request], float]) -> float:
    """Weighted mean; 0 of nothing."""
    pairs = [(figure(one), one.weight) for one in requests]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else 0.0


def prefill_share(clocks: Iterable[tuple[float, Clock]]) -> float | None:
    """Time to the first token over the whole time, weighted sums over the requests that say both; None without any."""
    known = list(clocks)
    total = sum(weight * (clock.ttft_s + clock.decode_s) for weight, clock in known)
    return sum(weight * clock.ttft_s for weight, clock in known) / total if total > 0.0 else None


def percentiles_json(found: Percentiles) -> dict[str, Any]:
    return {f"{q:g}": limits.to_json() for q, limits in found.items()}
