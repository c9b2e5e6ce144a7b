"""The report as one page that needs nothing else: style and plots are inside, every plot's figures are in a table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from driftwatch.economics.range import Range
from driftwatch.economics.tail import QUANTILES
from driftwatch.economics.value import Value, speedup
from driftwatch.evaluate.candidate import Kind
from driftwatch.evaluate.plots import Series, bars, lines
from driftwatch.evaluate.report import Report, Segment
from driftwatch.evaluate.tables import sections
from driftwatch.evaluate.words import conditions, costs, decision, number

MARKS: Mapping[Kind, int] = {"trained": 0, "ngram": 1, "lookahead": 2}
LABELS: Mapping[Kind, str] = {"trained": "the draft", "ngram": "n-gram", "lookahead": "lookahead"}
CELL = re.compile(r"(.*?) \((.*)\)(\**)")
BATCHES = 25
"""Points of the curve over batches."""


def page(report: Report) -> str:
    """The whole page; deterministic, so that two runs on the same data give the same bytes."""
    environment = Environment(
        loader=PackageLoader("driftwatch.evaluate"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["cell"] = _cell
    shown = [
        {"segment": one, "decision": decision(one.verdict), "sections": sections(one), "plots": plots(one)}
        for one in report.segments
    ]
    words = {"conditions": conditions(report), "costs": costs(report)}
    return environment.get_template("report.html").render(report=report, shown=shown, **words)


def _cell(text: str) -> Markup:
    """``value (low to high)``: the limits are set smaller."""
    parts = CELL.fullmatch(text)
    return Markup("{0}{2} <small>{1}</small>").format(*parts.groups()) if parts else escape(text)


def plots(segment: Segment) -> list[tuple[str, Markup, list[tuple[str, int]]]]:
    """Title, drawing and legend (name, mark) of each plot that there are figures for."""
    found = [_by_gamma(segment), _by_batch(segment), _percentiles(segment)]
    return [one for one in found if one is not None and one[1]]


def _by_gamma(segment: Segment) -> tuple[str, Markup, list[tuple[str, int]]] | None:
    series = [
        Series(LABELS[one.draft.kind], [(value.gamma, value.judged) for value in one.values], MARKS[one.draft.kind])
        for one in segment.candidates
        if one.values
    ]
    title = "Speedup of decoding by proposal length"
    best = [f"{one.draft.name} at best {number(top)}" for one in segment.candidates if (top := _top(one.values))]
    drawn = lines(title, "; ".join(best), series, x="proposal length (gamma)", y="times as fast", reference=1.0)
    return title, drawn, [(one.name, one.mark) for one in series]


def _by_batch(segment: Segment) -> tuple[str, Markup, list[tuple[str, int]]] | None:
    subject = segment.subject
    if subject is None or subject.shown is None or subject.draft.profile is None:
        return None
    value, profile = subject.shown, subject.draft.profile
    low, high = profile.batches or (1.0, 64.0)
    if high <= low:
        return None
    points = []
    for batch in np.geomspace(low, high, BATCHES):
        window = profile.cost(float(batch), value.proposals, value.cost.context).window
        length = value.length.value
        points.append((float(batch), Range(None if length is None else speedup(length, window, value.coverage))))
    title = f"Speedup by batch, gamma {value.gamma}"
    ends = f"{number(points[0][1].value)} at batch {low:g}, {number(points[-1][1].value)} at batch {high:g}"
    mark, name = MARKS[subject.draft.kind], LABELS[subject.draft.kind]
    drawn = lines(
        title,
        ends,
        [Series(name, points, mark, dots=False)],
        x="running requests",
        y="times as fast",
        reference=1.0,
        here=value.cost.batch,
        doubling=True,
    )
    return title, drawn, [(name, mark)]


def _percentiles(segment: Segment) -> tuple[str, Markup, list[tuple[str, int]]] | None:
    wall = segment.wall
    if wall is None or not wall.plain:
        return None
    in_ms = {
        name: {q: found[q].map(lambda s: 1000.0 * s) for q in QUANTILES}
        for name, found in (("plain", wall.plain), ("speculative", wall.speculative))
    }
    groups = [(f"p{q * 100:g}", [(name, found[q]) for name, found in in_ms.items()]) for q in QUANTILES]
    title = f"Time per output token, {wall.source}"
    parts = (", ".join(f"{number(found[q].value)} ms {name}" for name, found in in_ms.items()) for q in QUANTILES)
    said = "; ".join(f"p{q * 100:g} {part}" for q, part in zip(QUANTILES, parts, strict=True))
    return title, bars(title, said, groups, unit="ms"), [("plain", 0), ("speculative", 1)]


def _top(values: Sequence[Value]) -> float | None:
    judged = [value.judged.value for value in values if value.judged.value is not None]
    return max(filter(math.isfinite, judged), default=None)
