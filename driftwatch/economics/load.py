"""Both ways to decode at the same arrival rate: the batch each settles at, or that it never does.

Speculation changes the batch it is judged at: faster requests leave earlier. At a fixed arrival rate lambda (requests
per second and engine) of requests with N decoded tokens each, Little's law (1961) gives the mean number running as the
solution of

    B = lambda N f(1 + B),      f(b): seconds per token of one request while b run together

    plain:        f(b) = t(b)
    speculative:  f(b) = (u w(b) + (1 - u) t(b)) / (u E + 1 - u)

with w the seconds of a window, E the acceptance length and u the share of steps that are windows (1 for a model draft).
The 1 is the request itself: whoever arrives at random finds the mean, and then runs beside it (Wolff 1982). An engine
that shares its steps among all that run is a symmetric queue (Kelly 1979), whose stationary distribution depends on N
by its mean alone; for linear f it is negative binomial and its mean is exactly this solution. Without the 1 it would be
low by rho / (1 - rho), rho being the utilisation. With a knee it is an approximation: for the sharpest, a roofline, low
by 1.5 % at a utilisation of .8 and by 9 % at .9. Sequences in prefill are not in B.

Existence and uniqueness. The rate that a mean B carries is X(B) = B / (N f(1 + B)). Step times are built so that f
never falls and f(b) / b never rises (:class:`driftwatch.economics.step.StepTime`). Hence f(1 + B) / B, the product of
f(b) / b and (1 + B) / B, strictly falls; X strictly rises from X(0) = 0 to its supremum, the capacity. So for
lambda < capacity there is exactly one solution, and for lambda >= capacity none: the queue grows without bound, which
is reported as saturation and not as a number.

Monotone in E: a larger E lowers f at every batch, raises X, so the solution falls. By Little's law a request's time per
token is B / (lambda N), hence speedup at equal arrival rate = B plain / B speculative, which rises with E: limits of E
map to limits of the speedup.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from driftwatch.economics.profile import CostProfile
from driftwatch.economics.range import Range

UNBOUNDED = 1e9
"""Sequences that stand for a batch without limit: there the time is all slope."""


@dataclass(frozen=True)
class Load:
    """Where one mode settles."""

    batch: float | None
    """Mean running sequences, idle times included; None if the mode saturates."""
    seen: float | None
    """Mean batch that a running request shares, itself included; None if the mode saturates."""
    capacity: float
    """Requests per second that it can carry, at the largest batch allowed."""
    token_s: float | None
    """Seconds per token of one request; None if the mode saturates."""

    @property
    def saturated(self) -> bool:
        return self.batch is None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "saturated": self.saturated}


def settle(token_s: Callable[[float], float], rate: float, tokens: float, max_batch: float | None = None) -> Load:
    """Solve B = rate * tokens * token_s(1 + B), to the last bits.

    ``token_s`` must not fall, and token_s(b) / b must not rise. ``max_batch``: the engine's limit of running sequences;
    what arrives beyond it waits, so no request sees more and the capacity is the rate that this batch carries. The
    waiting itself is no part of a time per token.
    """
    if not rate > 0.0 or not tokens > 0.0 or (max_batch is not None and not max_batch >= 1.0):
        raise ValueError(f"rate {rate} and tokens {tokens} must be positive, max_batch {max_batch} at least 1")
    most = UNBOUNDED if max_batch is None else float(max_batch)

    def excess(batch: float) -> float:
        """Negative below the solution, positive above."""
        return batch - rate * tokens * token_s(min(1.0 + batch, most))

    capacity = most / (tokens * token_s(most))
    # This close to it rounding alone would decide.
    if rate >= capacity * (1.0 - 1e-12):
        return Load(None, None, capacity, None)
    low, high = 0.0, 1.0
    while excess(high) < 0.0:
        low, high = high, min(2.0 * high, most)
    batch = _root(excess, low, high)
    seen = min(1.0 + batch, most)
    return Load(batch, seen, capacity, token_s(seen))


def _root(excess: Callable[[float], float], low: float, high: float) -> float:
    """Regula falsi (Illinois): step times are straight lines with few kinks, so that a secant soon hits."""
    below, above = excess(low), excess(high)
    kept = 0
    for _ in range(200):
        middle = (low * above - high * below) / (above - below)
        if not low < middle < high:
            middle = 0.5 * (low + high)
        here = excess(middle)
        if abs(here) <= 4e-16 * middle or high - low <= 1e-15 * high:
            return middle
        # An end that stays twice weighs half, else it would stay for ever.
        if here < 0.0:
            low, below, above, kept = middle, here, above * (0.5 if kept < 0 else 1.0), -1
        else:
            high, above, below, kept = middle, here, below * (0.5 if kept > 0 else 1.0), 1
    return high


@dataclass(frozen=True)
class AtRate:
    """Plain and speculative decoding of the same arrivals."""

    rate: float
    tokens: float
    plain: Load
    speculative: Load
    speculative_lower: Load | None
    """At the lower limit of the acceptance length; None where that is unknown."""
    speedup: Range
    """Of time per token; a value or limit at which a mode saturates is None."""
    window: float | None
    """Seconds of a window at the speculative batch / seconds of a plain step at the plain batch; None if saturated."""
    plain_step: float | None
    """The same for a plain step between windows: below 1 where speculation empties the batch."""
    outside: tuple[str, ...]

    @property
    def saturation(self) -> str | None:
        """In words, which mode cannot carry the rate; None if both can at every limit."""
        if self.plain.saturated and self.speculative.saturated:
            return (
                f"{self.rate:g} requests/s saturate both ways to decode: plain carries {self.plain.capacity:.3g}, "
                f"speculation {self.speculative.capacity:.3g}"
            )
        if self.plain.saturated:
            return (
                f"plain decoding saturates at {self.plain.capacity:.3g} requests/s, speculation carries {self.rate:g}"
            )
        if self.speculative.saturated:
            return f"speculation saturates at {self.speculative.capacity:.3g} requests/s, plain carries {self.rate:g}"
        if self.speculative_lower is not None and self.speculative_lower.saturated:
            return f"at its lower limit speculation saturates at {self.speculative_lower.capacity:.3g} requests/s"
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "tokens": self.tokens,
            "plain": self.plain.to_json(),
            "speculative": self.speculative.to_json(),
            "speedup": self.speedup.to_json(),
            "saturation": self.saturation,
            "outside": list(self.outside),
        }


def at_rate(
    profile: CostProfile,
    length: Range,
    *,
    gamma: float,
    rate: float,
    tokens: float,
    coverage: float = 1.0,
    context: float | None = None,
    max_batch: float | None = None,
) -> AtRate:
    """Compare both modes at ``rate`` requests per second and engine, each with ``tokens`` decoded tokens."""

    def plain_s(batch: float) -> float:
        return profile.plain_s(batch, context)

    def speculative(at: float) -> Load:
        def token_s(batch: float) -> float:
            step = coverage * profile.window_s(batch, gamma, context) + (1.0 - coverage) * plain_s(batch)
            return step / (coverage * at + 1.0 - coverage)

        return settle(token_s, rate, tokens, max_batch)

    plain = settle(plain_s, rate, tokens, max_batch)

    def gain(at: float) -> float | None:
        other = speculative(at)
        return None if plain.token_s is None or other.token_s is None else plain.token_s / other.token_s

    if length.value is None:
        raise ValueError("no acceptance length, no load: nothing was replayed")
    settled = speculative(length.value)
    batches = [load.seen for load in (plain, settled) if load.seen is not None]
    window = plain_step = None
    if plain.token_s is not None and settled.seen is not None:
        window = profile.window_s(settled.seen, gamma, context) / plain.token_s
        plain_step = plain_s(settled.seen) / plain.token_s
    outside = [line for batch in batches for line in profile.cost(batch, gamma, context).outside]
    return AtRate(
        rate,
        tokens,
        plain,
        settled,
        None if length.lower is None else speculative(length.lower),
        length.map(gain),
        window,
        plain_step,
        tuple(dict.fromkeys(outside)),
    )
