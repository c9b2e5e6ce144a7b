"""Which side of a draft's training distribution each sample is on, as its sketch says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from driftwatch.drift.sketch.sketch import Sketch
from driftwatch.shadow.draft import Tokens


@dataclass(frozen=True)
class Split:
    """``figures``: the p-value, the novelty of the prompt's content (absent where all of it is boilerplate) and that of
    the output, which does not decide the side."""

    side: Literal["on", "off", "none"] = "none"
    figures: dict[str, float] = field(default_factory=dict)


def splits(sketch: Sketch | None, samples: Sequence[Tokens]) -> list[Split]:
    """One for each sample; ``none`` where the draft has no sketch."""
    if sketch is None:
        return [Split() for _ in samples]
    verdicts = sketch.score([tokens.prompt for tokens in samples])
    outputs = sketch.output_novelty([tokens.output for tokens in samples])
    found = []
    for verdict, output in zip(verdicts, outputs, strict=True):
        prompt = {} if verdict.views is None else {"novelty": verdict.views.novelty}
        found.append(Split(verdict.side, {"p": verdict.p} | prompt | {"output_novelty": output}))
    return found
