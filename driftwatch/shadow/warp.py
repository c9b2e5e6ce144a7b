"""Sampling settings applied to logits as vLLM applies them: temperature, then top-k, then top-p.

A sampled draft's distribution is warped by temperature alone, the target's by all three (vLLM 0.32 and 0.33,
rejection sampler): tight truncation therefore lowers acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from driftwatch.shadow.draft import Tokens

GREEDY_BELOW = 1e-5
"""Temperatures under it are greedy decoding, as in vLLM."""


@dataclass(frozen=True)
class Sampling:
    """Settings of packed rows, [N] each, float32 on the CPU; ``top_k`` int64, 0 where there is none."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor

    @classmethod
    def of(cls, settings: Sequence[tuple[float | None, float | None, int | None]], rows: Sequence[int]) -> Sampling:
        """From (temperature, top-p, top-k) of each sample and its number of rows. Where a client named no top-p or
        top-k, none was applied; a temperature is needed (see ``skip_reason`` of the drafts)."""
        count = torch.tensor(rows)
        temperature = torch.tensor([float(t or 0.0) for t, _, _ in settings])
        top_p = torch.tensor([1.0 if p is None or p <= 0 else float(p) for _, p, _ in settings])
        top_k = torch.tensor([k if k is not None and k > 0 else 0 for _, _, k in settings])
        return cls(*(values.repeat_interleave(count) for values in (temperature, top_p, top_k)))

    @classmethod
    def of_batch(cls, batch: Sequence[Tokens]) -> Sampling:
        """Of the judged tokens of a batch, packed."""
        settings = [(tokens.temperature, tokens.top_p, tokens.top_k) for tokens in batch]
        return cls.of(settings, [tokens.judged for tokens in batch])

    def __getitem__(self, rows: slice | torch.Tensor) -> Sampling:
        return Sampling(self.temperature[rows], self.top_p[rows], self.top_k[rows])

    def to(self, device: torch.device) -> Sampling:
        return Sampling(self.temperature.to(device), self.top_p.to(device), self.top_k.to(device))

    @property
    def greedy(self) -> torch.Tensor:
        return self.temperature < GREEDY_BELOW

    @property
    def divisor(self) -> torch.Tensor:
        """[N, 1]: temperatures, 1 where decoding is greedy."""
        return torch.where(self.greedy, 1.0, self.temperature)[:, None]


def warped_logprob(logits: torch.Tensor, served: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probability of the served tokens under the target's warped distribution: [rows] from [rows, vocabulary].

    A token that truncation would have removed was served all the same, hence lay at the edge of what the engine kept
    and outside it here by rounding: it gets the probability it would have had inside.
    """
    scaled = logits.float() / sampling.divisor
    logprob = scaled.log_softmax(dim=-1)
    found = logprob.gather(1, served[:, None])[:, 0]
    cut = (sampling.top_p < 1.0) | ((sampling.top_k > 0) & (sampling.top_k < logits.shape[1]))
    if cut.any():
        found[cut] -= _kept_mass(logprob[cut].exp(), sampling[cut]).log()
    return found


def _kept_mass(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probability that top-k and then top-p leave: [rows]. Top-p keeps a token if those above it sum to less than p."""
    ordered = probabilities.sort(dim=-1, descending=True).values
    limit = torch.where(sampling.top_k > 0, sampling.top_k, ordered.shape[1]).clamp(max=ordered.shape[1])
    kth = ordered.gather(1, limit[:, None] - 1)
    ordered = torch.where(ordered >= kth, ordered, 0.0)
    above = ordered.cumsum(dim=-1) - ordered
    kept = above < sampling.top_p[:, None] * ordered.sum(dim=-1, keepdim=True)
    return torch.where(kept, ordered, 0.0).sum(dim=-1)
