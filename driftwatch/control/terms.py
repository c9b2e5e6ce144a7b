"""What a cell is made of, and how its figures are told: shared by what fills cells and what reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from driftwatch.control import costs
from driftwatch.control.conditions import Served
from driftwatch.drift.cell import Rules
from driftwatch.drift.interval import Estimate
from driftwatch.drift.live import Metric, restated
from driftwatch.drift.sums import Sums
from driftwatch.drift.watch import Kind, Terms
from driftwatch.settings import Model, Settings

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
    served: Served = field(default_factory=Served)


def kinds_of(settings: Settings, model: Model, draft: str) -> tuple[Kind, ...]:
    """The tests beside the hit rate's that each request of a draft may feed, as far as the settings tell.

    Those of the engine's figures are of the incumbent alone: it is what the engine runs.
    """
    found = next((one for one in model.drafts if one.name == draft), None)
    if found is None:
        return ()
    incumbent, replayed = found is model.drafts[0], found.path is not None
    kinds: list[Kind] = []
    if replayed:
        kinds += ["off_share"] if found.sketch is not None else []
        kinds += ["surprise"] if model.target is not None else []
        kinds += ["live_gap", "agreement"] if incumbent else []
    if replayed or incumbent:
        cost = costs.of(model, draft)
        kinds += ["below_break_even"] if cost is not None and cost.level(model.gamma) is not None else []
        kinds += ["slower", "tail_worse"] if cost is not None else []
        kinds += ["hit_rate_above"] if settings.detect.two_sided else []
    return tuple(kinds)


def threshold_of(settings: Settings, model: Model) -> float:
    """What each test of a model needs, so that all that a request feeds keep the promise together.

    Their number times what is wanted of all: each replayed draft's cell, the engine's own, and those beside them.
    """
    cells = 1 + sum(draft.path is not None for draft in model.drafts)
    beside = sum(len(kinds_of(settings, model, draft.name)) for draft in model.drafts)
    return settings.detect.requests_between_false_alarms * (cells + beside)


def rules_of(settings: Settings, model: Model, metric: str = "hit_rate") -> Rules:
    """What every cell is judged by. A baseline that somebody gave is a hit rate, and holds for no other metric."""
    detect = settings.detect
    return Rules(
        tolerance=detect.tolerance,
        threshold=threshold_of(settings, model),
        min_requests=detect.baseline.min_requests,
        min_hours=detect.baseline.min_hours,
        given=detect.baseline.value if metric == "hit_rate" else None,
    )


def terms_of(settings: Settings, model: Model, draft: str, kind: Kind) -> Terms:
    """What one of a draft's other tests is judged by."""
    detect = settings.detect
    valued = kind in ("below_break_even", "slower", "tail_worse")
    cost = costs.of(model, draft) if valued else None
    return Terms(
        kind,
        detect.tolerance,
        threshold_of(settings, model),
        detect.baseline.min_requests,
        detect.baseline.min_hours,
        gamma=model.gamma if valued or kind == "hit_rate_above" else 1,
        break_even=None if cost is None else cost.level(model.gamma),
    )


def fitted(sums: Sums, gammas: int, channel: str) -> Sums:
    """Sums that add to others of so many gammas, by the kind of their cell."""
    return restated(sums, gammas) if channel == "live" else sums.widened(gammas)


def figure(estimate: Estimate) -> dict[str, Any]:
    """An estimate with its denominator and interval, for people and pipelines."""
    return asdict(estimate)
