"""Hours as the page draws them, and which of them are recent."""

from __future__ import annotations

import numpy as np
import pytest

from driftwatch.acceptance import Weights, tally
from driftwatch.control import reports
from driftwatch.control.page import hours
from driftwatch.drift.sums import Figure, Sums
from driftwatch.store.schema import Cell

FIGURES: list[Figure] = ["hit_rate", "acceptance_rate", "acceptance_length"]


@pytest.mark.parametrize(
    ("metric", "known"), [("hit_rate", FIGURES), ("acceptance_rate", FIGURES[1:]), ("acceptance_length", FIGURES[2:])]
)
def test_an_hour_has_the_figures_that_its_cell_knows(metric: str, known: list[Figure]) -> None:
    sums = Sums.request(tally(Weights(np.array([[1.0], [0.0], [1.0], [1.0]])), 1))
    hour = hours.of(Cell(metric=metric, gamma=1), 480_000, sums, FIGURES)
    assert (hour.start_s, hour.requests) == (480_000 * 3600.0, 1)
    assert list(hour.figures) == known
    for name in known:
        assert hour.figures[name] == sums.interval(name, 1)


def test_recent_are_24_hours_with_the_present_one() -> None:
    now = 480_000 * 3600.0
    assert reports.since(now) == reports.since(now + 3599.0) == 480_000 - 23
    assert reports.since(now + 3600.0) == 480_000 - 22
