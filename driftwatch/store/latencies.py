"""Requests over the limits of what users wait for: counted as samples come in, by minute and by hour.

Samples are a biased few, so each counts with the requests that it stands for (its weight, n / k). A limit that changes
starts anew: counts of another limit say nothing of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from driftwatch.store.connection import accumulate
from driftwatch.store.schema import Latency

Figure = Literal["ttft", "tpot"]
TIMES: Mapping[Figure, str] = {"ttft": "ttft_s", "tpot": "tpot_s"}
"""What a sample's timing calls them."""
MINUTE, HOUR = 60, 3600
SPANS = (MINUTE, HOUR)
KEPT_S = {MINUTE: 7 * HOUR, HOUR: 4 * 24 * HOUR}
"""How long spans are of use: windows of up to six hours are read from minutes, longer ones from hours."""


@dataclass(frozen=True)
class Over:
    """Of some stretch of time."""

    weight: float = 0.0
    squares: float = 0.0
    over: float = 0.0

    @property
    def share(self) -> float | None:
        return self.over / self.weight if self.weight else None

    @property
    def requests(self) -> float:
        """That unequal weights are worth (Kish 1965)."""
        return self.weight**2 / self.squares if self.squares else 0.0


def count(session: Session, samples: Sequence[Mapping[str, Any]], limits: Mapping[Figure, float], now: float) -> None:
    """Count new samples (rows of their table) at the time when they were done; those long gone count nowhere."""
    found: defaultdict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for sample in samples:
        timing, weight = sample["timing"] or {}, sample["weight"]
        done = sample["served_at"] + (timing.get("e2e_s") or 0.0)
        for figure, limit_s in limits.items():
            if (value := timing.get(TIMES[figure])) is None:
                continue
            for span in SPANS:
                if done > now - KEPT_S[span]:
                    sums = found[figure, sample["segment"], limit_s, span, int(min(done, now) // span)]
                    for i, added in enumerate((weight, weight**2, weight * (value > limit_s))):
                        sums[i] += added
    for key in sorted(found):
        keys = dict(zip(("figure", "segment", "limit_s", "span_s", "number"), key, strict=True))
        accumulate(session, Latency, keys, dict(zip(("weight", "squares", "over"), found[key], strict=True)))


def over(
    session: Session, figure: Figure, limit_s: float, seconds: int, now: float, segment: str | None = None
) -> dict[str, Over]:
    """By segment (all of them unless one is named), over the last ``seconds``, rounded up to whole minutes, or hours
    where it is long."""
    span = MINUTE if seconds < KEPT_S[MINUTE] else HOUR
    columns = (func.sum(Latency.weight), func.sum(Latency.squares), func.sum(Latency.over))
    mine = [Latency.figure == figure, Latency.limit_s == limit_s, Latency.span_s == span]
    mine += [] if segment is None else [Latency.segment == segment]
    recent = (Latency.number > int((now - seconds - span) // span), Latency.number <= int(now // span))
    rows = session.execute(select(Latency.segment, *columns).where(*mine, *recent).group_by(Latency.segment))
    return {row[0]: Over(*map(float, row[1:])) for row in rows}


def prune(session: Session, now: float, spans: Iterable[int] = SPANS) -> None:
    """Delete what no window reaches any more."""
    for span in spans:
        session.execute(
            delete(Latency).where(Latency.span_s == span, Latency.number < int((now - KEPT_S[span]) // span))
        )
