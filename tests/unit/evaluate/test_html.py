"""The page: whole in itself, escaped, with every section; the browser's view of it is tested end to end."""

from __future__ import annotations

import re

import numpy as np

from driftwatch.evaluate.baseline import Conditions
from driftwatch.evaluate.candidate import Draft
from driftwatch.evaluate.html import page
from driftwatch.evaluate.report import report

from .conftest import costs, judged, request


def test_it_needs_nothing_else_and_escapes_what_it_is_told(rng: np.random.Generator) -> None:
    evil = "tenant=<script>alert(1)</script>"
    requests = judged(rng, 0.7, 30, evil, draft="<b>d")
    found = report(requests, [Draft("<b>d", "trained", costs())], costs(), Conditions(3, per_gpu_hour=2.0))
    text = page(found)
    assert "<script" not in text
    assert "<b>d" not in text
    assert not re.search(r"(?:src|href)=|url\(|https?://|@import", text)
    for title in ("1. The target alone", "2. Acceptance", "3. Time with speculation", "4. Cost"):
        assert text.count(f"<h3>{title}</h3>") == 2
    assert text == page(found)


def test_it_can_be_made_of_almost_nothing() -> None:
    text = page(report([request()], [], None, Conditions(3)))
    assert "not enough data" in text
    assert "<svg" not in text


def test_limits_are_set_apart(rng: np.random.Generator) -> None:
    found = report(judged(rng, 0.7, 30), [Draft("d", "trained", costs())], costs(), Conditions(3))
    assert re.search(r"<td>\d\.\d\d <small>\d\.\d\d to \d\.\d\d</small></td>", page(found))
