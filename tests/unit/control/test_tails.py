"""Steps per token beside the sums: counted at the cell's gamma, merged over hours, and never across grids."""

from __future__ import annotations

import json

import numpy as np

from driftwatch.acceptance import Weights, tally
from driftwatch.control import tails
from driftwatch.drift.sums import Sums


def request(rate: float, tokens: int, seed: int = 0) -> Sums:
    hits = np.random.default_rng(seed).random((tokens, 1)) < rate
    return Sums.request(tally(Weights(hits.astype(float))))


def test_requests_are_counted_once_and_short_ones_apart() -> None:
    tail = tails.empty(3)
    for rate, tokens in ((1.0, 64), (0.0, 64), (0.5, 64), (0.5, 8)):
        tails.add(tail, request(rate, tokens), 3)
    assert (tail.requests, tail.short) == (3, 1)
    assert tail.quantile(0.99).value == 1.0, "nothing accepted: a step a token"
    assert tail.quantile(0.01).value == 0.25, "everything accepted: four tokens a step"


def test_hours_merge_to_the_whole() -> None:
    requests = [request(0.6, 64, seed) for seed in range(40)]
    whole, first, second = tails.empty(3), tails.empty(3), tails.empty(3)
    for number, one in enumerate(requests):
        tails.add(whole, one, 3)
        tails.add(first if number < 25 else second, one, 3)
    stored = json.loads(json.dumps({tails.KEY: first.to_json()}))
    assert (tails.read(stored, 3) + second).to_json() == whole.to_json()


def test_another_gamma_is_another_grid() -> None:
    tail = tails.empty(3)
    tails.add(tail, request(0.5, 64), 3)
    assert tails.read({tails.KEY: tail.to_json()}, 5).requests == 0
    assert tails.read({}, 3).requests == 0
