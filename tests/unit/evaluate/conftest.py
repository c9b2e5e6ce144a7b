"""Requests whose acceptance and times are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from driftwatch.acceptance import Tally, Weights, tally
from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.step import StepTime
from driftwatch.evaluate.request import Request

GAMMA = 6


def costs(c: float = 0.1, plain: float = 0.02, slope: float = 0.0) -> CostProfile:
    """A step of 20 ms; with slope 0 verification is free at every batch."""
    return CostProfile.entered(Bound("GPU", "bf16", ""), StepTime(plain, slope)).with_draft(c)


def hits(rng: np.random.Generator, rate: float, tokens: int = 100) -> Tally:
    """A request whose every token the draft would have proposed with probability ``rate``."""
    return tally(Weights((rng.random((tokens, 1)) < rate).astype(float)), GAMMA)


def request(id: str = "r", segment: str = "all", tokens: int = 100, **fields: Any) -> Request:
    return Request(id, segment, tokens, fields.pop("context", 50.0), **fields)


def judged(rng: np.random.Generator, rate: float, count: int, segment: str = "all", draft: str = "d") -> list[Request]:
    return [request(f"{segment}{i}", segment, tallies={draft: hits(rng, rate)}) for i in range(count)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
