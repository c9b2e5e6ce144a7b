"""Sampling settings against their plain definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from driftwatch.shadow.warp import Sampling, warped_logprob


def warped(logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float) -> NDArray[np.float64]:
    """The distribution that vLLM samples from: temperature, then top-k, then top-p; one row."""
    scaled = logits / temperature
    if 0 < top_k < len(scaled):
        scaled = np.where(scaled >= np.sort(scaled)[-top_k], scaled, -np.inf)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    ascending = np.argsort(p, kind="stable")
    removed = np.cumsum(p[ascending]) <= 1 - top_p
    removed[-1] = False
    p[ascending[removed]] = 0
    found: NDArray[np.float64] = p / p.sum()
    return found


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 100_000),
    temperature=st.floats(0.2, 2.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
)
def test_every_served_token(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(seed).normal(size=10) * 2
    expected = warped(logits, temperature, top_k, top_p)
    rows = torch.tensor(logits)[None].repeat(10, 1)
    sampling = Sampling.of([(temperature, top_p, top_k)], [10])
    found = warped_logprob(rows, torch.arange(10), sampling).exp().numpy()
    possible = expected > 0
    np.testing.assert_allclose(found[possible], expected[possible], rtol=1e-4)


def test_a_token_outside_what_was_kept_has_the_probability_it_would_have_had_inside() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    inside = torch.softmax(logits, -1)[0]
    sampling = Sampling.of([(1.0, 0.6, None)], [1])
    found = warped_logprob(logits, torch.tensor([3]), sampling).exp()
    assert float(found) == pytest.approx(float(inside[3] / inside[:1].sum()), rel=1e-5)


def test_unknown_truncation_is_none() -> None:
    sampling = Sampling.of([(0.7, None, None), (0.0, 0.0, -1)], [2, 1])
    assert sampling.top_p.tolist() == [1.0, 1.0, 1.0]
    assert sampling.top_k.tolist() == [0, 0, 0]
    assert sampling.greedy.tolist() == [False, False, True]
    assert sampling.divisor[2] == 1.0
