"""A cost profile from folders: what is measured, and what it is bound to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from driftwatch.economics.profile import CostProfile
from driftwatch.errors import DriftwatchError, ProfileError
from driftwatch.shadow.draft import hash_weights
from driftwatch.shadow.profile.bound import draft_hash, target_hash
from driftwatch.shadow.profile.run import LoopName, Shapes, profile
from tests.unit.shadow.conftest import CPU, DATA

TARGET, CHAIN, EAGLE3 = (DATA / "models" / name for name in ("target", "chain", "eagle3"))
SMALL = Shapes((1, 2), (8, 64), (1, 3))


def measured(draft: str | Path | None, loop: LoopName = "passes", shapes: Shapes = SMALL) -> CostProfile:
    named = None if draft is None else str(draft)
    return profile(TARGET, named, device=CPU, dtype=torch.float32, shapes=shapes, loop=loop, budget_s=0.0)


@pytest.mark.parametrize("draft", [CHAIN, EAGLE3])
def test_a_trained_draft(draft: Path) -> None:
    found = measured(draft)
    assert (found.bound.target, found.bound.draft) == (target_hash(TARGET), hash_weights(draft))
    assert (found.origin, found.bound.dtype) == ("measured", "float32")
    assert found.batches == (1, 2)
    assert 0.0 < found.cost(1, 3).draft < 1.0  # one layer beside eight
    assert CostProfile.from_json(found.to_json()) == found


def test_an_ngram_draft_costs_nothing() -> None:
    found = measured("ngram:min=1,max=3")
    assert found.cost(2, 3).draft == 0.0
    assert found.origin == "measured, draft entered"
    assert found.bound.draft is not None


def test_the_target_alone() -> None:
    found = measured(None)
    assert (found.draft, found.bound.draft) == (None, None)
    assert found.target.seconds(2, 3, 64) > 0.0


def test_transformers_loop_is_for_one_sequence_and_chains() -> None:
    found = measured(CHAIN, "transformers", Shapes((), (8, 32), (3, 5)))
    assert found.batches == (1, 1)
    assert found.target.seconds(1, 5) > found.target.seconds(1)
    with pytest.raises(ProfileError, match="chain drafts only"):
        measured(EAGLE3, "transformers")
    with pytest.raises(ProfileError, match="give a chain draft"):
        measured(None, "transformers")
    with pytest.raises(ProfileError, match="this loop decodes 1 at a time"):
        measured(CHAIN, "transformers", Shapes((2,)))


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    with pytest.raises(DriftwatchError, match="no such folder"):
        measured(tmp_path / "nothing")
    with pytest.raises(DriftwatchError, match="lookahead"):
        measured("lookahead:window=5,ngram=3,guesses=5")


@pytest.mark.parametrize("name", ["dflash", "domino", "peagle"])
def test_a_block_is_one_pass(name: str) -> None:
    """What a pass takes does not depend on how many proposals are asked for, and is no proposal's alone."""
    found = measured(DATA / "models" / name)
    assert (str(found.shape), found.draft_provenance) == ("block", "measured")
    one, three = found.cost(1, 1), found.cost(1, 3)
    assert one.draft == three.draft > 0.0
    assert three.window == pytest.approx(three.draft + three.verify)
    assert CostProfile.from_json(found.to_json()) == found


def test_a_tree_is_passes_of_its_beam_and_verifies_its_tokens() -> None:
    tree = f"{EAGLE3}:steps=4,topk=4,tokens=6"
    found = measured(tree, shapes=Shapes((1, 2), (8, 64)))
    assert {point.gamma for point in found.timings if point.part == "target"} == {0, 5}
    assert found.bound.draft == draft_hash(tree) != draft_hash(str(EAGLE3))
    cost = found.cost(1, 4, 64.0)
    assert cost.window == pytest.approx(4 * cost.draft + cost.verify)
    assert cost.verify_s == pytest.approx(found.target.seconds(1, 5, 64.0))
    assert cost.outside == ()
    with pytest.raises(ProfileError, match="leave out --gamma"):
        measured(tree)
    with pytest.raises(ProfileError, match="chain drafts only"):
        measured(tree, "transformers")
