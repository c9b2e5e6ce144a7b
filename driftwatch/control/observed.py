"""What one request says to each test beside the hit rate's: counts out of its replay, its engine's figures, or both."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from driftwatch.acceptance import Tally, accepted_per_window
from driftwatch.control import costs
from driftwatch.control.terms import Seen
from driftwatch.drift.live import LiveCounts, Refused, counts
from driftwatch.drift.monitors import Counts, agreement_counts, gap_counts, length_counts, share_counts
from driftwatch.drift.watch import Kind
from driftwatch.economics.tail import MINIMUM_TOKENS
from driftwatch.settings import Model
from driftwatch.store.replays import Judged

SLOWER: tuple[Kind, ...] = ("slower", "tail_worse")


@dataclass(frozen=True)
class Observed:
    """One request on its way to the tests. ``index`` as in :class:`driftwatch.control.terms.Seen`."""

    index: int
    served_at: float
    session: str | None
    counts: Mapping[Kind, Counts]
    surprise: float | None = None
    """How much less likely, in nats a token, the target finds what was served than what it would sample itself."""


def of_replay(judged: Judged, seen: Seen, model: Model, kinds: Collection[Kind]) -> Observed:
    """From a replay, and for the tests that compare the two, from what the engine said of the same request."""
    found: dict[Kind, Counts] = {}
    tally = seen.sums.tally
    if "off_share" in kinds and judged.split != "none":
        found["off_share"] = share_counts(judged.split == "off")
    found |= _value(seen, model, judged.draft, kinds)
    if "hit_rate_above" in kinds:
        found["hit_rate_above"] = seen.accepted, seen.trials
    if "live_gap" in kinds and judged.engine is not None:
        found |= _beside(judged, tally, model)
    surprise = _surprise(judged.figures) if "surprise" in kinds else None
    return Observed(seen.index, seen.served_at, seen.session, found, surprise)


def of_engine(seen: Seen, live: LiveCounts, model: Model, kinds: Collection[Kind]) -> Observed:
    """From the engine's figures alone, where nothing is replayed."""
    found = _value(seen, model, model.drafts[0].name, kinds) if model.drafts else {}
    if "hit_rate_above" in kinds and live.metric == "hit_rate":
        found["hit_rate_above"] = live.trials("hit_rate", live.gamma)
    return Observed(seen.index, seen.served_at, seen.session, found)


def _value(seen: Seen, model: Model, draft: str, kinds: Collection[Kind]) -> dict[Kind, Counts]:
    """The tests of value: at the model's gamma, or what the engine proposes where that is all there is.

    At the request's own load where that is known, so that a larger batch shows as value that falls. Break-even is
    tested against its level at a batch of one: what the request's windows cost beyond that is taken off its length.
    """
    cost = costs.of(model, draft)
    if cost is None:
        return {}
    tally, served = seen.sums.tally, seen.served
    column = model.gamma - 1 if model.gamma <= tally.gammas and tally.steps[model.gamma - 1] else -1
    windows, steps = float(tally.windows[column]), float(tally.steps[column])
    drafted = float(tally.drafted[column])
    proposals = drafted / windows if windows and drafted else float(model.gamma)
    window = cost.at(model.batch or served.running or 1.0, proposals, served.context).window
    found: dict[Kind, Counts] = {}
    level = cost.level(model.gamma)
    if "below_break_even" in kinds and level is not None:
        part, whole = length_counts(float(tally.accepted[column]), windows, model.gamma)
        found["below_break_even"] = min(max(part - (window - level) * windows, 0.0), whole), whole
    if tally.tokens >= MINIMUM_TOKENS:
        # Time relative to plain decoding, as in economics/tail: a window costs what break-even says.
        slower = share_counts(windows * window + steps - windows > tally.tokens)
        found |= {kind: slower for kind in SLOWER if kind in kinds}
    return found


def _beside(judged: Judged, tally: Tally, model: Model) -> dict[Kind, Counts]:
    """Engine and replay of the same request, at the proposal length that the engine used."""
    try:
        live = counts(judged.engine or {}, model.gamma)
    except Refused:
        return {}
    if live is None or live.metric != "hit_rate" or live.gamma > tally.gammas or not tally.steps[live.gamma - 1]:
        return {}
    column = live.gamma - 1
    shadow = float(tally.accepted[column]), float(tally.tested[column])
    found: dict[Kind, Counts] = {"live_gap": gap_counts(live.trials("hit_rate", live.gamma), shadow)}
    windows = (judged.engine or {}).get("accepted_per_window")
    if isinstance(windows, list) and judged.rule == "argmax":
        found["agreement"] = agreement_counts(windows, accepted_per_window(judged.weights, live.gamma))
    return found


def _surprise(figures: Mapping[str, Any] | None) -> float | None:
    """Entropy at each token says how unlikely it may be, so that hard text is no surprise; both sums are in nats."""
    said = figures or {}
    if not said.get("compared"):
        return None
    return float(-said["logprob"] - said["entropy"]) / float(said["compared"])
