"""What a draft's logits are worth against the served tokens and, where one is loaded, against the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from driftwatch.acceptance import Rule
from driftwatch.shadow.warp import Sampling, warped_logprob

LOGIT_ELEMENTS = 1 << 26
"""Logits held at a time, rows x vocabulary."""


def rows_at_once(vocabulary: int) -> int:
    return max(16, LOGIT_ELEMENTS // vocabulary)


class VocabularyMap:
    """Between a draft's token ids and its target's: the draft's may be a part of them."""

    def __init__(self, to_target: torch.Tensor | None, device: torch.device) -> None:
        """``to_target`` [draft vocabulary] holds the target's id of each of the draft's; None is the identity."""
        self.to_target = None if to_target is None else to_target.to(device)
        self._to_draft: torch.Tensor | None = None
        if self.to_target is not None:
            self._to_draft = torch.full((int(self.to_target.max()) + 2,), -1, dtype=torch.long, device=device)
            self._to_draft[self.to_target] = torch.arange(len(self.to_target), device=device)

    def target_ids(self, draft: torch.Tensor) -> torch.Tensor:
        return draft if self.to_target is None else self.to_target[draft]

    def draft_ids(self, target: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """The draft's ids of the target's, -1 where it has none."""
        if self._to_draft is None:
            return torch.where(target < vocabulary, target, -1)
        return self._to_draft[target.clamp(max=len(self._to_draft) - 1)]

    def outside(self, target: Sequence[int], vocabulary: int) -> int:
        """How many of the target's ids the draft does not have."""
        device = None if self.to_target is None else self.to_target.device
        return int((self.draft_ids(torch.tensor(target, device=device), vocabulary) < 0).sum())

    def select(self, probabilities: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """[rows, draft vocabulary] of the target's [rows, vocabulary]; 0 for ids that only the draft has."""
        if self.to_target is not None:
            return probabilities[:, self.to_target]
        missing = vocabulary - probabilities.shape[1]
        return torch.nn.functional.pad(probabilities, (0, missing)) if missing > 0 else probabilities[:, :vocabulary]


@dataclass(frozen=True)
class TargetRows:
    """What the target says of some packed rows."""

    probabilities: torch.Tensor | None
    """[rows, vocabulary] at temperature 1, where agreement is asked for."""
    warped: torch.Tensor | None
    """[rows]: log-probability of the served token as the engine samples it, where the rule needs it."""

    @classmethod
    def of(cls, logits: torch.Tensor, served: torch.Tensor, sampling: Sampling | None, *, full: bool) -> TargetRows:
        warped = None if sampling is None else warped_logprob(logits, served, sampling)
        return cls(logits.float().softmax(dim=-1) if full else None, warped)

    def surprise(self, served: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of the served tokens and entropy of the distribution, [rows] each."""
        assert self.probabilities is not None
        p = self.probabilities
        entropy = torch.special.entr(p).sum(dim=-1)
        return p.gather(1, served[:, None])[:, 0].log().clamp(min=-100.0), entropy

    def __getitem__(self, rows: slice | torch.Tensor) -> TargetRows:
        return TargetRows(
            None if self.probabilities is None else self.probabilities[rows],
            None if self.warped is None else self.warped[rows],
        )


@dataclass(frozen=True)
class Verdicts:
    """Of some proposals, [rows] each on the CPU: the weight under the rule and, if asked for, the agreement figures."""

    weight: torch.Tensor
    match: torch.Tensor | None = None
    p_top1: torch.Tensor | None = None
    overlap: torch.Tensor | None = None


def judge(
    logits: torch.Tensor,
    served: torch.Tensor,
    mapping: VocabularyMap,
    *,
    rule: Rule,
    target: TargetRows | None = None,
    sampling: Sampling | None = None,
) -> Verdicts:
    """Judge one proposal a row: the draft's logits [rows, draft vocabulary] for the served token at [rows].

    ``target`` and ``sampling`` are of the same rows; the rejection rule needs both.
    """
    top1 = mapping.target_ids(logits.argmax(dim=-1))
    weight = (top1 == served).float()
    if rule == "rejection":
        assert target is not None
        assert target.warped is not None
        assert sampling is not None
        scaled = logits.float() / sampling.divisor
        own = mapping.draft_ids(served, logits.shape[1])
        logq = scaled.gather(1, own.clamp(min=0)[:, None])[:, 0] - scaled.logsumexp(dim=-1)
        sampled = torch.where(own >= 0, (logq - target.warped).clamp(max=0.0).exp(), 0.0)
        weight = torch.where(sampling.greedy, weight, sampled)
    if target is None or target.probabilities is None:
        return Verdicts(weight.cpu())
    p = target.probabilities
    q = logits.float().softmax(dim=-1)
    known = top1 < p.shape[1]
    p_top1 = torch.where(known, p.gather(1, torch.where(known, top1, 0)[:, None])[:, 0], 0.0)
    overlap = torch.minimum(mapping.select(p, q.shape[1]), q).sum(dim=-1)
    return Verdicts(weight.cpu(), (top1 == p.argmax(dim=-1)).float().cpu(), p_top1.cpu(), overlap.cpu())
