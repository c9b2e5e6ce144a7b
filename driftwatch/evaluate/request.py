"""One request of the sample, with all that is known of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from driftwatch.acceptance import Tally
from driftwatch.drift.sums import Sums

ALL = "all"
RETOKENISED = "retokenised"


@dataclass(frozen=True)
class Clock:
    """What a user of one answer waits for, in seconds."""

    ttft_s: float
    decode_s: float
    """From the first token to the last."""
    tokens: int
    """Decoded tokens, the first one not counted."""

    @property
    def token_s(self) -> float:
        """Time per output token after the first."""
        return self.decode_s / self.tokens


@dataclass(frozen=True)
class Request:
    """``tokens`` and ``context`` are counts of the recorded answer; what is not known is None or not there."""

    id: str
    segment: str
    tokens: int
    """Decoded tokens: n - 1 of n served ones, the first comes from prefill."""
    context: float
    """Tokens in the cache half-way through the answer."""
    weight: float = 1.0
    """Requests that it stands for."""
    session: str | None = None
    recorded: Clock | None = None
    """As the record says, of whatever served it."""
    plain: Clock | None = None
    """Measured now, of an engine without speculation."""
    speculative: Clock | None = None
    """Measured now, of an engine with it."""
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    """By name of the draft: what a replay, or a run, found."""
    retokenised: bool = False
    """Its ids were made from text and need not be the served ones."""


def sums_of(requests: Iterable[Request], draft: str) -> Sums | None:
    """Sums over independent units, a session being one; None where the draft judged nothing."""
    units: dict[str, list[tuple[Tally, float]]] = {}
    for number, request in enumerate(requests):
        if (tally := request.tallies.get(draft)) is not None:
            unit = f"request {number}" if request.session is None else f"session {request.session}"
            units.setdefault(unit, []).append((tally, request.weight))
    total: Sums | None = None
    for parts in units.values():
        one = Sums.session(parts)
        total = one if total is None else total + one
    return total


def by_segment(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """All of them first, then each segment, where there are several. Requests whose ids were made from text are never
    pooled with exact ones: beside such they stand apart, last."""
    exact = [one for one in requests if not one.retokenised]
    apart = [one for one in requests if one.retokenised]
    pooled = exact or apart
    found: dict[str, list[Request]] = {ALL: pooled}
    segments = sorted({request.segment for request in pooled})
    if segments != [ALL]:
        found |= {segment: [one for one in pooled if one.segment == segment] for segment in segments}
    return found | ({RETOKENISED: apart} if exact and apart else {})
