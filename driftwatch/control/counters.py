"""What a cell's counters say: its sums at the proposal length in use, going on where they were when that changes.

Sums hold a column for each proposal length, so another one has other lifetime counts: read off plainly, a counter would
jump or fall with the settings, and every rate over it with that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from driftwatch.drift.sums import Sums

KEY = "carried"
"""Where the counts under earlier proposal lengths lie among a cell's sums: less what the sums hold of them."""
NAMES = ("requests", "tokens", "steps", "windows", "drafted_tokens", "accepted_tokens", "rejected_tokens")

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Counters:
    """``counts`` [2, names] and ``depths`` [2, depths]: of what was judged, and the same weighted to all traffic.

    By depth are windows in which it was accepted.
    """

    counts: Array
    depths: Array

    @classmethod
    def zero(cls) -> Self:
        return cls(np.zeros((2, len(NAMES))), np.zeros((2, 0)))

    @classmethod
    def of(cls, sums: Sums, gamma: int) -> Self:
        t, i = sums.tally, gamma - 1
        plain = [t.requests, t.tokens, t.steps[i], t.windows[i], t.drafted[i], t.accepted[i], t.rejected[i]]
        totals = [sums.total(name, gamma) for name in ("tokens", "steps", "windows", "drafted", "accepted")]
        weighted = [sums.weight, *totals, sums.total("tested", gamma) - sums.total("accepted", gamma)]
        return cls(
            np.array([plain, weighted], dtype=np.float64),
            np.array([t.accepted_at[i, :gamma], sums.accepted_at[i, :gamma]], dtype=np.float64),
        )

    @classmethod
    def read(cls, sums: Mapping[str, Any]) -> Self:
        """What is stored beside sums; nothing where the proposal length never changed."""
        if KEY not in sums:
            return cls.zero()
        return cls(*(np.array(sums[KEY][part], dtype=np.float64) for part in ("counts", "depths")))

    def to_json(self) -> dict[str, Any]:
        return {"counts": self.counts.tolist(), "depths": self.depths.tolist()}

    def __add__(self, other: Counters) -> Counters:
        return self._with(other, 1.0)

    def __sub__(self, other: Counters) -> Counters:
        return self._with(other, -1.0)

    def _with(self, other: Counters, sign: float) -> Counters:
        deepest = max(self.depths.shape[1], other.depths.shape[1])
        mine, theirs = (np.pad(x, ((0, 0), (0, deepest - x.shape[1]))) for x in (self.depths, other.depths))
        return Counters(self.counts + sign * other.counts, mine + sign * theirs)
