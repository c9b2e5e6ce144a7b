"""The split of a change: exact, symmetric, right on known truths, with intervals that cover."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.drift.decompose import Row, bootstrap, split

Sums = dict[str, tuple[float, float]]


def test_worked_by_hand() -> None:
    # Shares .8/.2 -> .5/.5, rates .8/.4 -> .7/.4.
    found = split({"a": (64, 80), "b": (8, 20)}, {"a": (70, 100), "b": (40, 100)})
    assert [found.before, found.after] == pytest.approx([0.72, 0.55])
    assert found.mix.value == pytest.approx(-0.3 * 0.75 + 0.3 * 0.4)
    assert found.rate.value == pytest.approx(-0.1 * 0.65)
    assert found.change.value == pytest.approx(-0.17)
    assert [found.arrived.value, found.departed.value] == pytest.approx([0, 0])
    assert found.cells["a"].rate == pytest.approx(-0.065)
    assert found.cells["b"].rate_after == pytest.approx(0.4)
    assert found.cells["a"].mix + found.cells["b"].mix == pytest.approx(found.mix.value)
    assert found.cells["b"].mix < 0  # it grew, and lies below the average


def test_cells_not_seen_in_both_periods_stand_apart() -> None:
    # Cell a unchanged at .8; b (.5) leaves a fifth of the traffic, c (.2) arrives with a half.
    found = split({"a": (64, 80), "b": (10, 20)}, {"a": (80, 100), "c": (20, 100)})
    assert [found.mix.value, found.rate.value] == pytest.approx([0, 0])
    assert found.arrived.value == pytest.approx(0.5 * (0.2 - 0.8))
    assert found.departed.value == pytest.approx(-0.2 * (0.5 - 0.8))
    assert found.cells["c"].rate_before is None


cells = st.dictionaries(
    st.sampled_from("abcde"), st.tuples(st.floats(0, 1), st.floats(1, 1e4)).map(lambda x: (x[0] * x[1], x[1]))
)


@given(cells, cells)
def test_parts_add_up_and_reverse(before: Sums, after: Sums) -> None:
    if not set(before) & set(after):
        with pytest.raises(ValueError, match="denominator above zero|nothing to compare"):
            split(before, after)
        return
    there, back = split(before, after), split(after, before)
    parts = (there.mix, there.rate, there.arrived, there.departed)
    assert sum(part.value for part in parts) == pytest.approx(there.change.value, abs=1e-9)
    assert there.change.value == pytest.approx(there.after - there.before, abs=1e-12)
    assert back.mix.value == pytest.approx(-there.mix.value, abs=1e-9)
    assert back.rate.value == pytest.approx(-there.rate.value, abs=1e-9)
    assert back.arrived.value == pytest.approx(-there.departed.value, abs=1e-9)
    assert sum(cell.mix for cell in there.cells.values()) == pytest.approx(there.mix.value, abs=1e-9)
    assert sum(cell.rate for cell in there.cells.values()) == pytest.approx(there.rate.value, abs=1e-9)


def rows(rng: np.random.Generator, requests: int, off: float, fall: float) -> list[Row]:
    """Cells on (.75) and off (.45), both less ``fall``; sessions of three requests share cell and level."""
    found = []
    for unit in range(requests // 3):
        cell = "off" if rng.random() < off else "on"
        level = {"on": 0.75, "off": 0.45}[cell] - fall + rng.normal(0, 0.08)
        for _ in range(3):
            n = 20 + rng.poisson(60)
            found.append(Row(cell, unit, rng.binomial(n, min(max(level, 0), 1)), n))
    return found


def test_recovers_known_parts_with_intervals_that_cover() -> None:
    # Truth: shares .2 -> .4 off, rates down by .03 in both; mix -.06, rate -.03.
    rng = np.random.default_rng(4)
    covered = {"mix": 0, "rate": 0}
    runs = 100
    for run in range(runs):
        found = bootstrap(rows(rng, 450, 0.2, 0.0), rows(rng, 450, 0.4, 0.03), seed=run, draws=200)
        for name, truth in (("mix", -0.06), ("rate", -0.03)):
            part = getattr(found, name)
            assert part.lower is not None
            assert part.upper is not None
            assert part.lower <= part.value <= part.upper
            covered[name] += part.lower <= truth <= part.upper
    assert all(count >= 88 for count in covered.values())  # 95 less 3 standard deviations of 100 runs


def test_the_unit_decides_the_width_and_the_seed_the_draws() -> None:
    rng = np.random.default_rng(5)
    data = rows(rng, 900, 0.3, 0.0), rows(rng, 900, 0.3, 0.0)
    by_session = bootstrap(*data, seed=1, draws=300)
    alone = [[row._replace(unit=i) for i, row in enumerate(part)] for part in data]
    by_request = bootstrap(*alone, seed=1, draws=300)

    def width(found: object) -> float:
        part = found.change  # type: ignore[attr-defined]
        return float(part.upper - part.lower)

    assert width(by_session) > 1.3 * width(by_request)
    assert bootstrap(*data, seed=1, draws=300) == by_session
    assert bootstrap(*data, seed=2, draws=300) != by_session


def test_one_unit_gives_no_interval() -> None:
    found = bootstrap([Row("a", 0, 3, 4)], [Row("a", 0, 1, 4), Row("a", 1, 1, 4)], seed=0)
    assert found.change.value == pytest.approx(-0.5)
    assert found.change.lower is None


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="denominator above zero"):
        split({"a": (0.0, 0.0)}, {"a": (1.0, 2.0)})
    with pytest.raises(ValueError, match="nothing to compare"):
        split({"a": (1.0, 2.0)}, {"b": (1.0, 2.0)})
