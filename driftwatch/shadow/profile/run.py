"""From folders to a cost profile: which loop decodes, what it is bound to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from driftwatch.acceptance import DEFAULT_GAMMA
from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.shape import Shape
from driftwatch.errors import ProfileError
from driftwatch.shadow.block.replay import BlockDraft
from driftwatch.shadow.causal import Causal, load_model
from driftwatch.shadow.eagle3.replay import Eagle3Draft
from driftwatch.shadow.eagle3.rollout import Eagle3TreeDraft
from driftwatch.shadow.open import Opening, folder_of, kind_of, open_draft
from driftwatch.shadow.profile.assisted import Assisted
from driftwatch.shadow.profile.bound import device_name, draft_hash, shape_of, target_hash
from driftwatch.shadow.profile.heads import BlockPasses, Eagle3Passes, TreePasses
from driftwatch.shadow.profile.loop import Loop
from driftwatch.shadow.profile.measure import BUDGET_S, Grid, measure
from driftwatch.shadow.profile.passes import Cached, Passes, Proposer
from driftwatch.shadow.target import Target

LoopName = Literal["passes", "transformers"]


@dataclass(frozen=True)
class Shapes:
    """What to measure, as asked for; empty is the device's usual choice."""

    batches: Sequence[int] = ()
    contexts: Sequence[int] = ()
    gammas: Sequence[int] = ()


def profile(
    target_path: Path,
    draft: str | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Shapes | None = None,
    loop: LoopName = "passes",
    threads: int | None = None,
    budget_s: float = BUDGET_S,
) -> CostProfile:
    """Measure a target and, where one is given, a draft; prompt lookup is taken to cost nothing.

    Raises ModelError if a model cannot be used, ProfileError if the loop cannot run its kind of draft.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    kind = None if draft is None else kind_of(draft)
    shape = Shape() if draft is None else shape_of(draft)
    if loop == "transformers" and (kind not in (None, "chain") or shape.kind == "tree"):
        raise ProfileError(f"draft {draft}: transformers assists with chain drafts only; leave out --loop transformers")
    asked = shapes or Shapes()
    gammas = asked.gammas
    if shape.kind == "tree":
        if gammas:
            raise ProfileError(f"draft {draft}: its tree says how many tokens are verified; leave out --gamma")
        gammas = [shape.tokens - 1]
    target = Target(target_path, device=device, dtype=dtype)
    bound = Bound(
        device_name(device),
        str(dtype).removeprefix("torch."),
        target_hash(target_path),
        None if draft is None else draft_hash(draft),
    )
    chain = None
    if draft is not None and kind == "chain":
        chain = load_model("draft", folder_of(draft), device=device, dtype=dtype, ignored={"d2t"})
    proposer = None
    if draft is not None and kind not in ("chain", "ngram"):
        depths = max(gammas, default=DEFAULT_GAMMA) if shape.kind == "block" else 1
        proposer = _proposer(draft, Opening(device, dtype, depths=depths), target)
    decoding = _loop(loop, target.model(), chain, proposer, shape)
    grid = Grid.of(
        device,
        batches=asked.batches,
        contexts=asked.contexts,
        gammas=gammas,
        most_sequences=decoding.most_sequences,
    )
    points = measure(decoding, grid, drafted=kind not in (None, "ngram"), budget_s=budget_s)
    found = CostProfile.fitted(bound, points, shape=shape)
    return found.with_draft(0.0) if kind == "ngram" else found


def _proposer(draft: str, how: Opening, target: Target) -> Proposer:
    opened = open_draft(draft, how, target)
    if isinstance(opened, Eagle3TreeDraft):
        return TreePasses(opened)
    if isinstance(opened, BlockDraft):
        return BlockPasses(opened)
    assert isinstance(opened, Eagle3Draft)
    return Eagle3Passes(opened)


def _loop(name: LoopName, target: Causal, chain: object | None, proposer: Proposer | None, shape: Shape) -> Loop:
    if name == "passes":
        return Passes(target, Cached(Causal(chain)) if chain is not None else proposer, shape)
    if chain is None:
        raise ProfileError("--loop transformers verifies what an assistant proposes: give a chain draft with --draft")
    return Assisted(target.model, chain)
