"""Chains, blocks and trees: the same costs of a pass, and other windows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.economics.load import at_rate
from driftwatch.economics.profile import CostProfile
from driftwatch.economics.range import Range
from driftwatch.economics.shape import CHAIN, Shape, split_draft
from driftwatch.economics.sizing import flip_batch, room
from driftwatch.economics.step import StepTime
from driftwatch.economics.value import Value, best, speedup

from .conftest import BOUND, profiles, repeatable

BLOCK, TREE = Shape("block"), Shape("tree", 5, 4, 8)
shapes = st.sampled_from([CHAIN, BLOCK, TREE])
PROFILE = CostProfile.entered(BOUND, StepTime(0.018, 0.002), StepTime(0.002))
"""A plain step of 20 ms, 2 ms more for each token that is verified, a draft's pass of 2 ms: c = .1."""


def shaped(shape: Shape, profile: CostProfile = PROFILE) -> CostProfile:
    return replace(profile, shape=shape)


def test_by_hand() -> None:
    """Four proposals: a chain takes four passes, 4 * .1 + 1.4; a block one, .1 + 1.4. A tree of five levels takes five
    and verifies seven nodes beside the root, 5 * .1 + 1.7."""
    assert shaped(CHAIN).cost(1, 4).window == pytest.approx(4 * 0.1 + 1.4)
    assert shaped(BLOCK).cost(1, 4).window == pytest.approx(0.1 + 1.4)
    assert shaped(TREE).cost(1, 5).window == pytest.approx(5 * 0.1 + 1.7)
    told = Value(5, Range(3.0), shaped(TREE).cost(1, 5)).to_json()
    assert (told["draft_passes"], told["break_even_acceptance_length"]) == (5.0, pytest.approx(2.2))
    assert told["costs"] == "entered, priced as a tree of steps=5,topk=4,tokens=8"


@repeatable
@given(profiles(), st.floats(1.0, 500.0), st.integers(1, 8))
def test_a_blocks_draft_costs_the_same_at_every_length(profile: CostProfile, batch: float, gamma: int) -> None:
    block, chain = shaped(BLOCK, profile), shaped(CHAIN, profile)
    assert block.cost(batch, gamma).window - block.cost(batch, gamma).verify == pytest.approx(
        block.cost(batch, 1).draft
    )
    assert block.cost(batch, gamma).window <= chain.cost(batch, gamma).window * (1 + 1e-12)
    cost = chain.cost(batch, gamma)
    assert cost.window == pytest.approx(gamma * cost.draft + cost.verify)
    assert block.window_s(batch, gamma) == pytest.approx(block.cost(batch, gamma).window_s)


@repeatable
@given(profiles(), shapes, st.floats(1.0, 500.0), st.floats(1.0, 3.0))
def test_laws_that_every_shape_keeps(profile: CostProfile, shape: Shape, batch: float, factor: float) -> None:
    """Break-even is where the speedup is 1, at equal batch and at equal arrival rate; more cost never raises it."""
    mine = shaped(shape, profile)
    window = mine.cost(batch, 5).window
    assert speedup(window, window) == 1.0
    dearer = replace(mine, draft=mine.drafting.scaled(factor))
    assert dearer.cost(batch, 5).window >= window * (1 - 1e-12)
    # The rate at which plain decoding settles at this batch: Little's law, backwards.
    if batch > 1.0:
        rate = (batch - 1.0) / (100.0 * mine.plain_s(batch))
        load = at_rate(mine, Range(window), gamma=5, rate=rate, tokens=100.0)
        assert load.speedup.value == pytest.approx(1.0, rel=1e-6)


def test_the_best_length_of_a_block_is_longer_than_a_chains() -> None:
    """Each further proposal is accepted less often: a chain stops where it costs more than it gives, a block later."""
    lengths = [1.0 + sum(0.7**k for k in range(1, gamma + 1)) for gamma in range(1, 9)]

    def chosen(shape: Shape) -> int:
        profile = shaped(shape, CostProfile.entered(BOUND, StepTime(0.019, 0.001), StepTime(0.003)))
        values = [Value(g, Range(length), profile.cost(1, g)) for g, length in enumerate(lengths, 1)]
        top = best(values)
        assert top is not None
        assert top.speedup.value == max(value.speedup.value or 0.0 for value in values)
        return top.gamma

    assert chosen(CHAIN) < chosen(BLOCK)


def test_a_tree_has_one_length() -> None:
    assert [need.gamma for need in room(shaped(TREE), batch=1, prefill_share=0.0).needs] == [5]
    # t = max(20 ms, .1 ms n), eight tokens a sequence: free to B = 25. Length 2 against 5 * .1 + .04 B: at B = 37.5.
    profile = CostProfile.entered(BOUND, StepTime(roof=1e-4, knee=200.0)).with_draft(0.1)
    assert flip_batch(shaped(TREE, profile), 2.0, gamma=5, batch=1) == pytest.approx(37.5)


@pytest.mark.parametrize("shape", [CHAIN, BLOCK, TREE])
def test_shapes_are_written_as_they_are_read(shape: Shape) -> None:
    assert Shape.of(str(shape)) == shape
    assert CostProfile.from_json(shaped(shape).to_json()) == shaped(shape)
    assert shaped(shape).with_draft(0.1).shape == CHAIN


def test_profiles_of_before_shapes_are_chains() -> None:
    data = PROFILE.to_json()
    del data["shape"]
    assert CostProfile.from_json(data) == PROFILE


@pytest.mark.parametrize(
    "text",
    ["", "star", "steps=5", "steps=5,topk=4,tokens=x", "steps=0,topk=4,tokens=8", "steps=5,steps=6,topk=4,tokens=8"],
)
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write chain, block|at least 1"):
        Shape.of(text)


def test_the_tree_in_a_drafts_name() -> None:
    assert Shape.of_draft("/models/head:steps=5,topk=4,tokens=8") == TREE
    for other in ("/models/head", "ngram:min=1,max=3", "lookahead:window=5,ngram=3,guesses=5", ""):
        assert Shape.of_draft(other) is None
    for spec, parts in (
        ("/models/head: topk=4, steps=5,tokens=8", ("/models/head", " topk=4, steps=5,tokens=8")),
        ("C:/models/a=b", ("C:/models/a=b", "")),
        (":steps=5,topk=4,tokens=8", (":steps=5,topk=4,tokens=8", "")),
    ):
        assert split_draft(spec) == parts
