"""The walk: the worked example, an explicit walk of an engine, and simulated speculative sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from driftwatch.acceptance import Tally, Weights, accepted_per_window, tally

WORKED = Weights(np.array([1, 1, 0, 1, 1, 1, 1, 0], float)[:, None])

bits = st.lists(st.booleans(), min_size=1, max_size=60)
gammas = st.integers(1, 8)


@pytest.mark.parametrize(
    ("gamma", "windows", "accepted", "rejected"),
    [(1, [1, 0, 1, 1, 0], 3, 2), (2, [2, 2, 1], 5, 1), (3, [2, 3, 0], 5, 2)],
)
def test_worked_example(gamma: int, windows: list[int], accepted: int, rejected: int) -> None:
    figures = tally(WORKED, 3).figures(gamma)
    assert accepted_per_window(WORKED, gamma) == windows
    assert (figures["accepted"], figures["rejected"]) == (accepted, rejected)
    assert figures["windows"] == figures["steps"] == len(windows)
    assert figures["drafted"] == gamma * len(windows)


def engine(weights: NDArray[np.float64], proposals: NDArray[np.int64], gamma: int) -> dict[str, float]:
    """An engine's loop over its own steps, token by token: the definition, written as plainly as can be."""
    tokens, i = len(weights), 0
    counts: dict[str, float] = dict.fromkeys(("steps", "windows", "drafted", "accepted", "rejected"), 0)
    while i < tokens:
        k = min(gamma, int(proposals[i]))
        counts["steps"] += 1
        counts["windows"] += k > 0
        counts["drafted"] += k
        accepted = 0
        while accepted < k and i + accepted < tokens:
            if not weights[i, accepted]:
                counts["rejected"] += 1
                break
            counts["accepted"] += 1
            accepted += 1
        i += accepted + 1
    return counts


@given(st.data(), bits, gammas)
def test_tally_is_the_engines_walk_where_weights_are_whole(data: st.DataObject, start: list[bool], gamma: int) -> None:
    """Weights and numbers of proposals depend on where the window starts, as those of n-gram drafts do."""
    tokens = len(start)
    values = np.array(
        [data.draw(st.lists(st.booleans(), min_size=gamma, max_size=gamma)) for _ in range(tokens)], float
    )
    proposals = np.array(data.draw(st.lists(st.integers(0, gamma), min_size=tokens, max_size=tokens)))
    weights = Weights(values, proposals)
    counted = tally(weights, gamma).figures(gamma)
    expected = engine(values, proposals, gamma)
    assert {key: counted[key] for key in expected} == expected
    assert sum(accepted_per_window(weights, gamma)) == expected["accepted"]
    assert len(accepted_per_window(weights, gamma)) == expected["windows"]


@given(bits, gammas)
def test_depth_free_weights_are_their_column_shifted(hits: list[bool], gamma: int) -> None:
    values = np.array(hits, float)[:, None]
    shifted = np.array([[hits[i + d] if i + d < len(hits) else 0.0 for d in range(gamma)] for i in range(len(hits))])
    assert_same(tally(Weights(values), gamma), tally(Weights(shifted), gamma))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), gammas)
def test_every_token_is_emitted_once(values: list[float], gamma: int) -> None:
    """Expected tokens: each step emits its accepted ones and one more, the last step perhaps cut short."""
    counts = tally(Weights(np.array(values)[:, None]), gamma)
    for i in range(gamma):
        emitted = counts.accepted[i] + counts.steps[i]
        assert len(values) - 1e-9 <= emitted <= len(values) + 1 + 1e-9
        assert counts.tested[i] <= counts.drafted[i] + 1e-9
        assert counts.rejected[i] <= counts.windows[i] + 1e-9


@pytest.mark.parametrize("rule", ["argmax", "rejection"])
def test_tally_is_the_expectation_of_speculative_sampling(rule: str) -> None:
    """Real draft-and-verify decoding of a first-order chain over 6 tokens, against the replay of what it emitted."""
    rng = np.random.default_rng(7)
    target = rng.dirichlet(np.full(6, 0.8), size=6)
    draft = 0.6 * target + 0.4 * rng.dirichlet(np.full(6, 0.8), size=6)
    proposal = np.eye(6)[draft.argmax(axis=1)] if rule == "argmax" else draft
    for gamma in (1, 3, 8):
        emitted, windows, accepted_at = decode(target, proposal, gamma, 20_000, rng)
        previous, token = np.array(emitted[:-1]), np.array(emitted[1:])
        weights = np.minimum(1.0, proposal[previous, token] / target[previous, token])
        replayed = tally(Weights(weights[:, None]), gamma)
        noise = 4 * math.sqrt(windows)
        assert replayed.windows[gamma - 1] == pytest.approx(windows, abs=noise)
        for d in range(gamma):
            assert replayed.accepted_at[gamma - 1, d] == pytest.approx(accepted_at[d], abs=noise)


def decode(
    target: NDArray[np.float64], proposal: NDArray[np.float64], gamma: int, tokens: int, rng: np.random.Generator
) -> tuple[list[int], int, NDArray[np.float64]]:
    """Speculative sampling as Leviathan et al. define it; a one-hot proposal makes it the argmax rule."""
    emitted, windows, accepted_at = [0], 0, np.zeros(gamma)
    while len(emitted) < tokens:
        windows += 1
        previous = emitted[-1]
        for d in range(gamma):
            token = int(rng.choice(6, p=proposal[previous]))
            if rng.random() >= target[previous, token] / proposal[previous, token]:
                rest = np.maximum(target[previous] - proposal[previous], 0)
                emitted.append(int(rng.choice(6, p=rest / rest.sum())))
                break
            accepted_at[d] += 1
            emitted.append(token)
            previous = token
        else:
            emitted.append(int(rng.choice(6, p=target[previous])))
    return emitted, windows, accepted_at


@given(st.integers(0, 10_000), st.integers(1, 60), gammas, st.booleans())
def test_weights_of_one_walk_are_that_walk_and_nothing_else(seed: int, tokens: int, gamma: int, runs_out: bool) -> None:
    """Counts of their one gamma as if every start were known, none of another, whatever the other rows hold."""
    rng = np.random.default_rng(seed)
    values = (rng.random((tokens, gamma)) < 0.6).astype(float)
    proposals = rng.integers(0, gamma + 1, tokens) if runs_out else None
    known = Weights(values, proposals)
    one = Weights(values.copy(), proposals, walked=True)
    visited = ~np.isnan(one.by_start(gamma)[:, 0])
    if proposals is None:
        assert visited.sum() == len(accepted_per_window(known, gamma))
        one.values[~visited] = 1 - one.values[~visited]
    encoding, data = one.encode()
    assert encoding == "walk"
    stored = None if proposals is None else proposals.astype("<i2").tobytes()
    for walked in (one, Weights.decode(encoding, data, tokens=tokens, depths=gamma, proposals=stored)):
        assert walked.walked
        found, expected = tally(walked, gamma + 2), tally(known, gamma)
        assert found.replayed == [gamma]
        assert found.figures(gamma) == expected.figures(gamma)
        assert (found.requests, found.tokens) == (1, tokens)
        assert accepted_per_window(walked, gamma) == accepted_per_window(known, gamma)


def test_weights_of_one_walk_give_no_other_gamma() -> None:
    weights = Weights(np.ones((4, 3)), walked=True)
    with pytest.raises(ValueError, match="hold for gamma 3 alone"):
        weights.by_start(2)
    assert tally(weights, 2).replayed == []
    assert tally(weights, 2).figures(2)["acceptance_length"] is None
    visited = Weights(np.ones((4, 1)), walked=True).by_start(1)[:, 0]
    np.testing.assert_array_equal(visited, [1.0, np.nan, 1.0, np.nan])


@given(bits, gammas)
def test_encoding_keeps_whole_weights_to_the_bit(hits: list[bool], gamma: int) -> None:
    weights = Weights(np.array(hits, float)[:, None])
    encoding, data = weights.encode()
    assert encoding == "bits"
    assert len(data) == (len(hits) + 7) // 8
    assert_same(tally(Weights.decode(encoding, data, tokens=len(hits), depths=1), gamma), tally(weights, gamma))


def test_encoding_keeps_fractions_as_half_floats_and_numbers_of_proposals() -> None:
    weights = Weights(np.array([[0.25, 0.5], [1.0, 0.0], [0.125, 0.75]]), np.array([2, 0, 1]))
    encoding, data = weights.encode()
    assert encoding == "f16"
    decoded = Weights.decode(encoding, data, tokens=3, depths=2, proposals=np.array([2, 0, 1], "<i2").tobytes())
    assert_same(tally(decoded, 2), tally(weights, 2))


def test_tallies_add_up_and_an_empty_ratio_is_no_number() -> None:
    twice = tally(WORKED, 4) + tally(WORKED, 4)
    assert twice.requests == 2
    assert twice.figures(3)["accepted"] == 2 * tally(WORKED, 4).figures(3)["accepted"]
    assert Tally.zero(2).figures(1)["hit_rate"] is None


def test_more_depths_than_were_replayed_is_an_error() -> None:
    with pytest.raises(ValueError, match="only 2 depths"):
        tally(Weights(np.ones((3, 2)), np.array([2, 2, 2])), 3)


def assert_same(left: Tally, right: Tally) -> None:
    for name in ("steps", "windows", "drafted", "accepted_at", "rejected"):
        np.testing.assert_allclose(getattr(left, name), getattr(right, name), atol=1e-9)
