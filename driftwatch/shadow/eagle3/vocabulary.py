"""The vocabulary map of an EAGLE-3 head: ``d2t`` holds offsets, ``t2d`` marks membership."""

from __future__ import annotations

import torch

from driftwatch.errors import ModelError


def read_map(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, vocabulary: int, target_vocabulary: int, what: str
) -> torch.Tensor | None:
    """Absolute target ids [vocabulary] of the draft's ids, ascending; None where the draft has the whole vocabulary.

    Raises ModelError where the two tensors are missing, contradict each other, were never filled in, or are of
    another convention.
    """
    if d2t is None:
        if vocabulary != target_vocabulary:
            raise ModelError(
                f"{what}: its head has {vocabulary} of {target_vocabulary} token ids, but no d2t says which ones"
            )
        return None
    offsets = d2t.long()
    if len(offsets) != vocabulary:
        raise ModelError(f"{what}: d2t has {len(offsets)} entries for a vocabulary of {vocabulary}")
    if vocabulary < target_vocabulary and not offsets.any() and (t2d is None or bool(t2d.bool().all())):
        raise ModelError(
            f"{what}: its vocabulary map was never loaded (d2t all zero): its {vocabulary} ids would be taken for the "
            "first ones of the target; export it again with its vocabulary mapping"
        )
    members = None if t2d is None else t2d.bool()
    ids = offsets + torch.arange(vocabulary)
    if _fits(ids, members, target_vocabulary):
        return ids
    if _fits(offsets, members, target_vocabulary):
        raise ModelError(
            f"{what}: d2t holds target ids where engines expect offsets (target id = draft id + d2t): they would "
            "propose wrong tokens; subtract each entry's index"
        )
    if members is not None and len(members) != target_vocabulary:
        raise ModelError(f"{what}: t2d has {len(members)} entries for a target vocabulary of {target_vocabulary}")
    raise ModelError(f"{what}: d2t and t2d do not name the same {vocabulary} of the target's {target_vocabulary} ids")


def _fits(ids: torch.Tensor, members: torch.Tensor | None, target_vocabulary: int) -> bool:
    """Whether ids ascend within the target's vocabulary and are the very ones marked, where a mark is there."""
    ascending = bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < target_vocabulary
    if not ascending or members is None:
        return ascending
    return len(members) == target_vocabulary and torch.equal(members.nonzero()[:, 0], ids)
