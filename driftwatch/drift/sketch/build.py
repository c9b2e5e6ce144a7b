"""Building a sketch: a uniform sample of the training rows, parted into learnt from, tuned by and calibrated on.

Rows are chosen and parted by a hash of their prompt, so the same data always gives the same sketch, and copies of one
prompt count once and lie on one side. Near copies may lie on both: then the held-out prompts look more familiar than
new ones will, and more of those come out as off.

A production sample says what is boilerplate there, a new system prompt above all, and how much of it is off. It is not
calibrated on: traffic that is off already would become the norm.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from driftwatch.drift.sketch.boilerplate import Boilerplate
from driftwatch.drift.sketch.grams import Ids, Seen, Texts
from driftwatch.drift.sketch.meaning import Meaning
from driftwatch.drift.sketch.sketch import Scale, Sketch, Views, p_value, views_of
from driftwatch.errors import SketchError

MOST_ROWS = 20_000
MOST_CALIBRATION, MOST_TUNING = 4000, 1000
LEAST_ROWS = 100
MOST_PRODUCTION = 4000
LEAST_PRODUCTION = 50
MOST_TOKENS = 8192
"""Of one row: its beginning."""
EPSILON = 0.05
_ALL_ALIKE = "the training prompts are all boilerplate: there is no distribution to be on or off"


@dataclass(frozen=True)
class Row:
    """One request of the training data, or of a production sample: the prompt, and all that was learnt from with it."""

    prompt: Ids
    text: Ids

    def cut(self) -> Row:
        return Row(self.prompt[:MOST_TOKENS], self.text[:MOST_TOKENS])


def build(
    rows: Iterable[Row],
    embedding: NDArray[np.float32],
    *,
    draft: str,
    epsilon: float = EPSILON,
    production: Iterable[Row] | None = None,
) -> Sketch:
    """A sketch for the draft of this fingerprint; ``embedding`` [vocabulary, hidden] is of the tokens' own model.

    Raises SketchError if there are too few different prompts to learn from, or to reach ``epsilon`` at all.
    """
    chosen = _sample(rows, MOST_ROWS)
    if len(chosen) < LEAST_ROWS:
        raise SketchError(
            f"only {len(chosen)} different prompts in the training data; a sketch needs {LEAST_ROWS}, better 8000"
        )
    held = min(len(chosen) // 4, MOST_CALIBRATION)
    tuned = min(len(chosen) // 8, MOST_TUNING)
    calibration, tuning, learnt = chosen[:held], chosen[held : held + tuned], chosen[held + tuned :]
    if math.floor(epsilon * (held + 1)) < 1:
        raise SketchError(
            f"epsilon {epsilon:g} needs {math.ceil(1 / epsilon) - 1} held-out prompts, there are {held}: give more data"
        )
    sample = _sample(production or (), MOST_PRODUCTION)
    if production is not None and len(sample) < LEAST_PRODUCTION:
        raise SketchError(f"only {len(sample)} different prompts in the production sample; give {LEAST_PRODUCTION}")
    boilerplate = Boilerplate.of([row.prompt for row in learnt], [row.prompt for row in sample])
    seen = Seen.of([row.text for row in learnt])
    contents = [texts.ids[boilerplate.content(texts)] for texts in map(_alone, learnt)]
    telling = [content for content in contents if len(content)]
    if not telling:
        raise SketchError(_ALL_ALIKE)
    meaning = Meaning.of(embedding, telling)

    def views(part: list[Row]) -> list[Views | None]:
        return views_of([row.prompt for row in part], boilerplate, seen, meaning)

    tuned_by = [found for found in views(tuning) if found is not None]
    if not tuned_by:
        raise SketchError(_ALL_ALIKE)
    scale = Scale.of(tuned_by)
    scores = np.sort([scale.score(found) for found in views(calibration)])
    p_values = np.sort([p_value(scores, scale.score(found)) for found in views(sample)])
    return Sketch(draft, epsilon, len(chosen), boilerplate, seen, meaning, scale, scores, p_values)


def _alone(row: Row) -> Texts:
    return Texts.of([row.prompt])


def _sample(rows: Iterable[Row], most: int) -> list[Row]:
    """The rows whose prompts have the smallest hashes, in that order, each prompt once."""
    kept: dict[int, Row] = {}
    largest: list[int] = []
    for row in rows:
        if not len(row.prompt):
            continue
        hashed = int.from_bytes(blake2b(row.prompt.astype("<i4").tobytes(), digest_size=16).digest())
        if hashed in kept or (len(kept) == most and hashed > -largest[0]):
            continue
        kept[hashed] = row.cut()
        heapq.heappush(largest, -hashed)
        if len(kept) > most:
            del kept[-heapq.heappop(largest)]
    return [kept[hashed] for hashed in sorted(kept)]
