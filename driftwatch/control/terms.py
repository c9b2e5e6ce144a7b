"""What a cell is made of, and how its figures are told: shared by what fills cells and what reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from driftwatch.drift.cell import Rules
from driftwatch.drift.interval import Estimate
from driftwatch.drift.live import Metric, restated
from driftwatch.drift.sums import Sums
from driftwatch.settings import Detect

DEFINITIONS: Mapping[Metric, str] = {
    "hit_rate": "accepted / tested proposals, weighted mean over requests",
    "acceptance_rate": "accepted / drafted proposals, weighted mean over requests; the engine does not say which "
    "proposals were tested",
    "acceptance_length": "accepted / (windows x gamma), weighted mean over requests: the acceptance length, less 1, by "
    "gamma; the engine does not say how many proposals were made",
}


class Key(NamedTuple):
    """What makes a cell."""

    deployment_id: int
    draft: str
    segment: str
    split: str
    channel: str
    fingerprint: str


@dataclass(frozen=True)
class Seen:
    """One request on its way into a cell. ``index`` rises, and leads back to it: a replay's id, or a sample's."""

    index: int
    served_at: float
    session: str | None
    sums: Sums
    accepted: float
    trials: float


def rules_of(detect: Detect, metric: str = "hit_rate") -> Rules:
    """What every cell is judged by. A baseline that somebody gave is a hit rate, and holds for no other metric."""
    return Rules(
        tolerance=detect.tolerance,
        threshold=detect.requests_between_false_alarms,
        min_requests=detect.baseline.min_requests,
        min_hours=detect.baseline.min_hours,
        given=detect.baseline.value if metric == "hit_rate" else None,
    )


def fitted(sums: Sums, gammas: int, channel: str) -> Sums:
    """Sums that add to others of so many gammas, by the kind of their cell."""
    return restated(sums, gammas) if channel == "live" else sums.widened(gammas)


def figure(estimate: Estimate) -> dict[str, Any]:
    """An estimate with its denominator and interval, for people and pipelines."""
    return asdict(estimate)
