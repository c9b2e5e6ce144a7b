"""Plots: well-formed, inside their frame, nothing where there is nothing."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from driftwatch.economics.range import Range
from driftwatch.evaluate.plots import HEIGHT, WIDTH, Axis, Series, bars, lines

repeatable = settings(derandomize=True, deadline=None)
values = st.floats(0.01, 100.0)
ranges = st.builds(lambda v, a, b: Range(v, v * a, v / b), values, st.floats(0.1, 1.0), st.floats(0.1, 1.0))


@repeatable
@given(st.lists(ranges, min_size=1, max_size=9), st.booleans(), st.floats(0.5, 40.0))
def test_a_line_stays_inside(found: list[Range], doubling: bool, here: float) -> None:
    series = [Series("a<b", [(float(i + 1), one) for i, one in enumerate(found)])]
    drawn = lines("t", 'd"&', series, x="x", y="y", reference=1.0, here=here, doubling=doubling)
    root = ElementTree.fromstring(str(drawn))
    assert root.get("aria-label") == 't. d"&'
    for circle in root.iter("circle"):
        assert 0.0 <= float(circle.get("cx", "nan")) <= WIDTH
        assert 0.0 <= float(circle.get("cy", "nan")) <= HEIGHT
    assert len(list(root.iter("circle"))) == len(found)
    assert not re.search(r"nan|inf", str(drawn))


@repeatable
@given(st.lists(ranges, min_size=2, max_size=2))
def test_bars_stay_inside(found: list[Range]) -> None:
    drawn = bars("t", "d", [("p50", list(zip(("plain", "fast"), found, strict=True)))], unit="ms")
    root = ElementTree.fromstring(str(drawn))
    widths = [float(one.get("width", "nan")) + float(one.get("x", "nan")) for one in root.iter("rect")]
    assert len(widths) == 2
    assert max(widths) <= WIDTH


def test_nothing_to_draw() -> None:
    assert lines("t", "d", [Series("a", [(1.0, Range())])], x="x", y="y", reference=1.0) == ""
    assert lines("t", "d", [Series("a", [(1.0, Range(float("inf")))])], x="x", y="y", reference=1.0) == ""
    assert bars("t", "d", [("p50", [("plain", Range())])], unit="ms") == ""


def test_ticks_are_round() -> None:
    assert Axis(0.0, 2.1, 0.0, 1.0).ticks() == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert Axis(1.0, 32.0, 0.0, 1.0, True).ticks() == [1, 2, 4, 8, 16, 32]
    assert Axis(1.0, 4.0, 10.0, 30.0, True)(2.0) == 20.0
