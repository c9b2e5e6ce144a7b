"""Simulated cells whose truth is known, and profiles of plausible devices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from driftwatch.acceptance import Tally
from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.step import StepTime

repeatable = settings(derandomize=True, deadline=None)
"""The same examples at every run; a time limit an example would fail on a busy machine."""

BOUND = Bound("GPU-A", "bfloat16", "target-1", "draft-1")


def entered(c: float = 0.1, plain: float = 0.02, slope: float = 0.0) -> CostProfile:
    """A draft of ``c`` plain steps; with slope 0 verification is free at every batch (v = 1)."""
    return CostProfile.entered(BOUND, StepTime(plain, slope)).with_draft(c)


def profiles() -> st.SearchStrategy[CostProfile]:
    def times(low: float, high: float) -> st.SearchStrategy[float]:
        return st.floats(low, high, allow_nan=False)

    target = st.builds(
        StepTime,
        floor=times(1e-3, 0.1),
        slope=st.just(0.0) | times(1e-6, 1e-3),
        roof=st.just(0.0) | times(1e-6, 1e-3),
        knee=times(1.0, 300.0),
        extra=st.just(0.0) | times(1e-5, 1e-2),
        context=st.just(0.0) | times(1e-9, 1e-6),
        stairs=st.just(())
        | st.tuples(*(st.tuples(st.just(gamma), times(0.0, 1e-2)) for gamma in (1.0, 3.0, 5.0, 8.0))),
    )
    draft = st.builds(StepTime, floor=times(1e-6, 0.02), slope=st.just(0.0) | times(1e-7, 1e-4))
    return st.builds(CostProfile.entered, st.just(BOUND), target, draft)


def tallies(rng: np.random.Generator, rates: NDArray[np.float64], windows: int, gamma: int) -> list[Tally]:
    """One tally a request: ``windows`` windows of independent hits at the request's own rate, every gamma up to G.

    The first g depths of a window of gamma proposals are what a window of g would have been, so all gammas share luck.
    """
    hits = rng.random((len(rates), windows, gamma)) < rates[:, None, None]
    run = np.cumprod(hits, axis=2).sum(axis=2)  # accepted of gamma
    found = []
    for row in run:
        cut = np.minimum(row[None, :], np.arange(1, gamma + 1)[:, None])  # [G, windows]
        at = np.array([[(cut[g] > d).sum() if d <= g else 0 for d in range(gamma)] for g in range(gamma)], dtype=float)
        full = np.full(gamma, float(windows))
        missed = (cut < np.arange(1, gamma + 1)[:, None]).sum(axis=1).astype(float)
        found.append(Tally(1, windows, full, full, full * np.arange(1, gamma + 1), at, missed))
    return found


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240611)
