"""A look over all segments walks few of them at a time, and each again only after a while."""

from __future__ import annotations

from typing import Any, cast

from driftwatch.control.reports import CellReport
from driftwatch.control.untrained import AT_ONCE, REFRESH_S, Looks
from driftwatch.settings import Settings
from driftwatch.store.schema import Cell

NOTHING: Any = None


def cell(segment: str) -> CellReport:
    """Of an engine's own figures: beside those there is no replay to compare, and nothing is asked of the store."""
    return CellReport(Cell(segment=segment, channel="live"), *cast("tuple[Any, ...]", [None] * 8))


def test_all_are_looked_at_in_turn() -> None:
    names = [f"tenant={i}" for i in range(2 * AT_ONCE + 1)]
    looks, cells = Looks(Settings()), [cell(name) for name in names]
    assert [len(looks.over(NOTHING, cells, 1000.0 + i)) for i in range(4)] == [2, 4, 5, 5]
    assert looks.over(NOTHING, cells, 1010.0) == {name: [] for name in names}


def test_a_segment_is_left_alone_for_a_while_and_forgotten_with_its_cells() -> None:
    looks = Looks(Settings())
    first = looks.over(NOTHING, [cell("a")], 1000.0)["a"]
    assert looks.over(NOTHING, [cell("a")], 1000.0 + REFRESH_S - 1.0)["a"] is first
    assert looks.over(NOTHING, [cell("a")], 1000.0 + REFRESH_S)["a"] is not first
    assert looks.over(NOTHING, [cell("b")], 2000.0) == {"b": []}
