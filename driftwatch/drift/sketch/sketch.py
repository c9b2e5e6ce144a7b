"""One draft's sketch: scores a prompt by both views, and turns the score into a p-value.

Each view is put on the scale of prompts of its length that it was not learnt from (mean and standard deviation in a
tuning part), and the larger of the two counts: in data where one view says nothing, a sum of both lost most of its
power.

The p-value is conformal (Vovk, Gammerman and Shafer 2005): (1 + number of calibration scores >= s) / (n + 1). For a
prompt that is exchangeable with the n held-out training prompts, P(p <= epsilon) <= epsilon exactly, for any n and any
score. Prompts that share one sketch share its calibration set: over many of them the realised rate has a spread of
about sqrt(epsilon (1 - epsilon) / n), for which ``off_rate`` gives the interval (Bates et al., arXiv 2104.08279).

Only the prompt decides. The output is the target's work: a changed target would read as changed traffic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from driftwatch.drift.interval import CONFIDENCE, wilson
from driftwatch.drift.sketch.boilerplate import Boilerplate
from driftwatch.drift.sketch.grams import Ids, Seen, batches
from driftwatch.drift.sketch.meaning import Meaning

Side = Literal["on", "off"]
GROUP = 60
MOST_GROUPS = 8
LEAST_SPREAD = 0.01
"""Of a view on its scale: where all tuning prompts are alike, not every small difference is a large one."""


class Views(NamedTuple):
    """What the two views say of a prompt: cosine distance in [0, 2], and the share of new n-grams; and of how many
    tokens they say it, boilerplate left out."""

    distance: float
    novelty: float
    tokens: int


class Group(NamedTuple):
    """Prompts of up to so many tokens: mean and standard deviation of both views."""

    tokens: float
    mean: tuple[float, float]
    spread: tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """What is usual for prompts of each length, from the tuning part; the last group takes all that are longer.

    By length, because views of few tokens vary most: on one scale for all, long prompts would hardly ever be off.
    """

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, views: Sequence[Views]) -> Scale:
        """Groups of equal size, of ``GROUP`` prompts or more."""
        table = np.array(sorted(views, key=lambda one: one.tokens))
        parts = np.array_split(table, min(max(len(table) // GROUP, 1), MOST_GROUPS))
        return cls(tuple(_group(part) for part in parts))

    def score(self, views: Views | None) -> float:
        """Larger is stranger; nothing but boilerplate is the least strange of all."""
        if views is None:
            return -math.inf
        group = next((one for one in self.groups if views.tokens <= one.tokens), self.groups[-1])
        return max((x - m) / s for x, m, s in zip(views, group.mean, group.spread, strict=False))


def _group(part: NDArray[np.float64]) -> Group:
    (distance, novelty), (a, b) = part[:, :2].mean(axis=0), np.maximum(part[:, :2].std(axis=0), LEAST_SPREAD)
    return Group(float(part[-1, 2]), (float(distance), float(novelty)), (float(a), float(b)))


@dataclass(frozen=True)
class Verdict:
    """One prompt: its p-value, the side that this puts it on, and what each view said (None: all boilerplate)."""

    p: float
    side: Side
    views: Views | None


@dataclass(frozen=True)
class Share:
    """A share with its denominator and 95% interval."""

    value: float
    lower: float
    upper: float
    requests: int

    @classmethod
    def of(cls, hits: int, requests: int) -> Share:
        """Wilson's interval; at least one request."""
        lower, upper = wilson(hits / requests, requests, NormalDist().inv_cdf(0.5 + CONFIDENCE / 2.0))
        return cls(hits / requests, max(lower, 0.0), min(upper, 1.0), requests)


@dataclass(frozen=True)
class Sketch:
    """What was learnt from one draft's training data. ``draft`` is the fingerprint of the weights it belongs to."""

    draft: str
    epsilon: float
    rows: int
    """Training rows it was learnt from, held-out ones included."""
    boilerplate: Boilerplate
    seen: Seen
    meaning: Meaning
    scale: Scale
    calibration: NDArray[np.float64]
    """Scores of held-out training prompts, rising."""
    production: NDArray[np.float64]
    """p-values of the production sample that it was built with, rising; may be empty."""

    def score(self, prompts: Sequence[Sequence[int]]) -> list[Verdict]:
        """Judge prompts by their token ids; many at once cost little each."""
        found = []
        for views in self.views(prompts):
            p = p_value(self.calibration, self.scale.score(views))
            found.append(Verdict(p, "off" if p <= self.epsilon else "on", views))
        return found

    def views(self, prompts: Sequence[Sequence[int]]) -> list[Views | None]:
        return views_of(prompts, self.boilerplate, self.seen, self.meaning)

    def output_novelty(self, outputs: Sequence[Sequence[int]]) -> list[float]:
        """Share of each output's n-grams that the training data did not have: a figure beside the split, never it."""
        return [float(share) for texts in batches(outputs) for share in self.seen.novelty(texts, texts.all)]

    @property
    def off_rate(self) -> Share:
        """How often prompts like the training data are called off: at most ``epsilon`` on average, and within this
        interval for this very calibration set."""
        n = len(self.calibration)
        return Share.of(math.floor(self.epsilon * (n + 1)), n)

    @property
    def production_off(self) -> Share | None:
        """Share of the production sample that is off; None without a sample."""
        n = len(self.production)
        return Share.of(int((self.production <= self.epsilon).sum()), n) if n else None


def views_of(
    prompts: Sequence[Sequence[int] | Ids], boilerplate: Boilerplate, seen: Seen, meaning: Meaning
) -> list[Views | None]:
    """Both views of each prompt without its boilerplate; None where nothing is left."""
    found: list[Views | None] = []
    for texts in batches(prompts):
        content = boilerplate.content(texts)
        both = zip(meaning.distances(texts, content), seen.novelty(texts, content), strict=True)
        left = texts.sums(content).tolist()
        found += [
            Views(float(d), float(n), tokens) if tokens else None for tokens, (d, n) in zip(left, both, strict=True)
        ]
    return found


def p_value(calibration: NDArray[np.float64], score: float) -> float:
    """(1 + number of scores >= ``score``) / (n + 1); ``calibration`` rises."""
    as_strange = len(calibration) - int(np.searchsorted(calibration, score, side="left"))
    return (1 + as_strange) / (len(calibration) + 1)


def purity(off: Share, epsilon: float) -> Share:
    """At least what share of the requests called off is so indeed: 1 - epsilon / share.

    Of all requests at most ``epsilon`` are called off by chance alone, so of a share s that is off at most epsilon / s
    are chance. With 1% truly off, found with power .8, and epsilon .05 that is little: most of what is off is not.
    """
    value, lower, upper = (
        max(0.0, 1.0 - epsilon / share) if share > 0.0 else 0.0 for share in (off.value, off.lower, off.upper)
    )
    return Share(value, lower, upper, off.requests)
