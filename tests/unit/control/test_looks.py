"""A look over all segments makes few comparisons at a time, and each again only after a while, whoever looks."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from driftwatch.control import untrained
from driftwatch.control.looks import AT_ONCE, PAUSE_S, REFRESH_S, Looks
from driftwatch.control.reports import CellReport
from driftwatch.settings import Settings
from driftwatch.store.samples import DAY
from driftwatch.store.schema import Cell

NOTHING: Any = None
NAMES = [f"tenant={i:02}" for i in range(50)]


def cell(segment: str) -> CellReport:
    """Of an engine's own figures: beside those there is no replay to compare, and nothing is asked of the store."""
    return CellReport(Cell(segment=segment, channel="live"), *cast("tuple[Any, ...]", [None] * 8))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each segment was compared; each time takes a while, so that threads meet."""
    found: Counter[str] = Counter()
    compare = untrained.beside

    def counted(session: Any, settings: Settings, segment: str, cells: Any) -> Any:
        before = found[segment]
        time.sleep(0.002)
        found[segment] = before + 1
        return compare(session, settings, segment, cells)

    monkeypatch.setattr(untrained, "beside", counted)
    return found


def test_all_are_looked_at_in_turn() -> None:
    names = NAMES[: 2 * AT_ONCE + 1]
    looks, cells = Looks(Settings()), [cell(name) for name in names]
    assert [len(looks.over(NOTHING, cells, 1000.0 + i)) for i in range(4)] == [2, 4, 5, 5]
    assert looks.over(NOTHING, cells, 1010.0) == {name: [] for name in names}


def test_a_segment_is_left_alone_for_a_while() -> None:
    looks = Looks(Settings())
    first = looks.over(NOTHING, [cell("a")], 1000.0)["a"]
    assert looks.over(NOTHING, [cell("a")], 1000.0 + REFRESH_S - 1.0)["a"] is first
    assert looks.over(NOTHING, [cell("a")], 1000.0 + REFRESH_S)["a"] is not first


def test_many_segments_do_not_keep_every_scrape_waiting(made: Counter[str]) -> None:
    looks, cells = Looks(Settings()), [cell(name) for name in NAMES]
    start, scrapes = 1000.0, 25
    for i in range(scrapes):
        looks.over(NOTHING, cells, start + i)
    assert made == dict.fromkeys(NAMES, 1), "new ones are found at once"
    busy = 0
    for i in range(240):  # an hour of scrapes
        before = made.total()
        looks.over(NOTHING, cells, start + REFRESH_S + scrapes + 15.0 * i)
        assert made.total() - before <= AT_ONCE
        busy += made.total() > before
    assert busy == 3600.0 / PAUSE_S
    assert max(made.values()) - min(made.values()) <= 1, "the oldest first"


def test_who_asks_for_fewer_segments_takes_nothing_away(made: Counter[str]) -> None:
    """The metrics leave out what fell silent; the API does not."""
    looks = Looks(Settings())
    both = looks.over(NOTHING, [cell("a"), cell("b")], 1000.0)
    assert looks.over(NOTHING, [cell("a")], 1010.0) == {"a": both["a"]}
    assert looks.over(NOTHING, [cell("a"), cell("b")], 1020.0)["b"] is both["b"]
    assert made == {"a": 1, "b": 1}
    looks.over(NOTHING, [cell("a")], 1000.0 + DAY)
    assert looks.over(NOTHING, [cell("a"), cell("b")], 1001.0 + DAY)["b"] is not both["b"], "forgotten after a day"


def test_callers_at_once_make_each_comparison_once(made: Counter[str]) -> None:
    looks, cells = Looks(Settings()), [cell(name) for name in NAMES[:AT_ONCE]]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: looks.over(NOTHING, cells, 1000.0), range(8)))
    assert made == dict.fromkeys(NAMES[:AT_ONCE], 1)
    assert all(one == found[0] for one in found)
