"""Counters of a cell: the sums' own columns, and no jump where the proposal length changes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.acceptance import Weights, tally
from driftwatch.control.counters import KEY, NAMES, Counters
from driftwatch.drift.sums import Sums


def request(seed: int, weight: float = 1.0) -> Sums:
    return Sums.request(tally(Weights((np.random.default_rng(seed).random((30, 1)) < 0.7).astype(float)), 8), weight)


def test_are_the_columns_of_the_sums() -> None:
    sums = request(1) + request(2, 3.0)
    found = Counters.of(sums, 3)
    figures = sums.tally.figures(3)
    plain = dict(zip(NAMES, found.counts[0], strict=True))
    assert (plain["requests"], plain["windows"], plain["tokens"]) == (2, figures["windows"], 60)
    assert (plain["drafted_tokens"], plain["accepted_tokens"]) == (figures["drafted"], figures["accepted"])
    assert found.depths[0].tolist() == figures["accepted_per_depth"]
    weighted = dict(zip(NAMES, found.counts[1], strict=True))
    assert weighted["requests"] == 4.0
    assert weighted["rejected_tokens"] == pytest.approx(sums.total("tested", 3) - sums.total("accepted", 3))


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 99)), min_size=1, max_size=8))
def test_never_fall_and_grow_by_what_came(periods: list[tuple[int, int]]) -> None:
    """Whatever proposal lengths follow each other, and over restarts."""
    sums, carried, gamma = Sums.zero(8), Counters.zero(), periods[0][0]
    before = Counters.zero()
    for now, seed in periods:
        carried += Counters.of(sums, gamma) - Counters.of(sums, now)
        carried = Counters.read({KEY: json.loads(json.dumps(carried.to_json()))})
        gamma = now
        added = request(seed, 1.0 + seed)
        sums += added
        found = carried + Counters.of(sums, gamma)
        new = found - before
        assert new.counts == pytest.approx(Counters.of(added, gamma).counts, abs=1e-6)
        assert (new.depths > -1e-6).all()
        assert new.depths.sum() == pytest.approx(Counters.of(added, gamma).depths.sum(), abs=1e-6)
        before = found


def test_nothing_is_stored_where_it_never_changed() -> None:
    sums = request(3)
    assert (Counters.read({}) + Counters.of(sums, 5)).depths.tolist() == Counters.of(sums, 5).depths.tolist()
