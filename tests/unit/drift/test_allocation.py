"""Budgets: equal widths, floors, known chances, and changes at the edges of windows only."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.allocation import Allocator, Budget, Demand, allocate, spread
from driftwatch.drift.interval import EMPTY


def test_widths_are_equal_but_for_the_floor() -> None:
    demands = {"calm": Demand(0.05, 1e6, 100), "wild": Demand(0.2, 1e6, 100), "long": Demand(0.2, 1e6, 400)}
    found = {name: budget.requests for name, budget in allocate(demands, 1e6, uniform=0.0).items()}
    widths = [demands[name].spread / math.sqrt(n) for name, n in found.items()]
    assert max(widths) / min(widths) < 1.01
    assert sum(demands[name].tokens * n for name, n in found.items()) == pytest.approx(1e6, rel=0.001)
    even = allocate(demands, 1e6, uniform=1.0)
    assert [even[name].requests for name in ("calm", "wild", "long")] == [3333, 3333, 833]
    floored = allocate({"still": Demand(0.0, 1e6, 100), "wild": Demand(0.2, 1e6, 100)}, 1e6)
    assert floored["still"].requests == 500  # half of a tenth


def test_a_small_cell_is_judged_whole_and_leaves_the_rest() -> None:
    found = allocate({"small": Demand(0.3, 20, 100), "big": Demand(0.1, 1e6, 100)}, 1e5)
    assert found["small"].requests == 20
    assert found["big"].requests == 980
    assert found["small"].probability(20) == 1.0
    assert found["big"].probability(98_000) == pytest.approx(0.01)
    assert found["big"].weight(98_000) == pytest.approx(100)
    assert Budget(0).weight(5) == math.inf


demand = st.builds(Demand, st.floats(0, 0.5), st.floats(0, 1e4), st.floats(1, 1e4))


@given(st.dictionaries(st.text(max_size=2), demand, max_size=8), st.floats(0, 1e7), st.floats(0, 1))
def test_never_over_budget_nor_over_traffic(demands: dict[str, Demand], tokens: float, uniform: float) -> None:
    found = allocate(demands, tokens, uniform=uniform)
    assert found.keys() == demands.keys()
    spent = sum(demands[name].tokens * budget.requests for name, budget in found.items())
    assert spent <= tokens * (1 + 1e-9) + 2 * sum(one.tokens for one in demands.values())  # whole requests, one each
    for name, budget in found.items():
        assert 1 <= budget.requests <= max(1, math.ceil(demands[name].requests))


def test_settings_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="no allocation"):
        allocate({}, -1.0)
    with pytest.raises(ValueError, match="costs tokens"):
        allocate({"a": Demand(0.1, 10, 0)}, 100)


def test_spread_is_an_upper_limit_that_comes_down() -> None:
    assert spread(EMPTY) == 0.5
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(300):
        moments = EMPTY
        for x in rng.beta(6, 4, 50).tolist():
            moments = moments.with_unit(x, 1.0)
        held += spread(moments) >= math.sqrt(0.24 / 11)
    assert held >= 285
    for x in rng.beta(6, 4, 20_000).tolist():
        moments = moments.with_unit(x, 1.0)
    assert spread(moments) == pytest.approx(math.sqrt(0.24 / 11), abs=0.02)


def test_learns_spreads_at_the_edges_of_windows_alone() -> None:
    rng = np.random.default_rng(2)
    allocator = Allocator(tokens_per_window=100_000.0)
    sds = {"calm": 0.03, "wild": 0.15}
    for name in sds:
        allocator.arrived(name, 5000)
    budgets = allocator.turn()
    assert budgets["calm"] == budgets["wild"]  # nothing known, nothing preferred
    for _ in range(12):
        before = dict(allocator.budgets)
        for name, sd in sds.items():
            allocator.arrived(name, 5000)
            for x in np.clip(rng.normal(0.6, sd, allocator.budgets[name].requests), 0, 1).tolist():
                allocator.judged(name, x, 1.0, 100.0)
        assert allocator.budgets == before
        text = json.dumps(allocator.to_json())
        allocator = Allocator.from_json(json.loads(text))
        assert json.dumps(allocator.to_json()) == text
        budgets = allocator.turn()
    assert budgets["wild"].requests > 2.5 * budgets["calm"].requests
    assert 900 <= budgets["wild"].requests + budgets["calm"].requests <= 1000


def test_weights_undo_the_allocation() -> None:
    # 99% at .8, 1% at .2, judged equally often: the plain mean reads .50, the weighted one .79.
    rng = np.random.default_rng(3)
    arrived = {"big": 99_000, "small": 1000}
    budgets = {name: Budget(500) for name in arrived}
    top = bottom = 0.0
    for name, level in (("big", 0.8), ("small", 0.2)):
        weight = budgets[name].weight(arrived[name])
        top += weight * rng.binomial(1, level, 500).sum()
        bottom += weight * 500
    assert top / bottom == pytest.approx(0.794, abs=0.06)
