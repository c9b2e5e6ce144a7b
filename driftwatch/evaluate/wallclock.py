"""Section 3: time per output token with speculation against without, up to the p99."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from driftwatch.drift.interval import EMPTY, ratio
from driftwatch.economics.range import Range
from driftwatch.economics.tail import MINIMUM_TOKENS, share
from driftwatch.economics.value import Value
from driftwatch.evaluate.baseline import Percentiles, Source, percentiles, percentiles_json
from driftwatch.evaluate.candidate import Candidate
from driftwatch.evaluate.request import Clock, Request

Shape = Literal["better", "worse", "undecided"]

MOST_SPEEDUP = 1000.0
"""Upper end of the range in which a measured speedup is looked for."""


@dataclass(frozen=True)
class WallClock:
    source: Source
    gamma: int
    requests: int
    plain: Percentiles
    """Seconds an output token."""
    speculative: Percentiles
    relative: Percentiles
    """The same request's time with speculation / without."""
    slower: Range
    """Share of requests that speculation makes slower."""
    speedup: Range
    """Of decoding, all tokens together."""
    end_to_end: Range = field(default_factory=Range)
    """Of whole requests, where the prefill share is known."""
    plain_ttft: Percentiles = field(default_factory=dict)
    speculative_ttft: Percentiles = field(default_factory=dict)

    @property
    def p99(self) -> Shape:
        """What happens to the slow end, by its limits."""
        end = self.relative.get(0.99, Range())
        if end.lower is not None and end.lower > 1.0:
            return "worse"
        return "better" if end.upper is not None and end.upper <= 1.0 else "undecided"

    def to_json(self) -> dict[str, Any]:
        named = ("plain", "speculative", "plain_ttft", "speculative_ttft")
        return {
            "source": self.source,
            "gamma": self.gamma,
            "requests": self.requests,
            **{f"{name}_s": percentiles_json(getattr(self, name)) for name in named},
            "relative": percentiles_json(self.relative),
            "slower": self.slower.to_json(),
            "speedup": self.speedup.to_json(),
            "end_to_end": self.end_to_end.to_json(),
            "p99": self.p99,
        }


def predicted(candidate: Candidate, requests: Sequence[Request], prefill_share: float | None) -> WallClock | None:
    """From a replay and the profile, each request at its own context; None where costs are unknown."""
    value, tail, profile, name = candidate.shown, candidate.tail, candidate.draft.profile, candidate.draft.name
    if value is None or tail is None or profile is None:
        return None
    plain_batch, batch = _batches(value)
    if plain_batch is None or batch is None:
        return None
    column = value.gamma - 1
    judged = [one for one in requests if name in one.tallies and one.tokens >= tail.minimum_tokens]

    def with_speculation(one: Request) -> float:
        tally = one.tallies[name]
        steps = float(tally.steps[column])
        windows = float(tally.windows[column]) if value.coverage < 1.0 else steps
        window_s = profile.window_s(batch, value.proposals, one.context)
        return (windows * window_s + (steps - windows) * profile.plain_s(batch, one.context)) / tally.tokens

    return WallClock(
        "predicted",
        value.gamma,
        len(judged),
        percentiles((one.weight, profile.plain_s(plain_batch, one.context)) for one in judged),
        percentiles((one.weight, with_speculation(one)) for one in judged),
        tail.relative,
        tail.slower,
        value.served if value.at_rate is None else value.at_rate.speedup,
        Range() if prefill_share is None else value.end_to_end(prefill_share),
    )


def _batches(value: Value) -> tuple[float | None, float | None]:
    """That a running request shares without and with speculation; None where the rate saturates a mode."""
    if value.at_rate is None:
        return value.cost.batch, value.cost.batch
    return value.at_rate.plain.seen, value.at_rate.speculative.seen


def measured(requests: Sequence[Request], gamma: int) -> WallClock | None:
    """From what both engines took for the same prompts; None where no prompt was answered by both.

    Percentiles leave out answers shorter than 32 tokens, whose time per token is mostly noise. The speedup is plain
    seconds for as many tokens / speculative seconds, sums over requests, with the request as the unit.
    """
    pairs = [
        (one.weight, one.plain, one.speculative)
        for one in requests
        if one.plain is not None and one.speculative is not None
    ]
    if not pairs:
        return None
    decoding = whole = EMPTY
    for weight, plain, fast in pairs:
        as_many = plain.token_s * fast.tokens
        decoding = decoding.with_unit(weight * as_many, weight * fast.decode_s)
        whole = whole.with_unit(weight * (plain.ttft_s + as_many), weight * (fast.ttft_s + fast.decode_s))
    long = [pair for pair in pairs if min(pair[1].tokens, pair[2].tokens) >= MINIMUM_TOKENS]
    relative = [(weight, _relative(plain, fast)) for weight, plain, fast in long]
    return WallClock(
        "measured",
        gamma,
        len(long),
        percentiles((weight, plain.token_s) for weight, plain, _ in long),
        percentiles((weight, fast.token_s) for weight, _, fast in long),
        percentiles(relative),
        share([one > 1.0 for _, one in relative], [weight for weight, _ in relative]),
        Range.of(ratio(decoding, high=MOST_SPEEDUP)),
        Range.of(ratio(whole, high=MOST_SPEEDUP)),
        percentiles((weight, plain.ttft_s) for weight, plain, _ in pairs),
        percentiles((weight, fast.ttft_s) for weight, _, fast in pairs),
    )


def _relative(plain: Clock, fast: Clock) -> float:
    return fast.token_s / plain.token_s
