"""Figures over time as SVG text: no script, fonts or addresses; colours are classes, so that they follow the theme."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from markupsafe import Markup, escape

from driftwatch.control.page.hours import HOUR_S
from driftwatch.control.page.words import number
from driftwatch.drift.interval import Estimate

WIDTH, HEIGHT = 480, 216
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 26
SPARK_WIDTH, SPARK_HEIGHT = 140, 38
STEPS_S = tuple(HOUR_S * hours for hours in (1, 2, 3, 6, 12, 24, 48, 96))
LABELS = 6
DOTS = 48


@dataclass(frozen=True)
class Stretch:
    """Hours of one cell, with the level that was normal in it and the one at which it alarms, as far as known."""

    points: Sequence[tuple[float, Estimate]]
    """Start of each hour, and what was found in it."""
    baseline: float | None = None
    floor: float | None = None


@dataclass(frozen=True)
class Period:
    """When an event was open; without an end it still is."""

    start_s: float
    end_s: float | None
    name: str


@dataclass(frozen=True)
class Scale:
    """Where times and values are drawn."""

    since: float
    until: float
    low: float
    high: float
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM

    def x(self, at: float) -> float:
        share = (at - self.since) / (self.until - self.since)
        return self.left + min(max(share, 0.0), 1.0) * (self.right - self.left)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.bottom - min(max(share, 0.0), 1.0) * (self.bottom - self.top)


def over_time(
    title: str,
    stretches: Sequence[Stretch],
    *,
    since: float,
    until: float,
    high: float,
    low: float = 0.0,
    even: float | None = None,
    periods: Sequence[Period] = (),
) -> Markup:
    """Hours with their 95% band, over the whole range that the figure can have; a dashed line at ``even``."""
    scale = Scale(since, until, low, high)
    parts = [*_grid(scale), *(_period(scale, one) for one in periods)]
    for earlier, later in pairwise(one for one in stretches if one.points):
        parts.append(_border(scale, (earlier.points[-1][0] + HOUR_S + later.points[0][0]) / 2.0))
    for one in stretches:
        parts += _band(scale, one)
        ends = (one.points[0][0], one.points[-1][0] + HOUR_S) if one.points else None
        for level, name in ((one.baseline, "baseline"), (one.floor, "floor")):
            if level is not None and ends is not None:
                parts.append(_level(scale, level, name, *ends))
        parts += _line(scale, one)
    if even is not None:
        parts.append(_level(scale, even, "even", since, until))
    said = escape(f"{title}. {_said(stretches, even)}")
    return Markup(
        f'<svg class="plot" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" aria-label="{said}">{"".join(parts)}</svg>'
    )


def spark(stretch: Stretch, *, since: float, until: float, high: float, low: float = 0.0) -> Markup:
    """The same in the height of a line of text; hidden from readers of text, since the figures stand beside it."""
    scale = Scale(since, until, low, high, 2, SPARK_WIDTH - 2, 3, SPARK_HEIGHT - 3)
    level = [] if stretch.baseline is None else [_level(scale, stretch.baseline, "baseline", since, until)]
    parts = "".join([*level, *_band(scale, stretch), *_line(scale, stretch, 1)])
    return Markup(f'<svg class="spark" aria-hidden="true" viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}">{parts}</svg>')


def _said(stretches: Sequence[Stretch], even: float | None) -> str:
    found = [(at, one) for stretch in stretches for at, one in stretch.points if one.value is not None]
    if not found:
        return "Not enough data."
    at, last = found[-1]
    parts = [f"{len(found)} hours with data; the last, {_clock(at)} UTC: {number(last.value)}"]
    if last.lower is not None:
        parts.append(f"limits {number(last.lower)} to {number(last.upper)}")
    if stretches[-1].baseline is not None:
        parts.append(f"baseline {number(stretches[-1].baseline)}")
    if even is not None:
        parts.append(f"break-even {number(even)}")
    return ", ".join(parts) + "."


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%d %b %H:%M")


def _grid(scale: Scale) -> Iterator[str]:
    span = scale.high - scale.low
    step = 0.25 if span <= 1.0 else float(math.ceil(span / LABELS))
    for i in range(math.floor(span / step) + 1):
        value = scale.low + i * step
        y = scale.y(value)
        yield f'<line class="grid" x1="{scale.left}" x2="{scale.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{scale.left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    apart = next((s for s in STEPS_S if (scale.until - scale.since) / s <= LABELS), STEPS_S[-1])
    at = math.ceil(scale.since / apart) * apart
    while at <= scale.until:
        x = scale.x(at)
        moment = datetime.fromtimestamp(at, UTC)
        label = moment.strftime("%d %b") if apart >= 24 * HOUR_S or moment.hour == 0 else moment.strftime("%H:%M")
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{scale.bottom}" y2="{scale.bottom + 4}"/>'
        if scale.left + 14 <= x <= scale.right - 14:
            yield f'<text x="{x:.1f}" y="{scale.bottom + 18}" text-anchor="middle">{label}</text>'
        at += apart


def _period(scale: Scale, one: Period) -> str:
    start = scale.x(one.start_s)
    width = max(scale.x(scale.until if one.end_s is None else one.end_s) - start, 1.5)
    return (
        f'<rect class="period" x="{start:.1f}" y="{scale.top}" width="{width:.1f}" '
        f'height="{scale.bottom - scale.top}"><title>{escape(one.name)}</title></rect>'
    )


def _border(scale: Scale, at: float) -> str:
    """Where another deployment, or other weights, took over."""
    x = scale.x(at)
    return f'<line class="border" x1="{x:.1f}" x2="{x:.1f}" y1="{scale.top}" y2="{scale.bottom}"/>'


def _level(scale: Scale, value: float, name: str, start: float, end: float) -> str:
    x1, x2, y = scale.x(start), scale.x(end), scale.y(value)
    return f'<line class="{name}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _runs(one: Stretch) -> Iterator[list[tuple[float, Estimate]]]:
    """Hours that follow each other: nothing is drawn across an hour without data."""
    run: list[tuple[float, Estimate]] = []
    for at, found in one.points:
        if found.value is None:
            continue
        if run and at - run[-1][0] > HOUR_S:
            yield run
            run = []
        run.append((at, found))
    if run:
        yield run


def _band(scale: Scale, one: Stretch) -> Iterator[str]:
    """Each hour as wide as it is, so that a single one is seen too."""
    parts = [
        f"M{scale.x(at):.1f} {scale.y(found.upper):.1f}H{scale.x(at + HOUR_S):.1f}V{scale.y(found.lower):.1f}"
        f"H{scale.x(at):.1f}Z"
        for at, found in one.points
        if found.lower is not None and found.upper is not None
    ]
    if parts:
        yield f'<path class="band" d="{"".join(parts)}"/>'


def _line(scale: Scale, one: Stretch, dots: int = DOTS) -> Iterator[str]:
    """A line through hours that follow each other; dots on all of them, or where there are many on the last."""
    middle = HOUR_S / 2.0
    for run in _runs(one):
        places = [(scale.x(at + middle), scale.y(found.value or 0.0), found) for at, found in run]
        if len(places) > 1:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in places)
            yield f'<path class="line" d="M{path}"/>'
        for x, y, found in places if len(places) <= dots else places[-1:]:
            yield f'<circle class="{"dot" if found.lower is not None else "few"}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>'
