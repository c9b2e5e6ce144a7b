"""How well a draft agrees with its target on served tokens, free of any rule and of the sampling settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Agreement:
    """Sums over judged tokens; they add up over requests. Distributions are at temperature 1, untruncated.

    By depth, [depths], over the proposals that meet a served token (one depth for a draft without depths):
    ``proposals`` is how many, ``match`` how many are the target's argmax, ``p_top1`` the sum of the target's
    probability of the proposal, ``overlap`` the sum of sum_v min(p, q).

    Over judged tokens: ``outside`` cannot be proposed at all (not in the draft's vocabulary); ``logprob`` is the sum
    of the target's own log-probability of the token served, ``entropy`` of its entropy, both in nats. On tokens that
    this target sampled at temperature 1 the two cancel on average; a log-probability far below minus the entropy says
    that another target, or another build of it, served them.
    """

    proposals: NDArray[np.float64]
    match: NDArray[np.float64]
    p_top1: NDArray[np.float64]
    overlap: NDArray[np.float64]
    tokens: int
    outside: int
    logprob: float
    entropy: float

    @classmethod
    def zero(cls, depths: int) -> Agreement:
        return cls(np.zeros(depths), np.zeros(depths), np.zeros(depths), np.zeros(depths), 0, 0, 0.0, 0.0)

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.proposals + other.proposals,
            self.match + other.match,
            self.p_top1 + other.p_top1,
            self.overlap + other.overlap,
            self.tokens + other.tokens,
            self.outside + other.outside,
            self.logprob + other.logprob,
            self.entropy + other.entropy,
        )

    def as_dict(self) -> dict[str, Any]:
        """Means, as `driftwatch replay --json` prints them; None where nothing was judged."""
        return {
            "tokens": self.tokens,
            "argmax_match": _means(self.match, self.proposals),
            "p_top1": _means(self.p_top1, self.proposals),
            "sum_min_pq": _means(self.overlap, self.proposals),
            "outside_draft_vocabulary": _mean(self.outside, self.tokens),
            "target_logprob": _mean(self.logprob, self.tokens),
            "target_entropy": _mean(self.entropy, self.tokens),
        }


def _means(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> list[float | None]:
    return [_mean(total, count) for total, count in zip(sums, counts, strict=True)]


def _mean(total: float, count: float) -> float | None:
    return round(float(total) / float(count), 6) if count else None
