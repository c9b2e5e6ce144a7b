"""Passes of heads: how many rows they run over, and what is left in their caches."""

from __future__ import annotations

from pathlib import Path

import torch

from driftwatch.economics.shape import Shape
from driftwatch.shadow.block.replay import BlockDraft
from driftwatch.shadow.eagle3.checkpoint import Checkpoint
from driftwatch.shadow.eagle3.rollout import Eagle3TreeDraft
from driftwatch.shadow.eagle3.tree import Tree
from driftwatch.shadow.open import Opening, open_draft
from driftwatch.shadow.profile.bound import shape_of
from driftwatch.shadow.profile.heads import BlockPasses, TreePasses
from driftwatch.shadow.profile.passes import Passes
from driftwatch.shadow.target import Target
from tests.unit.shadow import heads
from tests.unit.shadow.conftest import CPU, DATA


def test_a_trees_passes_run_over_its_beam(target: Target, eagle3: Checkpoint) -> None:
    tree = Tree(5, 4, 8)
    passes = TreePasses(Eagle3TreeDraft(eagle3, target, tree))
    with torch.inference_mode():
        passes.begin(2, 12)
        for depth in range(3):
            assert passes.propose(torch.tensor([[5], [6]])).shape == (2 * 4, 4)
            assert passes._keys.shape[::2] == (8, 12 + depth + 1)
    loop = Passes(target.model(), passes, Shape("tree", 5, 4, 8))
    assert all(len(lap.drafts) == 5 for lap in loop.laps(2, 12, 7))
    assert passes._keys.shape[2] == 12


def test_a_block_proposes_what_its_replay_does(target: Target) -> None:
    """Of the same random context: the pass is the head's own, for a batch of windows that start alike."""
    draft = open_draft(DATA / "models" / "dflash", Opening(CPU, torch.float32, depths=3), target)
    assert isinstance(draft, BlockDraft)
    passes = BlockPasses(draft)
    with torch.inference_mode():
        passes.begin(3, 20)
        found = passes.propose(torch.tensor([[7], [7], [7]]))
        at = torch.tensor([20])
        outs = draft.head.propose(passes._context, passes._embedded, at, 3)
        expected = [int(draft.logits(out).argmax()) for out in outs]
    assert found.tolist() == [expected] * 3
    loop = Passes(target.model(), passes, Shape("block"))
    assert all(len(lap.drafts) == 1 for gamma in (1, 3) for lap in loop.laps(3, 20, gamma))


def test_an_mtp_head_makes_a_proposal_a_pass(target: Target, tmp_path: Path) -> None:
    path = heads.written(tmp_path / "mtp", *heads.mtp())
    assert shape_of(str(path)) == Shape()
    draft = BlockDraft.load("mtp", path, target, depths=1)
    loop = Passes(target.model(), BlockPasses(draft))
    assert all(len(lap.drafts) == 3 and min(lap.drafts) > 0.0 for lap in loop.laps(2, 16, 3))
