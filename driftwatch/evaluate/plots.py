"""Plots as SVG text: no script, no fonts, no addresses; colours come from the page, so that they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from driftwatch.economics.range import Range

WIDTH, HEIGHT = 400, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 16, 44
APART = 4.0
"""Between series at the same place, so that no whisker hides another."""


@dataclass(frozen=True)
class Series:
    """Points with their limits; ``mark`` picks colour and shape, 0 to 2."""

    name: str
    points: Sequence[tuple[float, Range]]
    mark: int = 0
    dots: bool = True
    """Whether the points are shown, or only the line through them."""


@dataclass(frozen=True)
class Axis:
    """A range of values and where it is drawn."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        put: Callable[[float], float] = math.log if self.logarithmic else float
        share = (put(value) - put(self.low)) / (put(self.high) - put(self.low))
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the range."""
        if self.logarithmic:
            return [2.0**k for k in range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)]
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def lines(
    title: str,
    described: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    reference: float,
    here: float | None = None,
    doubling: bool = False,
) -> Markup:
    """Values over a number, with whiskers; a dashed line at ``reference``, a dotted one at ``here`` on the x axis.

    Nothing where no series has two points or a single one to show.
    """
    found = [(at, limits) for one in series for at, limits in one.points if limits.value is not None]
    if not found:
        return Markup("")
    places = [at for at, _ in found]
    values = [v for _, r in found for v in (r.value, r.lower, r.upper) if v is not None and math.isfinite(v)]
    if not values:
        return Markup("")
    low, high = min([*values, reference]), max([*values, reference])
    pad = 0.06 * (high - low or 1.0)
    spread = (min(places), max(places)) if max(places) > min(places) else (min(places) / 2, max(places) * 2)
    across = Axis(*spread, LEFT + 12, WIDTH - RIGHT - 12, doubling)
    up = Axis(max(0.0, low - pad), high + pad, HEIGHT - BOTTOM, TOP)
    parts = [_grid(across, up, sorted(set(places)), doubling), _labels(x, y)]
    parts.append(
        f'<line class="even" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(reference):.1f}" y2="{up(reference):.1f}"/>'
    )
    if here is not None and spread[0] <= here <= spread[1]:
        parts.append(
            f'<line class="here" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="{across(here):.1f}" x2="{across(here):.1f}"/>'
        )
    for place, one in enumerate(series):
        parts += _series(one, across, up, APART * (place - (len(series) - 1) / 2.0))
    return _figure(title, described, "".join(parts), HEIGHT)


def bars(title: str, described: str, groups: Sequence[tuple[str, Sequence[tuple[str, Range]]]], *, unit: str) -> Markup:
    """Horizontal bars with whiskers, in groups; the bars of a group are coloured in order."""
    found = [limits for _, rows in groups for _, limits in rows if limits.value is not None]
    if not found:
        return Markup("")
    most = max(v for r in found for v in (r.value, r.upper) if v is not None)
    height = TOP + BOTTOM + sum(16 + 20 * len(rows) for _, rows in groups)
    across = Axis(0.0, most * 1.05 or 1.0, LEFT, WIDTH - RIGHT)
    parts = [
        f'<line class="grid" x1="{across(t):.1f}" x2="{across(t):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
        f'<text class="tick" x="{across(t):.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{t:g}</text>'
        for t in across.ticks()
    ]
    parts.append(f'<text class="label" x="{WIDTH - RIGHT}" y="{height - 8}" text-anchor="end">{escape(unit)}</text>')
    at = float(TOP)
    for name, rows in groups:
        middle = at + 10 * len(rows) + 5
        parts.append(f'<text class="label" x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>')
        for mark, (label, limits) in enumerate(rows):
            if limits.value is not None:
                parts.append(
                    f'<rect class="fill m{mark}" x="{LEFT}" y="{at:.1f}" height="15" rx="2" '
                    f'width="{max(across(limits.value) - LEFT, 1):.1f}"><title>{escape(label)}</title></rect>'
                )
                parts += _whisker(across, limits, at + 7.5)
            at += 20
        at += 16
    return _figure(title, described, "".join(parts), height)


def _whisker(across: Axis, limits: Range, y: float) -> Iterator[str]:
    if limits.lower is not None and limits.upper is not None:
        x1, x2 = across(limits.lower), across(limits.upper)
        yield f'<path class="limits" d="M{x1:.1f} {y - 4:.1f}v8M{x1:.1f} {y:.1f}H{x2:.1f}M{x2:.1f} {y - 4:.1f}v8"/>'


def _series(one: Series, across: Axis, up: Axis, shift: float) -> Iterator[str]:
    known = [(across(at) + shift, r) for at, r in one.points if r.value is not None and math.isfinite(r.value)]
    if len(known) > 1:
        path = "L".join(f"{px:.1f} {up(r.value or 0.0):.1f}" for px, r in known)
        yield f'<path class="line m{one.mark}" d="M{path}"/>'
    for px, r in known if one.dots else ():
        if r.lower is not None and r.upper is not None and math.isfinite(r.upper):
            yield f'<path class="whisker m{one.mark}" d="M{px:.1f} {up(r.lower):.1f}V{up(r.upper):.1f}"/>'
        yield _mark(one, px, up(r.value or 0.0), f"{one.name}: {r.value:.2f}")


def _mark(one: Series, x: float, y: float, said: str) -> str:
    inner = f"<title>{escape(said)}</title>"
    if one.mark == 0:
        return f'<circle class="fill m0" cx="{x:.1f}" cy="{y:.1f}" r="4">{inner}</circle>'
    if one.mark == 1:
        return f'<rect class="fill m1" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7">{inner}</rect>'
    return f'<path class="fill m2" d="M{x:.1f} {y - 5:.1f}l5 9h-10z">{inner}</path>'


def _grid(across: Axis, up: Axis, places: Sequence[float], doubling: bool) -> str:
    rows = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(t):.1f}" y2="{up(t):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{up(t) + 4:.1f}" text-anchor="end">{t:g}</text>'
        for t in up.ticks()
    ]
    shown = across.ticks() if doubling or len(places) > 12 else places
    columns = [
        f'<text class="tick" x="{across(t):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{t:g}</text>'
        for t in shown
    ]
    return "".join([*rows, *columns])


def _labels(x: str, y: str) -> str:
    return (
        f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(x)}</text>'
        f'<text class="label" x="4" y="11">{escape(y)}</text>'
    )


def _figure(title: str, described: str, inner: str, height: float) -> Markup:
    return Markup(
        f'<svg role="img" viewBox="0 0 {WIDTH} {height:g}" aria-label="{escape(title)}. {escape(described)}">'
        f"{inner}</svg>"
    )
