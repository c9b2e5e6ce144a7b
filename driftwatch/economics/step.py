"""How long one pass takes: a memory-bound floor, a compute-bound slope, and what the cache of past tokens adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

Part = Literal["target", "draft", "window"]
"""What was timed: a pass of the target, one proposal of the draft, or a whole window (proposals and verification)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one pass over B sequences that carries 1 + gamma tokens of each, n = B (1 + gamma) in all:

        t = floor + slope n + roof max(knee, n) + (extra + stair(gamma)) [gamma > 0] + context B L

    ``floor``: weights are read and kernels launched whatever the batch. ``slope``: every token costs arithmetic that is
    not hidden behind that reading. ``roof``: arithmetic that is hidden up to ``knee`` tokens, then shows (the roofline
    of Williams et al. 2009: max(a, b n) is roof = b, knee = a / b; the plain sum a + b n is roof = 0; real devices lie
    in between, and the data choose). ``extra``: a pass of several tokens a sequence runs other kernels and a sampler.
    ``stairs``: matrices are multiplied in tiles, so that one token more a sequence can cost nothing, or a tile (four
    cost 1.4 times what three do on one CPU); linear between the lengths that were measured.
    ``context``: reading L cached tokens a sequence, once a pass however many tokens it verifies (which is why
    speculation pays again at large batches of long contexts, MagicDec, arXiv 2408.11049).

    No coefficient is negative. Two properties follow, and :mod:`driftwatch.economics.load` rests on them: t never falls
    with B, and t / B never rises. The second is why max(knee, n) is the basis and not max(0, n - knee): with the latter
    a steep fit could claim that throughput falls as the batch grows.
    """

    floor: float = 0.0
    slope: float = 0.0
    roof: float = 0.0
    knee: float = 0.0
    extra: float = 0.0
    context: float = 0.0
    stairs: tuple[tuple[float, float], ...] = ()
    """(gamma, seconds) in order of gamma."""

    def __post_init__(self) -> None:
        numbers = [(name, value) for name, value in asdict(self).items() if name != "stairs"]
        for name, value in [*numbers, *(("stairs", number) for stair in self.stairs for number in stair)]:
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, not {value}")
        if any(low >= high for (low, _), (high, _) in pairwise(self.stairs)):
            raise ValueError("stairs must come in order of gamma")

    def seconds(self, batch: float, gamma: float = 0.0, context: float = 0.0) -> float:
        """Below one sequence there is no pass: a mean batch under 1 is an engine that idles between requests."""
        sequences = max(batch, 1.0)
        tokens = sequences * (1.0 + gamma)
        time = self.floor + self.slope * tokens + self.context * sequences * context
        if gamma > 0.0:
            time += self.extra
            if self.stairs:
                gammas, seconds = zip(*self.stairs, strict=True)
                time += float(np.interp(gamma, gammas, seconds))
        return time + self.roof * max(self.knee, tokens)

    def scaled(self, factor: float) -> StepTime:
        """Every time multiplied by ``factor``; the knee is a number of tokens and stays."""
        return replace(
            self,
            floor=self.floor * factor,
            slope=self.slope * factor,
            roof=self.roof * factor,
            extra=self.extra * factor,
            context=self.context * factor,
            stairs=tuple((gamma, seconds * factor) for gamma, seconds in self.stairs),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepTime:
        stairs = tuple((float(gamma), float(seconds)) for gamma, seconds in data.get("stairs", ()))
        return cls(**{**data, "stairs": stairs})


@dataclass(frozen=True)
class Timing:
    """One measured point: the median, or mean, of ``repeats`` passes."""

    part: Part
    batch: float
    """Sequences in the pass; an engine's gauge of running requests may be a mean."""
    seconds: float
    gamma: int = 0
    """Proposals verified beside the one plain token; 0 is a plain step. Always 0 for ``draft``."""
    context: float = 0.0
    """Mean tokens a sequence already has in the cache."""
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.part not in get_args(Part):
            raise ValueError(f"a timing of {self.part!r}, which is none of {', '.join(get_args(Part))}")
        if not 0.0 < self.seconds < float("inf"):
            raise ValueError(f"a pass takes a positive time, not {self.seconds} s")
        if not 1.0 <= self.batch < float("inf") or self.gamma < 0 or self.repeats < 1:
            raise ValueError(f"batch {self.batch} and repeats {self.repeats} start at 1, gamma {self.gamma} at 0")
        if not 0.0 <= self.context < float("inf"):
            raise ValueError(f"a context of {self.context} tokens is none")
        if (self.part == "draft" and self.gamma) or (self.part == "window" and not self.gamma):
            raise ValueError(f"a {self.part} timing with gamma {self.gamma}: a window has proposals, a draft pass none")

    @classmethod
    def exported(
        cls,
        *,
        batch: float,
        gamma: int,
        token_seconds: float,
        length: float = 1.0,
        context: float = 0.0,
        repeats: int = 1,
    ) -> Timing:
        """From what a live engine says: time per output token and, where it speculates, its acceptance length.

        One step gives ``length`` tokens, so it lasts length times the time per token. vLLM's inter-token latency is
        already a time per step (one observation a request and step): pass it with length 1. The batch must be the mean
        over the same interval as the time: noise in a gauge that is read at one instant flattens the fitted slope.
        """
        if not 1.0 <= length <= 1.0 + gamma:
            raise ValueError(f"acceptance length {length} is impossible with gamma {gamma}")
        return cls("window" if gamma else "target", batch, token_seconds * length, gamma, context, repeats)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timing:
        return cls(**data)
