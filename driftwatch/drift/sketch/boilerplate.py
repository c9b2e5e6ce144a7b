"""What many prompts say word for word: templates and system prompts. It tells nothing about the request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from driftwatch.drift.sketch.grams import Ids, Keys, Mask, Texts, keys

SPAN = 5
"""Tokens in a row that are compared."""
SHARE = 0.05
"""Share of the prompts from which on a run of tokens is boilerplate."""
LEAST = 10
"""Prompts that must have it in any case."""
PROMPTS = 2000
"""Prompts looked at: enough to know a share of one in twenty to within a fifth."""


@dataclass(frozen=True)
class Boilerplate:
    """Runs of ``SPAN`` tokens that are common, by hash, sorted."""

    common: Keys

    @classmethod
    def of(cls, *samples: Sequence[Ids]) -> Boilerplate:
        """What is common in any of these samples of prompts; prompts of a sample are all different."""
        return cls(np.unique(np.concatenate([_common(prompts[:PROMPTS]) for prompts in samples])))

    def content(self, texts: Texts) -> Mask:
        """Tokens [tokens] that are not part of any common run."""
        if len(texts.ids) < SPAN or not len(self.common):
            return texts.all
        runs = keys(texts.ids, SPAN)
        at = np.minimum(np.searchsorted(self.common, runs), len(self.common) - 1)
        common = (self.common[at] == runs) & texts.within(SPAN)
        edges = np.zeros(len(texts.ids) + 1, np.int64)
        edges[: len(runs)] += common
        edges[SPAN:] -= common
        free: Mask = edges.cumsum()[:-1] == 0
        return free


def _common(prompts: Sequence[Ids]) -> Keys:
    runs = [np.unique(keys(ids, SPAN)) for ids in prompts if len(ids) >= SPAN]
    if not runs:
        return np.empty(0, np.uint64)
    found, counts = np.unique(np.concatenate(runs), return_counts=True)
    return found[counts >= max(LEAST, math.ceil(SHARE * len(prompts)))]
