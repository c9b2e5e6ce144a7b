"""Simulated traffic: requests of uneven length whose tokens depend on each other, walked as an engine would."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

Counts = tuple[NDArray[np.float64], NDArray[np.float64]]


class Traffic(Protocol):
    def __call__(
        self,
        rng: np.random.Generator,
        requests: int,
        match: float,
        *,
        gamma: int = 3,
        median_tokens: float = 100.0,
        length_sigma: float = 0.7,
        request_sd: float = 0.11,
        swing: float = 0.20,
        session_sd: float = 0.0,
        turns: int = 1,
    ) -> Counts: ...


def simulate(
    rng: np.random.Generator,
    requests: int,
    match: float,
    *,
    gamma: int = 3,
    median_tokens: float = 100.0,
    length_sigma: float = 0.7,
    request_sd: float = 0.11,
    swing: float = 0.20,
    session_sd: float = 0.0,
    turns: int = 1,
) -> Counts:
    """Accepted and tested proposals per request, in order.

    A token matches with probability ``match`` + session effect + request effect, + or - ``swing`` by a two-state
    regime that flips with probability .04 a token. All requests advance together, the longest first.
    """
    lengths = np.clip(median_tokens * np.exp(rng.normal(0.0, length_sigma, requests)), 8, 600).astype(int)
    sessions = rng.normal(0.0, session_sd, -(-requests // turns)).repeat(turns)[:requests]
    chance = match + sessions + rng.normal(0.0, request_sd, requests)
    order = np.argsort(-lengths, kind="stable")
    lengths, chance = lengths[order], chance[order]
    easy = rng.random(requests) < 0.5
    depth = np.zeros(requests, dtype=int)
    accepted, tested = np.zeros(requests), np.zeros(requests)
    for token in range(1, int(lengths[0])):
        live = int(np.searchsorted(-lengths, -token, side="left"))  # those longer than ``token``
        easy[:live] ^= rng.random(live) < 0.04
        match_now = rng.random(live) < chance[:live] + np.where(easy[:live], swing, -swing)
        judged = depth[:live] < gamma  # behind gamma accepted ones comes the bonus token, which nobody proposed
        hit = judged & match_now
        tested[:live] += judged
        accepted[:live] += hit
        depth[:live] = np.where(hit, depth[:live] + 1, 0)
    restore = np.argsort(order)
    return accepted[restore], tested[restore]


@pytest.fixture(scope="session")
def traffic() -> Traffic:
    return simulate
