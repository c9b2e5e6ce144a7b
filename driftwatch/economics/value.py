"""Does an acceptance length pay? Speedup, break-even and the best proposal length, at a batch or at an arrival rate.

    speedup    = acceptance length / (gamma c(B) + v(gamma, B))
    break-even acceptance length = gamma c(B) + v(gamma, B)

(Leviathan et al. 2023, arXiv 2211.17192, with v = 1.) Both count per window. A draft that proposes nothing at some
steps (n-gram) leaves plain steps between its windows, which give one token and cost one step in either mode: with u
the share of steps that are windows, speedup = (u E + 1 - u) / (u (gamma c + v) + 1 - u). It is 1 at the same E.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from driftwatch.drift.interval import CONFIDENCE, Estimate
from driftwatch.drift.sums import Sums
from driftwatch.economics.load import AtRate, at_rate
from driftwatch.economics.profile import Cost, CostProfile
from driftwatch.economics.range import Range


def speedup(length: float, window: float, coverage: float = 1.0) -> float:
    """Plain time / speculative time for the same tokens at the same batch; ``window`` = gamma c + v.

    Rises in ``length``, falls in ``window``.
    """
    return (coverage * length + 1.0 - coverage) / (coverage * window + 1.0 - coverage)


def end_to_end(decode_speedup: float, prefill_share: float) -> float:
    """Amdahl (1967): only decoding gets faster; ``prefill_share`` of a plain request's time does not."""
    if not 0.0 <= prefill_share <= 1.0:
        raise ValueError(f"a share lies between 0 and 1, not at {prefill_share}")
    if decode_speedup <= 0.0:
        return 1.0 if prefill_share == 1.0 else 0.0
    return 1.0 / (prefill_share + (1.0 - prefill_share) / decode_speedup)


@dataclass(frozen=True)
class Value:
    """One proposal length of one cell against plain decoding."""

    gamma: int
    length: Range
    """Acceptance length."""
    cost: Cost
    """At ``proposals`` mean proposals a window."""
    coverage: float = 1.0
    """Windows / steps."""
    requests: int = 0
    steps_per_token: Range = field(default_factory=Range)
    at_rate: AtRate | None = None
    """The same at equal arrival rate, where that is known."""

    @property
    def proposals(self) -> float:
        """Mean proposals a window: gamma, or fewer where the draft ran out."""
        return self.cost.gamma

    @property
    def break_even(self) -> float:
        """Acceptance length at which speculation neither gains nor loses, at the batch of ``cost``."""
        return self.cost.window

    @property
    def speedup(self) -> Range:
        """At equal batch."""
        return self.length.map(lambda length: speedup(length, self.cost.window, self.coverage))

    @property
    def served(self) -> Range:
        """Speedup at equal batch of the very requests judged: 1 / (steps per token * (u (gamma c + v) + 1 - u)).

        The last window of a request is paid in full and cut by the end of the output, which the acceptance length does
        not show: this is lower, by at most one token a request. What a stop watch over the same requests would show.
        """
        step = self.coverage * self.cost.window + 1.0 - self.coverage
        return self.steps_per_token.map(lambda steps: 1.0 / (steps * step), falling=True)

    @property
    def outside(self) -> tuple[str, ...]:
        """What was read outside the measured range; empty where nothing was."""
        more = () if self.at_rate is None else self.at_rate.outside
        return tuple(dict.fromkeys((*self.cost.outside, *more)))

    @property
    def judged(self) -> Range:
        """The speedup that a verdict is about: at equal arrival rate where it is known, else at equal batch.

        A mode that saturates while the other does not is beaten by any factor: 0 or infinity, here alone, so that
        comparisons come out right. Both saturated: None.
        """
        load = self.at_rate
        if load is None:
            return self.speedup
        if load.plain.saturated:
            return Range() if load.speculative.saturated else _beyond(load, float("inf"))
        return _beyond(load, 0.0)

    def end_to_end(self, prefill_share: float) -> Range:
        """Of a whole request, after the prefill share; from the speedup at equal arrival rate where it is known."""
        source = self.speedup if self.at_rate is None else self.at_rate.speedup
        return source.map(lambda decode: end_to_end(decode, prefill_share))

    def under(
        self,
        profile: CostProfile,
        *,
        rate: float,
        tokens: float,
        context: float | None = None,
        max_batch: float | None = None,
    ) -> Value:
        """The same with the comparison at ``rate`` requests per second of ``tokens`` decoded tokens each; unchanged
        where nothing was replayed."""
        if self.length.value is None:
            return self
        load = at_rate(
            profile,
            self.length,
            gamma=self.proposals,
            rate=rate,
            tokens=tokens,
            coverage=self.coverage,
            context=context,
            max_batch=max_batch,
        )
        return replace(self, at_rate=load)

    def to_json(self) -> dict[str, Any]:
        cost = self.cost
        return {
            "gamma": self.gamma,
            "batch": cost.batch,
            "context": cost.context,
            "costs": cost.origin,
            "draft_cost": cost.draft,
            "draft_passes": self.proposals if cost.passes is None else cost.passes,
            "verification_cost": cost.verify,
            "proposals": self.proposals,
            "windows_per_step": self.coverage,
            "acceptance_length": self.length.to_json(),
            "break_even_acceptance_length": self.break_even,
            "speedup": self.speedup.to_json(),
            "served_speedup": self.served.to_json(),
            "at_rate": None if self.at_rate is None else self.at_rate.to_json(),
            "outside": list(self.outside),
        }


def _beyond(load: AtRate, extreme: float) -> Range:
    """The speedup with ``extreme`` where a mode saturates; limits that the data do not give stay None."""
    value, lower, upper = load.speedup.value, load.speedup.lower, load.speedup.upper
    if load.speculative_lower is None:
        return Range(extreme if value is None else value)
    if extreme:  # Plain saturates; where speculation does too there is nothing to compare, hence no limit.
        return Range(extreme, None if load.speculative_lower.saturated else extreme, extreme)
    # With an upper limit under which it still saturates, speculation loses whatever the truth is.
    return Range(
        extreme if value is None else value,
        extreme if lower is None else lower,
        extreme if upper is None else upper,
    )


def of_length(
    length: Estimate, profile: CostProfile, *, gamma: int, batch: float, context: float | None = None
) -> Value:
    """Of a chain draft's acceptance length, from whichever source: replay or live."""
    return Value(gamma, Range.of(length), profile.cost(batch, gamma, context), 1.0, length.requests)


def of_sums(
    sums: Sums,
    profile: CostProfile,
    *,
    batch: float,
    context: float | None = None,
    gammas: Iterable[int] | None = None,
    confidence: float = CONFIDENCE,
) -> list[Value]:
    """Every replayed proposal length that has a window, all from the same requests.

    The interval is of the acceptance length; windows per step and proposals per window enter as they were counted.
    """
    found = []
    for gamma in range(1, sums.gammas + 1) if gammas is None else gammas:
        windows = sums.total("windows", gamma)
        if not windows > 0.0:
            continue
        estimate = sums.interval("acceptance_length", gamma, confidence)
        # With fractional weights a draft that always proposes gamma sums to gamma windows only up to rounding.
        mean = sums.total("drafted", gamma) / windows
        proposals = float(gamma) if abs(mean - gamma) < 1e-9 * gamma else mean
        steps = sums.total("steps", gamma)
        cost = profile.cost(batch, proposals, context)
        per_token = Range.of(sums.interval("steps_per_token", gamma, confidence))
        found.append(Value(gamma, Range.of(estimate), cost, min(windows / steps, 1.0), estimate.requests, per_token))
    return found


def best(values: Sequence[Value]) -> Value | None:
    """The largest speedup (:attr:`Value.judged`); among equals the fewest proposals. None where none has a value."""
    known = [(value.judged.value, -value.gamma, value) for value in values if value.judged.value is not None]
    return max(known, key=lambda item: item[:2])[2] if known else None


def gain(better: Value, current: Value) -> float | None:
    """What moving from ``current`` to ``better`` would give: 0.1 is one tenth more tokens in the same time.

    Without limits: both come from the same requests and move together, so their two intervals say too little about the
    difference and their overlap would say too much.
    """
    top, bottom = better.judged.value, current.judged.value
    if top is None or bottom is None or bottom == 0.0 or top == float("inf"):
        return None
    return top / bottom - 1.0
