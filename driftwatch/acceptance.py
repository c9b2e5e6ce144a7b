"""Acceptance of a draft on tokens that were already served, for every proposal length at once.

One request with output tokens y[1..n] has n - 1 judged tokens: the first comes from prefill and is never drafted.
Judged token i (0-based) is y[i + 2]. A window that starts at judged token i proposes up to gamma tokens; its proposal
at depth d concerns judged token i + d and is accepted with probability ``weights[i, d]``:

- rule ``argmax``: 1 if the draft's argmax is the served token, else 0;
- rule ``rejection``: min(1, q / p) of the served token (Leviathan et al. 2023, arXiv 2211.17192, conditioned on the
  emitted token).

Where windows start is a renewal process: a window that accepts a proposals ends after a + 1 tokens. Given the served
tokens its exact expectation is one linear recursion (with 0/1 weights: the very walk the engine made).

A draft tree is judged depth by depth too: a window accepts the longest prefix of the served tokens that its tree
contains. Its gamma is the number of its depths, drafted is gamma a window, and the depth where no child of the accepted
node is the served token is the one rejected, also where that node has no child: the draft had that depth to fill.
Engines count a tree's nodes as drafted (SGLang: its draft tokens less 1), so their rate is accepted / that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Rule = Literal["argmax", "rejection"]
Encoding = Literal["bits", "f16", "walk"]
"""``walk``: bits that hold for one walk alone, see ``Weights.walked``."""

DEFAULT_GAMMA = 8
"""The largest proposal length that is replayed unless another is asked for."""


@dataclass(frozen=True)
class Weights:
    """What one draft would have done on one request: all that needs storing to derive any figure later.

    ``values`` has shape [tokens, depths] with entries in [0, 1], start-major: row i belongs to the window starting at
    judged token i. A draft whose proposal for a token does not depend on where the window started (any causal language
    model) needs one column only, the token's own weight; the others are the column shifted.
    ``proposals`` [tokens], optional, is how many proposals a window starting there has (n-gram drafts run out).

    ``walked``: they hold for one proposal length alone, the number of depths, and only at the starts that its walk from
    the first judged token visits (draft trees: another length is another tree, and each start costs a roll-out). Rows
    of other starts mean nothing; which ones those are follows from the rest. All weights are 0 or 1.
    """

    values: NDArray[np.float64]
    proposals: NDArray[np.int64] | None = None
    walked: bool = False

    @property
    def tokens(self) -> int:
        """Number of judged tokens, n - 1 for n served ones."""
        return int(self.values.shape[0])

    @property
    def depth_free(self) -> bool:
        return self.values.shape[1] == 1 and self.proposals is None and not self.walked

    def by_start(self, gamma: int) -> NDArray[np.float64]:
        """Weights as [tokens, gamma]; a proposal behind the end of the output, or never made, is NaN.

        Raises ValueError when more depths are asked for than were replayed, or others than the weights hold for.
        """
        tokens = self.tokens
        if self.walked and gamma != self.values.shape[1]:
            raise ValueError(f"gamma {gamma} asked for, but the weights hold for gamma {self.values.shape[1]} alone")
        if self.depth_free:
            padded = np.concatenate([self.values[:, 0], np.full(gamma, np.nan)])
            return cast("NDArray[np.float64]", sliding_window_view(padded, gamma)[:tokens])
        if gamma > self.values.shape[1]:
            raise ValueError(f"gamma {gamma} asked for, but only {self.values.shape[1]} depths were replayed")
        grid = self.values[:, :gamma].astype(np.float64, copy=True)
        depth = np.arange(gamma)
        grid[np.arange(tokens)[:, None] + depth >= tokens] = np.nan
        if self.proposals is not None:
            grid[depth >= self.proposals[:, None]] = np.nan
        if self.walked:
            passed = np.ones(tokens, dtype=bool)
            passed[[start for start, _ in _walk(grid)]] = False
            grid[passed] = np.nan
        return grid

    def encode(self) -> tuple[Encoding, bytes]:
        """Pack for storage: one bit a weight where all are 0 or 1, a half float each otherwise."""
        if np.isin(self.values, (0.0, 1.0)).all():
            return "walk" if self.walked else "bits", np.packbits(self.values.astype(bool)).tobytes()
        return "f16", self.values.astype("<f2").tobytes()

    @classmethod
    def decode(cls, encoding: str, data: bytes, *, tokens: int, depths: int, proposals: bytes | None = None) -> Weights:
        """Inverse of :meth:`encode`; ``encoding`` is one that it gave, ``proposals`` are int16 little-endian bytes."""
        if encoding == "f16":
            flat = np.frombuffer(data, "<f2").astype(np.float64)
        else:
            flat = np.unpackbits(np.frombuffer(data, np.uint8), count=tokens * depths).astype(np.float64)
        counts = None if proposals is None else np.frombuffer(proposals, "<i2").astype(np.int64)
        return cls(flat.reshape(tokens, depths), counts, walked=encoding == "walk")


@dataclass(frozen=True)
class Tally:
    """Counts over one or more requests for every gamma from 1 to G; index g - 1 holds gamma g.

    Counts add up; ratios are formed last, over summed counts. A gamma without a step was not replayed (see
    ``Weights.walked``): it has no figures.
    """

    requests: int
    tokens: int
    steps: NDArray[np.float64]
    windows: NDArray[np.float64]
    drafted: NDArray[np.float64]
    accepted_at: NDArray[np.float64]
    """[G, G]: accepted at depth d under gamma g; zero where d >= g."""
    rejected: NDArray[np.float64]

    @classmethod
    def zero(cls, gamma: int) -> Tally:
        def none() -> NDArray[np.float64]:
            return np.zeros(gamma)

        return cls(0, 0, none(), none(), none(), np.zeros((gamma, gamma)), none())

    @property
    def gammas(self) -> int:
        return len(self.steps)

    @property
    def replayed(self) -> list[int]:
        """The proposal lengths that have counts."""
        return [int(i) + 1 for i in np.flatnonzero(self.steps)]

    @property
    def accepted(self) -> NDArray[np.float64]:
        """[G]: accepted proposals over all depths."""
        return cast("NDArray[np.float64]", self.accepted_at.sum(axis=1))

    @property
    def tested(self) -> NDArray[np.float64]:
        """[G]: accepted + rejected."""
        return self.accepted + self.rejected

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.windows + other.windows,
            self.drafted + other.drafted,
            self.accepted_at + other.accepted_at,
            self.rejected + other.rejected,
        )

    def figures(self, gamma: int) -> dict[str, Any]:
        """Counts and ratios for one gamma, as `driftwatch replay --json` prints them; an empty ratio is None."""
        i = gamma - 1
        steps, windows, drafted = float(self.steps[i]), float(self.windows[i]), float(self.drafted[i])
        accepted, rejected = float(self.accepted[i]), float(self.rejected[i])
        return {
            "steps": tidy(steps),
            "windows": tidy(windows),
            "drafted": tidy(drafted),
            "accepted": tidy(accepted),
            "rejected": tidy(rejected),
            "accepted_per_depth": [tidy(x) for x in self.accepted_at[i, :gamma]],
            "acceptance_rate": accepted / drafted if drafted else None,
            "hit_rate": accepted / (accepted + rejected) if accepted + rejected else None,
            "acceptance_length": 1 + accepted / windows if windows else None,
        }


def tidy(value: float) -> float | int:
    """An integer where the count is one (argmax rule), else the float rounded far below its own uncertainty."""
    value = float(value)
    return int(value) if value.is_integer() else round(value, 6)


def tally(weights: Weights, gamma: int = DEFAULT_GAMMA) -> Tally:
    """Walk one request for every proposal length from 1 to ``gamma``, or the one that its weights hold for.

    With s[i] the probability that a window starts at judged token i, and P[i, d] the probability that its first d
    proposals were accepted, the window's next one starts at i + d + 1 with probability P[i, d] (1 - w[i, d]), or, all
    g proposals accepted, at i + g + 1 with probability P[i, g] (the bonus token). Cost O(tokens x gamma^2).
    Raises ValueError if the weights do not reach so far.
    """
    if weights.walked:
        return _tally_walk(weights, gamma)
    tokens = weights.tokens
    grid = weights.by_start(gamma)
    made = ~np.isnan(grid)
    w = np.where(made, grid, 0.0)
    reached = np.cumprod(np.concatenate([np.ones((tokens, 1)), w], axis=1), axis=1)  # P, zero behind the last proposal
    missed = np.where(made, reached[:, :-1] * (1.0 - w), 0.0)  # P[i, d] (1 - w[i, d])

    limit = np.arange(1, gamma + 1)
    proposals = np.full(tokens, gamma) if weights.proposals is None else np.minimum(weights.proposals, gamma)
    last = np.minimum(limit[:, None], proposals[None, :])  # [G, tokens]: proposals of a window under each gamma
    ends = np.zeros((gamma, tokens, gamma + 1))
    within = np.arange(gamma)[None, None, :] < last[:, :, None]
    ends[:, :, :gamma] = np.where(within, missed[None], 0.0)
    np.put_along_axis(ends, last[:, :, None], np.take_along_axis(reached[None], last[:, :, None], axis=2), axis=2)

    starts = np.zeros((gamma, tokens + gamma + 1))
    starts[:, 0] = 1.0
    for i in range(tokens):
        starts[:, i + 1 : i + gamma + 2] += starts[:, i, None] * ends[:, i]
    starts = starts[:, :tokens]

    depth = np.arange(gamma)
    accepted_at = np.where(depth[None, :] < limit[:, None], starts @ reached[:, 1:], 0.0)
    rejected_at = np.where(depth[None, :] < limit[:, None], starts @ missed, 0.0)
    return Tally(
        requests=1,
        tokens=tokens,
        steps=starts.sum(axis=1),
        windows=(starts * (proposals > 0)).sum(axis=1),
        drafted=(starts * last).sum(axis=1),
        accepted_at=accepted_at,
        rejected=rejected_at.sum(axis=1),
    )


def _tally_walk(weights: Weights, gamma: int) -> Tally:
    """The counts of the one walk that the weights hold for: none where its gamma is larger than those asked for."""
    depths = weights.values.shape[1]
    if gamma < depths:
        return replace(Tally.zero(gamma), requests=1, tokens=weights.tokens)
    starts, accepted = np.array(_walk(weights.by_start(depths)), dtype=np.int64).reshape(-1, 2).T
    proposed = np.full(len(starts), depths) if weights.proposals is None else weights.proposals[starts]
    found, i = Tally.zero(gamma), depths - 1
    found.steps[i] = len(starts)
    found.windows[i] = (proposed > 0).sum()
    found.drafted[i] = proposed.sum()
    found.accepted_at[i, :depths] = (accepted[:, None] > np.arange(depths)).sum(axis=0)
    found.rejected[i] = ((accepted < proposed) & (starts + accepted < weights.tokens)).sum()
    return replace(found, requests=1, tokens=weights.tokens)


def _walk(grid: NDArray[np.float64]) -> list[tuple[int, int]]:
    """The steps, in order, as their start and what they accept: by weights [tokens, gamma] that are 0 or 1 where the
    walk comes, and NaN where no proposal was made."""
    tokens = len(grid)
    hits = np.concatenate([grid == 1.0, np.zeros((tokens, 1), bool)], axis=1).argmin(axis=1)
    steps, start = [], 0
    while start < tokens:
        steps.append((start, int(hits[start])))
        start += int(hits[start]) + 1
    return steps


def accepted_per_window(weights: Weights, gamma: int) -> list[int]:
    """The walk of an engine at one gamma under the argmax rule: accepted proposals of each window in order.

    Plain steps (no proposal) are left out, as engines leave them out. The last window counts only what was served.
    Raises ValueError if the weights are not all 0 or 1.
    """
    grid = weights.by_start(gamma)
    if not np.isin(grid[~np.isnan(grid)], (0.0, 1.0)).all():
        raise ValueError("windows have whole counts under the argmax rule only")
    proposed = weights.proposals
    return [accepted for start, accepted in _walk(grid) if proposed is None or proposed[start] > 0]
