"""What a replay collects by row and depth, and how it becomes one result a sample."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from driftwatch.acceptance import Rule
from driftwatch.shadow.agreement import Agreement
from driftwatch.shadow.causal import Causal
from driftwatch.shadow.draft import Tokens
from driftwatch.shadow.judge import TargetRows, Verdicts
from driftwatch.shadow.packing import Packed
from driftwatch.shadow.warp import Sampling

Grid = NDArray[np.float64]


@dataclass(frozen=True)
class Figures:
    """By packed row and depth [N, depths]; entries whose proposal meets no served token stay zero. The last two are by
    row. Only ``weight`` is filled unless agreement is asked for."""

    weight: Grid
    match: Grid
    p_top1: Grid
    overlap: Grid
    logprob: Grid
    entropy: Grid

    @classmethod
    def empty(cls, rows: int, depths: int, *, full: bool) -> Figures:
        shape, row = ((rows, depths), rows) if full else ((0, depths), 0)
        match, p_top1, overlap = (np.zeros(shape) for _ in range(3))
        return cls(np.zeros((rows, depths)), match, p_top1, overlap, np.zeros(row), np.zeros(row))

    def put(self, rows: torch.Tensor, depth: int, verdicts: Verdicts) -> None:
        at = rows.numpy()
        self.weight[at, depth] = verdicts.weight.numpy()
        if verdicts.match is not None and verdicts.p_top1 is not None and verdicts.overlap is not None:
            self.match[at, depth] = verdicts.match.numpy()
            self.p_top1[at, depth] = verdicts.p_top1.numpy()
            self.overlap[at, depth] = verdicts.overlap.numpy()

    def surprise(self, rows: slice, target: TargetRows, served: torch.Tensor) -> None:
        logprob, entropy = target.surprise(served)
        self.logprob[rows], self.entropy[rows] = logprob.cpu().numpy(), entropy.cpu().numpy()


def target_rows(
    model: Causal,
    final: torch.Tensor,
    served: torch.Tensor,
    sampling: Sampling | None,
    rows: slice,
    *,
    full: bool,
) -> TargetRows:
    """What the target says of some packed rows, from its last hidden states [N, hidden] of all of them."""
    logits = model.logits(final[rows]).to(served.device)
    settings = None if sampling is None else sampling[rows].to(served.device)
    return TargetRows.of(logits, served[rows], settings, full=full)


def agreements(packed: Packed, figures: Figures, outside: NDArray[np.bool_]) -> list[Agreement]:
    """One a sample; ``outside`` [N] marks judged tokens that the draft cannot propose."""
    depths = figures.weight.shape[1]
    met = packed.left.numpy()[:, None] > np.arange(depths)
    found = []
    for start, stop in pairwise(packed.bounds):
        rows = slice(start, stop)
        found.append(
            Agreement(
                proposals=met[rows].sum(axis=0).astype(np.float64),
                match=figures.match[rows].sum(axis=0),
                p_top1=figures.p_top1[rows].sum(axis=0),
                overlap=figures.overlap[rows].sum(axis=0),
                tokens=stop - start,
                outside=int(outside[rows].sum()),
                logprob=float(figures.logprob[rows].sum()),
                entropy=float(figures.entropy[rows].sum()),
            )
        )
    return found


def skip_reason(tokens: Tokens, vocabulary: int | None, rule: Rule, positions: int | None = None) -> str | None:
    """Why tokens cannot be replayed: too few or too many, ids that the models do not have, settings that the rule
    needs. ``positions``: the most tokens that the models can be fed."""
    if tokens.judged < 1 or not tokens.prompt:
        return "too_short"
    if positions is not None and tokens.length > positions:
        return "too_long"
    if vocabulary is not None and max(*tokens.prompt, *tokens.output) >= vocabulary:
        return "outside_vocabulary"
    if rule == "rejection" and tokens.temperature is None:
        return "sampling_unknown"
    return None
