"""What a cell's requests were served under, counted beside its sums: load, context, and the share that is prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from driftwatch.drift.quantiles import Grid, Quantiles

KEY = "conditions"
"""Where the counts lie among an hour's sums."""

LOAD = Grid.bounded(1.0, 1024.0, 1024)
"""Whole numbers are exact; engines run no more at once."""


@dataclass(frozen=True)
class Served:
    """One request; None is unknown."""

    running: float | None = None
    """Requests that its engine was decoding, itself among them: at least 1."""
    context: float | None = None
    """Mean tokens in its cache while it was decoded."""
    ttft_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def of(cls, engine: Mapping[str, Any] | None, timing: Mapping[str, Any] | None, tokens: int, judged: int) -> Served:
        """From what a sample holds: ``tokens`` of prompt and output, ``judged`` of them behind the first."""
        running = (engine or {}).get("running")
        times = timing or {}
        return cls(
            max(float(running), 1.0) if isinstance(running, int | float) else None,
            max(tokens - judged / 2.0, 0.0),
            times.get("ttft_s"),
            times.get("e2e_s"),
        )


@dataclass
class Conditions:
    """Of many requests; parts add."""

    running: Quantiles = field(default_factory=lambda: Quantiles(LOAD))
    weight: float = 0.0
    tokens: float = 0.0
    """Weighted sum of contexts."""
    timed: int = 0
    """Requests whose times are known."""
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    """Weighted sums."""

    def add(self, request: Served, weight: float) -> None:
        if request.running is not None:
            self.running.add(request.running, 0.0)
        if request.context is not None:
            self.weight += weight
            self.tokens += weight * request.context
        if request.ttft_s is not None and request.e2e_s and request.ttft_s <= request.e2e_s:
            self.timed += 1
            self.ttft_s += weight * request.ttft_s
            self.e2e_s += weight * request.e2e_s

    def __add__(self, other: Conditions) -> Conditions:
        return Conditions(
            self.running + other.running,
            self.weight + other.weight,
            self.tokens + other.tokens,
            self.timed + other.timed,
            self.ttft_s + other.ttft_s,
            self.e2e_s + other.e2e_s,
        )

    @property
    def context(self) -> float | None:
        """Mean tokens in the cache of a request while it is decoded."""
        return self.tokens / self.weight if self.weight else None

    @property
    def prefill_share(self) -> float | None:
        """Time to the first token out of the whole, as it was measured; None where no times came."""
        return self.ttft_s / self.e2e_s if self.e2e_s else None

    def to_json(self) -> dict[str, Any]:
        return {
            "running": self.running.to_json(),
            "weight": self.weight,
            "tokens": self.tokens,
            "timed": self.timed,
            "ttft_s": self.ttft_s,
            "e2e_s": self.e2e_s,
        }


def read(sums: Mapping[str, Any]) -> Conditions:
    """The counts stored beside sums; none where an earlier version stored them."""
    if KEY not in sums:
        return Conditions()
    data = sums[KEY]
    rest = {name: data[name] for name in ("weight", "tokens", "timed", "ttft_s", "e2e_s")}
    return Conditions(Quantiles.from_json(data["running"]), **rest)
