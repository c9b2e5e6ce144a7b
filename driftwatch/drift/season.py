"""By how much each hour of the day usually lies below the rest of it.

A night of batch jobs that are hard to draft is normal, but its mean may lie below the floor for hours: the tolerance
is for lasting change, and a swing wider than it would alarm every day. So a baseline that was learnt over at least a
day keeps a dip for each hour, by which the floor is lowered in that hour. Only lowered: an hour above the rest would
raise the floor by something estimated, and an estimate that came out high would then alarm.

With d the hour's mean less that of all, e its standard error, and t^2 = mean of d^2 - e^2 over the hours (at least 0),
the dip is min(0, d t^2 / (t^2 + e^2)): normal shrinkage (Efron and Morris 1973, JASA 68, 117-130), by which hours that
differ no more than by chance have no dips. An hour with fewer than 20 units has the deepest dip of all, for want of
knowledge.

Hours are those of UTC. A cycle of a week is not kept: a weekend below the tolerance alarms once, on the first one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from driftwatch.drift.interval import Moments

HOUR_S = 3600.0
HOURS = 24
LEAST_UNITS = 20


def hour_of(time_s: float) -> int:
    return int(time_s // HOUR_S) % HOURS


def dips(hours: Mapping[int, Moments]) -> list[float] | None:
    """The dip of each hour, each 0 or negative; None where nothing dips, or too few hours are known to say."""
    known = {hour: m for hour, m in hours.items() if m.units >= LEAST_UNITS and m.n > 0.0}
    if len(known) < HOURS // 2:
        return None
    mean = sum(m.y for m in hours.values()) / sum(m.n for m in hours.values())
    distance = {hour: m.y / m.n - mean for hour, m in known.items()}
    error = {hour: _squared_error(m) for hour, m in known.items()}
    spread = max(sum(d * d - error[hour] for hour, d in distance.items()) / len(known), 0.0)
    if spread == 0.0:
        return None
    found = {hour: min(0.0, d * spread / (spread + error[hour])) for hour, d in distance.items()}
    deepest = min(found.values())
    return [round(found.get(hour, deepest), 6) for hour in range(HOURS)]


def dip_at(profile: Sequence[float] | None, time_s: float) -> float:
    return 0.0 if profile is None else profile[hour_of(time_s)]


def _squared_error(m: Moments) -> float:
    r = m.y / m.n
    residuals = max(m.yy - 2.0 * r * m.yn + r * r * m.nn, 0.0)
    return m.units / (m.units - 1) * residuals / math.pow(m.n, 2)
