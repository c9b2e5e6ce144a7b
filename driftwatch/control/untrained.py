"""Would a segment do as well without a trained draft? Prompt lookup beside the incumbent, on the same requests.

Both are replayed on the same samples, so the difference is taken within each request: easy and hard ones cancel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy.orm import Session

from driftwatch.acceptance import Tally, tally
from driftwatch.control import costs
from driftwatch.control.costs import Costs
from driftwatch.control.reports import CellReport
from driftwatch.control.value import Load
from driftwatch.drift.interval import EMPTY, Estimate, ratio
from driftwatch.economics.verdict import LEAST_GAIN
from driftwatch.settings import Model, Settings
from driftwatch.store import replays
from driftwatch.store.replays import Judged
from driftwatch.store.schema import Replay, Sample

NEWEST = 200
"""Requests that are compared, the newest: they are walked anew at each look."""

AS_WELL = "you would do as well without a trained draft here"
FASTER = "the trained draft is faster here"
UNKNOWN = "not enough data"


@dataclass(frozen=True)
class Untrained:
    """One prompt-lookup draft against the incumbent of one deployment."""

    deployment: int
    model: str
    segment: str
    incumbent: str
    draft: str
    gamma: int
    batch: float
    difference: Estimate
    """Decode time with lookup less that with the incumbent, as a share of plain decode time."""

    @property
    def verdict(self) -> str:
        """As well: slower by less than ``LEAST_GAIN`` of the plain time, by the upper limit."""
        if self.difference.upper is not None and self.difference.upper <= LEAST_GAIN:
            return AS_WELL
        return FASTER if self.difference.lower is not None and self.difference.lower > 0.0 else UNKNOWN

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


def beside(session: Session, settings: Settings, segment: str, cells: Sequence[CellReport]) -> Iterator[Untrained]:
    """Each lookup draft of the deployment in use in a segment that replays one beside a trained incumbent."""
    mine = [report for report in cells if report.cell.channel == "shadow"]
    if not mine:
        return
    newest = max(mine, key=lambda report: report.order)
    model = settings.model_for(newest.deployment.model) or Model()
    if not model.drafts or costs.is_lookup(model.drafts[0]):
        return
    incumbent = model.drafts[0].name
    trained = costs.of(model, incumbent)
    load = Load.of(model, newest.conditions)
    for draft in filter(costs.is_lookup, model.drafts[1:]):
        cost = costs.of(model, draft.name)
        if trained is None or cost is None:
            continue
        pairs = _pairs(session, newest.deployment.id, segment, draft.name, incumbent)
        found = _difference(pairs, cost, trained, model.gamma, load.batch)
        where = newest.deployment.id, newest.deployment.model, segment
        yield Untrained(*where, incumbent, draft.name, model.gamma, load.batch, found)


def _pairs(
    session: Session, deployment_id: int, segment: str, lookup: str, incumbent: str
) -> Iterator[tuple[Judged, Judged]]:
    where = (Sample.deployment_id == deployment_id, Sample.segment == segment, Sample.purpose == "estimate")
    theirs = replays.newest(session, Replay.draft == lookup, *where, limit=NEWEST)
    ids = [one.request_id for one in theirs]
    ours = replays.newest(session, Replay.draft == incumbent, Sample.request_id.in_(ids), limit=NEWEST)
    newest_weights = ours[0].fingerprint if ours else ""
    by_id = {one.request_id: one for one in ours if one.fingerprint == newest_weights}
    yield from ((one, by_id[one.request_id]) for one in theirs if one.request_id in by_id)


def _difference(
    pairs: Iterator[tuple[Judged, Judged]], cost: Costs, trained: Costs, gamma: int, batch: float
) -> Estimate:
    """Ratio of weighted sums between requests, or sessions where they are known."""
    units: dict[str, tuple[float, float, int]] = {}
    most = 1.0
    for lookup, incumbent in pairs:
        if not (_reaches(lookup, gamma) and _reaches(incumbent, gamma)):
            continue
        theirs, ours = tally(lookup.weights, gamma), tally(incumbent.weights, gamma)
        if not theirs.tokens or theirs.tokens != ours.tokens:
            continue
        windows = _window(theirs, cost, gamma, batch), _window(ours, trained, gamma, batch)
        most = max(most, *windows)
        more = _time(theirs, gamma, windows[0]) - _time(ours, gamma, windows[1])
        key = f"session {lookup.session}" if lookup.session is not None else lookup.request_id
        y, n, requests = units.get(key, (0.0, 0.0, 0))
        units[key] = y + lookup.weight * more, n + lookup.weight * ours.tokens, requests + 1
    moments = EMPTY
    for y, n, requests in units.values():
        moments = moments.with_unit(y, n, requests)
    return ratio(moments, low=-most, high=most)


def _reaches(one: Judged, gamma: int) -> bool:
    """A tree's weights hold for its own steps, and say nothing of a chain's windows."""
    weights = one.weights
    return not weights.walked and (weights.depth_free or weights.values.shape[1] >= gamma)


def _window(request: Tally, cost: Costs, gamma: int, batch: float) -> float:
    windows, drafted = float(request.windows[gamma - 1]), float(request.drafted[gamma - 1])
    return cost.at(batch, drafted / windows if windows else float(gamma)).window


def _time(request: Tally, gamma: int, window: float) -> float:
    """In plain steps."""
    windows, steps = float(request.windows[gamma - 1]), float(request.steps[gamma - 1])
    return windows * window + steps - windows
