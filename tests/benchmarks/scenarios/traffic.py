"""Seeded streams of requests such as a sampled deployment would give, with changes put in where they are wanted.

Lengths are lognormal. A token matches with a probability made of the level of its traffic (on or off the training
distribution), its tenant, its session, its request, the hour of the day, and a regime within the request that flips
with probability .04 a token; so hits cluster on every scale. Engine and replay walk the same tokens side by side: a
fault of the engine loses hits in the first alone. Arrivals come in bursts. What a detector may see of a request is a
:class:`Request`; what changed and when stays with the scenario.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GAMMA = 3
DAY_REQUESTS = 10_000
"""Sampled requests a day."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """One period's traffic."""

    match_on: float = 0.70
    match_off: float = 0.45
    off_share: float = 0.10
    detected: float = 0.80
    """Share of off-distribution prompts that the sketch flags; of the others it flags .05."""
    request_sd: float = 0.11
    regime: float = 0.20
    median_tokens: float = 100.0
    length_sigma: float = 0.7
    tenants: tuple[tuple[str, float, float], ...] = (("a", 0.7, 0.0), ("b", 0.3, -0.05))
    """Name, share, and what its requests match more than the level."""
    length_slope: float = 0.0
    """What a request matches more for each doubling of its length over 100 tokens."""
    turns: float = 1.0
    """Mean requests of a session; 1: no session label."""
    session_sd: float = 0.0
    swing: float = 0.0
    """Amplitude of the daily swing in match probability."""
    engine_loss: float = 0.0
    """Share of hits that a faulty engine loses."""
    engine_noise: float = 0.004
    """Tokens at which engine and replay differ anyway: near ties."""
    surprise: float = 0.6
    """Typical negative log-likelihood of served tokens, nats a token."""
    batch: float = 8.0
    facts: dict[str, str] = field(default_factory=lambda: {"target": "t1", "draft": "d1", "engine": "e1"})


class Request(NamedTuple):
    """Fields of a Record and its Replay, and nothing of the scenario."""

    at: int
    time_s: float
    session: str | None
    tenant: str
    flagged: bool
    """p-value of the prompt below epsilon: split ``off``."""
    accepted: float
    tested: float
    windows: float
    tokens: float
    live_accepted: float
    live_tested: float
    live_windows: float
    """Windows of the engine that ended within the output, and how many of them the replay made too."""
    agreeing: float
    surprise: float
    batch: float
    facts: dict[str, str]


def requests(
    rng: np.random.Generator, shape: Shape, count: int, *, first: int = 0, live: bool = False
) -> Iterator[Request]:
    """``count`` requests from index ``first`` on."""
    names, shares, offsets = zip(*shape.tenants, strict=True)
    tenant = rng.choice(len(names), count, p=np.array(shares) / sum(shares))
    off = rng.random(count) < shape.off_share
    flagged = rng.random(count) < np.where(off, shape.detected, 0.05)
    times, sessions = _arrivals(rng, shape, count, first)
    level = np.where(off, shape.match_off, shape.match_on) + np.array(offsets)[tenant]
    level += shape.swing * np.sin(2.0 * np.pi * times / 86_400.0)
    if sessions is not None:
        level += rng.normal(0.0, shape.session_sd, sessions.max() + 1)[sessions]
    level += rng.normal(0.0, shape.request_sd, count)
    lengths = np.clip(shape.median_tokens * np.exp(rng.normal(0.0, shape.length_sigma, count)), 8, 600).astype(int)
    level += shape.length_slope * np.log2(lengths / 100.0)
    walked = _walk(rng, shape, lengths, level, live)
    surprise = shape.surprise * np.exp(rng.normal(0.0, 0.3, count))
    batch = shape.batch * np.exp(rng.normal(0.0, 0.25, count))
    columns = [x.tolist() for x in (*walked, surprise, batch)]
    rows = zip(times.tolist(), tenant.tolist(), flagged.tolist(), (lengths - 1).tolist(), *columns, strict=True)
    for i, (time_s, t, flag, tokens, a, tested, windows, la, lt, lw, agree, nll, size) in enumerate(rows):
        session = None if sessions is None else f"{first}-{sessions[i]}"
        head = (first + i, time_s, session, names[t], flag, a, tested, windows, tokens)
        yield Request(*head, la, lt, lw, agree, nll, size, shape.facts)


def _arrivals(
    rng: np.random.Generator, shape: Shape, count: int, first: int
) -> tuple[Floats, NDArray[np.int64] | None]:
    """Times, a tenth of the traffic in bursts at ten times the pace; and which session each request belongs to."""
    pace = np.where(rng.random(-(-count // 50)) < 0.1, 10.0, 0.91).repeat(50)[:count]
    gaps = rng.exponential(86_400.0 / DAY_REQUESTS, count) / pace
    times = first * 86_400.0 / DAY_REQUESTS + np.cumsum(gaps)
    if shape.turns <= 1.0:
        return times, None
    # Eight sessions talk at a time; then the next eight.
    block = (np.arange(count) / (8.0 * shape.turns)).astype(np.int64)
    return times, block * 8 + rng.integers(0, 8, count)


def _walk(
    rng: np.random.Generator, shape: Shape, lengths: NDArray[np.int64], level: Floats, live: bool
) -> tuple[Floats, ...]:
    """Counts of the replay, then of the engine, by request. All advance token by token together, longest first."""
    count = len(lengths)
    order = np.argsort(-lengths, kind="stable")
    lengths, level = lengths[order], level[order]
    easy = rng.random(count) < 0.5
    mine, theirs = np.zeros(count, dtype=np.int8), np.zeros(count, dtype=np.int8)
    paired = np.ones(count, dtype=bool)
    accepted, tested, windows, live_accepted, live_tested, live_windows, agreeing = (np.zeros(count) for _ in range(7))
    for token in range(1, int(lengths[0])):
        n = int(np.searchsorted(-lengths, -token, side="left"))
        easy[:n] ^= rng.random(n) < 0.04
        match = rng.random(n) < level[:n] + np.where(easy[:n], shape.regime, -shape.regime)
        depth = mine[:n]
        windows[:n] += depth == 0
        judged = depth < GAMMA
        hit = judged & match
        tested[:n] += judged
        accepted[:n] += hit
        after = np.where(hit, depth + 1, 0).astype(np.int8)
        if live:
            engine = (match ^ (rng.random(n) < shape.engine_noise)) & (rng.random(n) >= shape.engine_loss)
            other = theirs[:n]
            tests = other < GAMMA
            hits = tests & engine
            live_tested[:n] += tests
            live_accepted[:n] += hits
            then = np.where(hits, other + 1, 0).astype(np.int8)
            together = np.where((depth == 0) & (other == 0), True, paired[:n]) & (hit == hits) & (depth == other)
            live_windows[:n] += then == 0
            agreeing[:n] += (then == 0) & together
            paired[:n] = together
            theirs[:n] = then
        mine[:n] = after
    back = np.argsort(order)
    found = (accepted, tested, windows, live_accepted, live_tested, live_windows, agreeing)
    return tuple(x[back] for x in found)
