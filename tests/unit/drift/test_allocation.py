"""Budgets: equal widths, floors, known chances, and a day's tokens that last for the day."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.allocation import Demand, allocate, spread, window_tokens, within
from driftwatch.drift.interval import EMPTY, ratio


def test_widths_are_equal_but_for_the_floor() -> None:
    demands = {"calm": Demand(0.05, 1e6, 100), "wild": Demand(0.2, 1e6, 100), "long": Demand(0.2, 1e6, 400)}
    found = allocate(demands, 1e6, uniform=0.0)
    widths = [demands[name].spread / math.sqrt(n) for name, n in found.items()]
    assert max(widths) / min(widths) < 1.01
    assert sum(demands[name].tokens * n for name, n in found.items()) == pytest.approx(1e6, rel=0.001)
    even = allocate(demands, 1e6, uniform=1.0)
    assert [even[name] for name in ("calm", "wild", "long")] == [3333, 3333, 833]
    floored = allocate({"still": Demand(0.0, 1e6, 100), "wild": Demand(0.2, 1e6, 100)}, 1e6)
    assert floored["still"] == 500  # half of a tenth


def test_a_small_cell_is_judged_whole_and_leaves_the_rest() -> None:
    found = allocate({"small": Demand(0.3, 20, 100), "big": Demand(0.1, 1e6, 100)}, 1e5)
    assert found == {"small": 20, "big": 980}


demand = st.builds(Demand, st.floats(0, 0.5), st.floats(0, 1e4), st.floats(1, 1e4))


@given(st.dictionaries(st.text(max_size=2), demand, max_size=8), st.floats(0, 1e7), st.floats(0, 1))
def test_never_over_budget_nor_over_traffic(demands: dict[str, Demand], tokens: float, uniform: float) -> None:
    found = allocate(demands, tokens, uniform=uniform)
    assert found.keys() == demands.keys()
    spent = sum(demands[name].tokens * requests for name, requests in found.items())
    assert spent <= tokens * (1 + 1e-9) + 2 * sum(one.tokens for one in demands.values())  # whole requests, one each
    for name, requests in found.items():
        assert 1 <= requests <= max(1, math.ceil(demands[name].requests))


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


def test_a_segment_spreads_as_its_cells_do_within() -> None:
    rng = np.random.default_rng(4)
    low, high = EMPTY, EMPTY
    for x in rng.normal(0.0, 0.05, 20_000).tolist():
        low, high = low.with_unit(0.2 + x, 1.0), high.with_unit(0.8 + x, 1.0)
    both = within([(300.0, low), (100.0, high)])
    assert both == pytest.approx(spread(low), rel=0.01)  # that the two differ says nothing of either
    assert spread(low.plus(high)) > 4 * both
    assert within([]) == within([(0.0, low)]) == 0.5  # nothing known yet
    assert spread(low) < within([(1.0, low), (1.0, EMPTY)]) < 0.5


def test_widths_even_out_over_windows() -> None:
    """Two segments judged for a day under budgets that are learnt as it goes: their intervals end equally wide."""
    rng = np.random.default_rng(2)
    sds = {"calm": 0.05, "wild": 0.2}
    seen = dict.fromkeys(sds, EMPTY)
    for _ in range(150):
        demands = {name: Demand(within([(1.0, moments)]), 5000.0, 100.0) for name, moments in seen.items()}
        for name, requests in allocate(demands, 20_000.0).items():
            for x in np.clip(rng.normal(0.5, sds[name], requests), 0, 1).tolist():
                seen[name] = seen[name].with_unit(x, 1.0)
    widths = {name: ratio(moments).half_width or 0.0 for name, moments in seen.items()}
    equal = {name: sds[name] / math.sqrt(15_000) for name in sds}  # half of the requests each
    assert equal["wild"] / equal["calm"] == pytest.approx(4.0)
    assert widths["wild"] / widths["calm"] < 2.0
    assert seen["wild"].units > 4 * seen["calm"].units
    assert sum(moments.units for moments in seen.values()) <= 150 * 202


@given(st.floats(0, 1e9), st.floats(1, 1e9), st.floats(0.1, 60), st.floats(0, 86_400))
def test_a_window_takes_its_part_of_what_is_left(left: float, per_day: float, window_s: float, left_s: float) -> None:
    tokens = window_tokens(left, per_day, window_s, left_s)
    assert 0 <= tokens <= left * (1 + 1e-9) + 1e-9
    assert tokens <= 2 * per_day * window_s / 86_400 * (1 + 1e-9)
    assert window_tokens(-5.0, per_day, window_s, left_s) == 0.0


def test_an_even_day_spends_the_day() -> None:
    left = 1e6
    for window in range(5760):
        left -= window_tokens(left, 1e6, 15.0, 86_400 - 15.0 * window)
    assert left == pytest.approx(0.0, abs=1.0)
