"""What speculation is worth in each cell: from its sums of the last 24 hours, at what its windows cost at its load.

Both ways to decode are compared at the same arrival rate. It is not measured: it is the rate at which the incumbent,
as accepted in this cell, settles at the batch that is seen (:mod:`driftwatch.economics.load`, solved backwards). At a
batch of one, or with costs that were entered as one number, both are compared at equal batch.

A tail of single requests comes from the cell's counts of steps per token: a request's time per token relative to plain
decoding is its steps per token times what a step costs. For drafts that leave plain steps between their windows, every
step is given the cell's mean share of windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from driftwatch.control import costs
from driftwatch.control.conditions import Conditions
from driftwatch.control.costs import Costs
from driftwatch.control.reports import QUANTILES, CellReport
from driftwatch.drift.interval import student_quantile, wilson
from driftwatch.economics.price import Price, price
from driftwatch.economics.range import Range
from driftwatch.economics.tail import MINIMUM_TOKENS, Tail
from driftwatch.economics.value import Value, best, end_to_end, gain, of_sums
from driftwatch.economics.verdict import Verdict, verdict
from driftwatch.settings import Model, Settings

ENOUGH = 30
"""Requests with known times from which on a share of prefill is told."""


@dataclass(frozen=True)
class Load:
    """Requests that decode together."""

    batch: float
    origin: Literal["settings", "engine", "assumed"]
    """Stated; the median of what the engine reported beside the samples; or nothing was known, so one is assumed."""
    requests: int
    """Behind the median."""

    @classmethod
    def of(cls, model: Model, conditions: Conditions) -> Load:
        if model.batch is not None:
            return cls(model.batch, "settings", 0)
        median = conditions.running.quantile(0.5)
        if median.value is None:
            return cls(1.0, "assumed", 0)
        return cls(median.value, "engine", median.requests)


@dataclass(frozen=True)
class CellValue:
    """One cell's value."""

    report: CellReport
    costs: Costs
    load: Load
    context: float | None
    values: tuple[Value, ...]
    """By proposal length; of the engine's own figures, its one."""
    current: Value
    """At the cell's proposal length."""
    plain_prefill_share: float | None
    """Of a plain request's time."""
    per_gpu_hour: float | None
    gpus: int

    @property
    def at_rate(self) -> bool:
        """Whether both ways carry the arrival rate, so that they are compared at it; else at equal batch."""
        return self.current.at_rate is not None and self.current.at_rate.saturation is None

    @property
    def speedup(self) -> Range:
        """Of decoding."""
        return _speedup(self.current)

    @property
    def end_to_end(self) -> Range:
        """Of the whole request; empty where the share of prefill is not known."""
        if (share := self.plain_prefill_share) is None:
            return Range()
        return self.speedup.map(lambda decode: end_to_end(decode, share))

    @property
    def best(self) -> Value | None:
        """The proposal length with the largest speedup, of those within what was measured; None where costs are one
        number, which holds for one proposal length."""
        return None if self.costs.profile is None else best([value for value in self.values if not value.outside])

    @property
    def best_gamma(self) -> int | None:
        """0: every proposal length loses, by its limits."""
        if self.best is None or self.verdict is None:
            return None
        return 0 if self.verdict.decision == "do_not_use" else self.best.gamma

    @property
    def gain(self) -> float | None:
        """What the best proposal length (or none at all) would gain over the present one: .1 is a tenth faster."""
        if self.best_gamma == 0:
            return None if not self.speedup.value else 1.0 / self.speedup.value - 1.0
        return None if self.best is None else gain(self.best, self.current)

    @property
    def _step(self) -> float:
        """Cost of a step while speculating, in plain steps."""
        window, plain, load = self.current.cost.window, 1.0, self.current.at_rate
        if self.at_rate and load is not None and load.window is not None and load.plain_step is not None:
            window, plain = load.window, load.plain_step
        return self.current.coverage * window + (1.0 - self.current.coverage) * plain

    @cached_property
    def tail(self) -> Tail:
        """Of single requests."""
        steps = {q: self.report.tail.quantile(q) for q in QUANTILES}
        per_token = {q: Range(at.value, at.lower, at.upper) for q, at in steps.items()}
        return Tail(
            self.report.tail.requests,
            self.report.tail.left_out,
            MINIMUM_TOKENS,
            {q: found.map(lambda share: share * self._step) for q, found in per_token.items()},
            per_token,
            self._slower(),
        )

    def _slower(self) -> Range:
        """Share of requests with more steps per token than the cost of a step allows (Wilson 1927)."""
        tail = self.report.tail
        share = tail.share_above((1.0 + 1e-9) / self._step)
        if share is None or tail.requests < 2:
            return Range(share)
        lower, upper = wilson(share, tail.requests, student_quantile(tail.requests - 1))
        return Range(share, min(max(lower, 0.0), share), max(min(upper, 1.0), share))

    @cached_property
    def verdict(self) -> Verdict | None:
        """In words; None where costs are one number."""
        if self.costs.profile is None:
            return None
        return verdict(self.values, self.costs.profile, gamma=self.current.gamma, tail=self.tail)

    @cached_property
    def price(self) -> Price | None:
        """Per million output tokens of an engine that is kept at this batch; None without a price or a profile."""
        if self.per_gpu_hour is None or self.costs.profile is None:
            return None
        full = replace(self.current, at_rate=None)
        profile, per_hour = self.costs.profile, self.per_gpu_hour
        return price(full, profile, per_gpu_hour=per_hour, gpus=self.gpus, context=self.context)

    def as_dict(self) -> dict[str, Any]:
        facts = self.report.deployment.facts
        return {
            "costs": self.costs.origin()
            | {"mismatches": list(self.costs.mismatches(self.report.cell.fingerprint, facts))},
            "batch": {"value": self.load.batch, "origin": self.load.origin, "requests": self.load.requests},
            "context": self.context,
            "compared_at": "arrival rate" if self.at_rate else "batch",
            "gamma": self.current.gamma,
            "requests": self.current.requests,
            "acceptance_length": self.current.length.to_json(),
            "break_even_acceptance_length": self.current.break_even,
            "speedup": self.speedup.to_json(),
            "plain_prefill_share": self.plain_prefill_share,
            "end_to_end_speedup": self.end_to_end.to_json(),
            "best_gamma": self.best_gamma,
            "best_gamma_gain": self.gain,
            "outside": list(self.current.outside),
            "tail": self.tail.to_json(),
            "price": None if self.price is None else self.price.to_json(),
            "verdict": None if self.verdict is None else self.verdict.to_json(),
            "by_gamma": [value.to_json() for value in self.values],
        }


def judge(reports: Sequence[CellReport], settings: Settings) -> dict[int, CellValue]:
    """The value of each cell, by its id; those whose costs are not known, or that have no window, are left out."""
    incumbents = {
        _place(report): report
        for report in reports
        if report.cell.channel == "shadow" and _is_incumbent(report, settings)
    }
    found = {}
    for report in reports:
        value = _of(report, incumbents.get(_place(report), report), settings)
        if value is not None:
            found[report.cell.id] = value
    return found


def _place(report: CellReport) -> tuple[Any, ...]:
    return report.deployment.id, report.cell.segment, report.cell.split, report.cell.channel


def _is_incumbent(report: CellReport, settings: Settings) -> bool:
    model = settings.model_for(report.deployment.model)
    return model is not None and bool(model.drafts) and model.drafts[0].name == report.cell.draft


def _of(report: CellReport, incumbent: CellReport, settings: Settings) -> CellValue | None:
    model = settings.model_for(report.deployment.model) or Model()
    cost, served = costs.of(model, report.cell.draft), costs.of(model, incumbent.cell.draft)
    if cost is None or (cost.profile is None and report.cell.gamma != model.gamma):
        return None
    load = Load.of(model, report.conditions)
    context = report.conditions.context if cost.profile is not None and cost.profile.timings else None
    tokens = report.recent.tokens / max(report.recent.requests, 1)
    values = _values(report, cost, load.batch, context)
    serving = values if incumbent is report or served is None else _values(incumbent, served, load.batch, context)
    now = _at(incumbent, serving)
    rate = None if now is None or served is None else rate_at(now, served, load.batch, tokens, context)
    if rate is not None and now is not None:
        values = [_under(one, cost, rate, tokens, context) for one in values]
        now = _under(now, served or cost, rate, tokens, context)
    current = _at(report, values)
    if current is None:
        return None
    return CellValue(
        report,
        cost,
        load,
        context,
        tuple(values),
        current,
        _plain_prefill_share(report.conditions, now),
        settings.value.gpu_hour_price,
        settings.value.gpus,
    )


def _at(report: CellReport, values: Sequence[Value]) -> Value | None:
    """At the cell's own proposal length."""
    return next((one for one in values if one.gamma == report.cell.gamma), None)


def _under(value: Value, cost: Costs, rate: float, tokens: float, context: float | None) -> Value:
    return value if cost.profile is None else value.under(cost.profile, rate=rate, tokens=tokens, context=context)


def _values(report: CellReport, cost: Costs, batch: float, context: float | None) -> list[Value]:
    """At equal batch, each proposal length that was walked; what an engine does not say leaves its own alone."""
    sums, gamma = report.recent, report.cell.gamma
    if cost.profile is not None and report.cell.channel == "shadow":
        return of_sums(sums, cost.profile, batch=batch, context=context)
    windows, steps = (sums.total(count, gamma) for count in ("windows", "steps"))
    if not windows > 0.0:
        return []
    drafted = sums.total("drafted", gamma)
    length = sums.interval("acceptance_length", gamma)
    at = cost.at(batch, drafted / windows if drafted else float(gamma), context)
    per_token = Range.of(sums.interval("steps_per_token", gamma))
    return [Value(gamma, Range.of(length), at, min(windows / steps, 1.0), length.requests, per_token)]


def rate_at(now: Value, served: Costs, batch: float, tokens: float, context: float | None) -> float | None:
    """Requests a second at which the incumbent settles at the batch that its requests see, themselves included."""
    if served.profile is None or batch <= 1.0 or now.length.value is None or not tokens > 0.0:
        return None
    u = now.coverage
    step = u * served.profile.window_s(batch, now.proposals, context)
    step += (1.0 - u) * served.profile.plain_s(batch, context)
    token_s = step / (u * now.length.value + 1.0 - u)
    return (batch - 1.0) / (tokens * token_s)


def _speedup(value: Value) -> Range:
    load = value.at_rate
    return value.speedup if load is None or load.saturation is not None else load.speedup


def _plain_prefill_share(conditions: Conditions, now: Value | None) -> float | None:
    """What was measured is a request under speculation, whose decoding took its plain time over the speedup."""
    share = conditions.prefill_share if conditions.timed >= ENOUGH else None
    faster = None if now is None else _speedup(now).value
    if share is None or not faster:
        return None
    return share / (share + (1.0 - share) * faster)
