"""Which requests become training data: those of the event, some that go worst, and some from before, to forget nothing.

Pure: the same requests and rules give the same choice. Order within a pool is that of a hash of the request, so that a
cap takes an unbiased sample and an export made anew is the same.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from driftwatch.settings import TrainingData
from driftwatch.store.training import Served

Pool = Literal["event", "low", "replay"]

LOW_QUARTER = 0.25
"""The draft does worst on the quarter of requests with the fewest first proposals right."""


@dataclass(frozen=True)
class Occasion:
    """What the data is for. Segment and split None: all of them."""

    segment: str | None
    split: str | None
    start: float
    """When the change is estimated to have begun, seconds since the epoch."""
    tenant: str | None
    """Tenant of the segment; None where it names none."""
    earlier: bool = True
    """Whether requests from before the change say what the target says today: not once the target has changed."""


@dataclass(frozen=True)
class Choice:
    """Chosen requests with their pools, and how many were left out and why."""

    pools: Mapping[int, Pool]
    """By sample id."""
    left_out: Mapping[str, int]

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(self.pools.values()))


def choose(rows: Iterable[Served], occasion: Occasion, rules: TrainingData) -> Choice:
    """Choose requests; the shares hold of what is found, so that few of the event bring few others."""
    allowed, left_out = _allowed(rows, occasion, rules)
    event = [row for row in allowed if row.served_at >= occasion.start and _of(row, occasion)]
    taken = {row.sample_id for row in event}
    others = [row for row in allowed if row.sample_id not in taken]
    own_share = 1.0 - rules.low_share - rules.replay_share
    chosen: dict[int, Pool] = {}

    def take(pool: Pool, found: Sequence[Served], most: int) -> None:
        room = min(most, rules.max_rows - len(chosen))
        for row in balanced([row for row in found if row.sample_id not in chosen], room):
            chosen[row.sample_id] = pool

    take("event", event, round(rules.max_rows * own_share))
    total = len(chosen) / own_share
    take("low", _lowest(others, occasion), round(total * rules.low_share))
    if occasion.earlier:
        take("replay", _before(others, occasion), round(total * rules.replay_share))
    fitting = _under(rules.max_tokens, [row for row in allowed if row.sample_id in chosen])
    pools = {row.sample_id: chosen[row.sample_id] for row in fitting}
    left_out["over_cap"] = len(event) - sum(pool == "event" for pool in pools.values())
    return Choice(pools, {reason: count for reason, count in left_out.items() if count})


def _allowed(
    rows: Iterable[Served], occasion: Occasion, rules: TrainingData
) -> tuple[list[Served], defaultdict[str, int]]:
    allowed = []
    left_out: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        tenant = row.labels.get(rules.tenant_label)
        if row.forbidden:
            left_out["forbidden_by_client"] += 1
        elif tenant in rules.exclude_tenants:
            left_out["excluded_tenant"] += 1
        elif not rules.cross_tenant and tenant != occasion.tenant:
            left_out["another_tenant"] += 1
        else:
            allowed.append(row)
    return allowed, left_out


def _of(row: Served, occasion: Occasion) -> bool:
    return occasion.segment in (None, row.segment) and occasion.split in (None, row.split)


def _lowest(rows: Sequence[Served], occasion: Occasion) -> list[Served]:
    """Of the requests since the change, or of all if what came before is as good, those that the draft is worst on."""
    usable = [row for row in rows if occasion.earlier or row.served_at >= occasion.start]
    known = [row for row in usable if row.first_hits is not None]
    known.sort(key=lambda row: (row.first_hits, row.request_id))
    return known[: round(len(known) * LOW_QUARTER)]


def _before(rows: Sequence[Served], occasion: Occasion) -> list[Served]:
    """Requests from before the change, on the draft's training distribution where that is known."""
    before = [row for row in rows if row.served_at < occasion.start]
    return [row for row in before if row.split == "on"] or before


def balanced(rows: Sequence[Served], most: int) -> list[Served]:
    """At most so many, as evenly over segments as they allow: a small one gives all, the others share the rest."""
    by_segment: defaultdict[str, list[Served]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: _hash(row.request_id)):
        by_segment[row.segment].append(row)
    chosen: list[Served] = []
    waiting = sorted(by_segment.values(), key=len)
    for i, group in enumerate(waiting):
        chosen += group[: (most - len(chosen)) // (len(waiting) - i)]
    return chosen


def _under(max_tokens: int, rows: Sequence[Served]) -> list[Served]:
    """Requests of all pools alike, until the tokens are used up."""
    fitting, spent = [], 0
    for row in sorted(rows, key=lambda row: _hash(row.request_id)):
        if spent + row.tokens <= max_tokens:
            spent += row.tokens
            fitting.append(row)
    return fitting


def for_evaluation(share: float) -> Callable[[Served], bool]:
    """Whether a request is kept out of training: by its session's hash, so that no conversation lies on both sides."""

    def is_kept(row: Served) -> bool:
        key = f"session:{row.session}" if row.session is not None else f"request:{row.request_id}"
        return _hash(key) < share * 2**64

    return is_kept


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8])
