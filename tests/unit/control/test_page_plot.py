from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.control.page.hours import HOUR_S
from driftwatch.control.page.plot import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Period, Scale, Stretch, over_time, spark
from driftwatch.drift.interval import Estimate

NOW = 495_000 * HOUR_S


def found(value: float | None, lower: float | None = None, upper: float | None = None) -> Estimate:
    return Estimate(value, lower, upper, 3, 1.0, 2.0)


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def of_class(svg: str, name: str) -> list[ElementTree.Element]:
    return [one for one in parse(svg).iter() if one.get("class") == name]


def hours(*values: float | None, start: float = NOW) -> list[tuple[float, Estimate]]:
    return [(start + i * HOUR_S, found(v, v and v - 0.1, v and v + 0.1)) for i, v in enumerate(values)]


def drawn(stretches: list[Stretch], **more: object) -> str:
    return over_time("Hit rate", stretches, since=NOW, until=NOW + 24 * HOUR_S, high=1.0, **more)  # type: ignore[arg-type]


def test_values_lie_where_the_scale_puts_them() -> None:
    svg = drawn([Stretch(hours(0.5, 1.0), baseline=0.75, floor=0.25)], even=0.5)
    scale = Scale(NOW, NOW + 24 * HOUR_S, 0.0, 1.0)
    first, second = [(float(one.get("cx", "")), float(one.get("cy", ""))) for one in of_class(svg, "dot")]
    assert first == pytest.approx((scale.x(NOW + 0.5 * HOUR_S), scale.y(0.5)), abs=0.05)
    assert second == pytest.approx((scale.x(NOW + 1.5 * HOUR_S), TOP), abs=0.05)
    for name, value in (("baseline", 0.75), ("floor", 0.25), ("even", 0.5)):
        (line,) = of_class(svg, name)
        assert float(line.get("y1", "")) == pytest.approx(scale.y(value), abs=0.05)
    assert float(of_class(svg, "even")[0].get("x2", "")) == WIDTH - RIGHT, "break-even holds for all of it"
    assert float(of_class(svg, "baseline")[0].get("x2", "")) < LEFT + 60, "a baseline for its own hours"


def test_nothing_is_drawn_across_an_hour_without_data() -> None:
    svg = drawn([Stretch(hours(0.5, 0.6, None, 0.7, 0.8))])
    assert len(of_class(svg, "line")) == 2
    assert len(of_class(svg, "dot")) == 4


def test_an_hour_with_too_few_requests_has_a_dot_and_no_band() -> None:
    svg = drawn([Stretch([(NOW, found(0.5))])])
    assert len(of_class(svg, "few")) == 1
    assert not of_class(svg, "band")
    assert not of_class(svg, "dot")


def test_what_took_over_is_marked_between_the_two() -> None:
    svg = drawn([Stretch(hours(0.5)), Stretch([]), Stretch(hours(0.6, start=NOW + 3 * HOUR_S))])
    (border,) = of_class(svg, "border")
    scale = Scale(NOW, NOW + 24 * HOUR_S, 0.0, 1.0)
    assert float(border.get("x1", "")) == pytest.approx(scale.x(NOW + 2 * HOUR_S), abs=0.05)


def test_it_says_in_words_what_it_draws() -> None:
    label = parse(drawn([Stretch(hours(0.5, 0.25), baseline=0.75)], even=0.4)).get("aria-label") or ""
    assert label.startswith("Hit rate. 2 hours with data; the last, ")
    assert label.endswith(": 0.250, limits 0.150 to 0.350, baseline 0.750, break-even 0.400.")
    assert parse(drawn([])).get("aria-label") == "Hit rate. Not enough data."


def test_names_of_periods_are_escaped() -> None:
    svg = drawn([], periods=[Period(NOW, None, "<script>&\"'")])
    (period,) = of_class(svg, "period")
    (title,) = period
    assert title.text == "<script>&\"'"
    assert float(period.get("width", "")) == pytest.approx(WIDTH - RIGHT - LEFT)


numbers = st.floats(-3.0, 9.0)


@given(
    st.lists(st.tuples(st.integers(-40, 60), st.one_of(st.none(), numbers), numbers, numbers), max_size=30),
    st.integers(1, 400),
    st.sampled_from([1.0, 2.0, 4.0, 33.0]),
)
def test_everything_stays_inside_whatever_is_drawn(
    points: list[tuple[int, float | None, float, float]], span: int, high: float
) -> None:
    known = [
        (NOW + at * HOUR_S, found(value, *sorted((a, b)))) for at, value, a, b in sorted(points, key=lambda p: p[0])
    ]
    stretch = Stretch(known, baseline=9.0, floor=-9.0)
    period = Period(NOW - 1e7, NOW + 1e9, "x")
    until = NOW + span * HOUR_S
    for svg in (
        over_time("x", [stretch], since=NOW, until=until, high=high, even=77.0, periods=[period]),
        spark(stretch, since=NOW, until=until, high=high),
    ):
        root = parse(svg)
        width, height = (float(part) for part in (root.get("viewBox") or "").split()[2:])
        for one in root.iter():
            for name, most in (("x1", width), ("x2", width), ("cx", width), ("y1", height), ("y2", height)):
                place = float(one.get(name, "0"))
                assert math.isfinite(place)
                assert 0.0 <= place <= most
            places = [float(number) for number in re.findall(r"-?[\d.]+", one.get("d", ""))]
            assert all(0.0 <= place <= width for place in places)
    assert height < HEIGHT
