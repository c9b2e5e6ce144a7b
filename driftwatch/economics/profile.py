"""What a plain step, a verification and a proposal cost on one device, and where these costs were measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from driftwatch.economics.fit import FitError, fit
from driftwatch.economics.shape import CHAIN, Shape
from driftwatch.economics.step import StepTime, Timing
from driftwatch.errors import ProfileError

Provenance = Literal["measured", "engine", "entered"]
PROVENANCES: tuple[Provenance, ...] = ("measured", "engine", "entered")
FORMAT = 1


@dataclass(frozen=True)
class Bound:
    """What a profile holds for, and for nothing else; target and draft by their fingerprints."""

    device: str
    dtype: str
    target: str
    draft: str | None = None

    def differences(self, other: Bound) -> tuple[str, ...]:
        """One line a difference; empty where a profile of this may be used for ``other``."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return tuple(f"{name} is {theirs}, the profile is of {mine}" for name, mine, theirs in pairs if mine != theirs)


@dataclass(frozen=True)
class Cost:
    """Costs at one batch, proposal length and context; ``draft`` is c(B) of one pass, ``verify`` v(gamma, B)."""

    batch: float
    gamma: float
    context: float
    plain_s: float
    draft_s: float
    verify_s: float
    origin: str
    """How the costs came about (:attr:`CostProfile.origin`)."""
    outside: tuple[str, ...] = ()
    """One line for each coordinate that lies outside what was measured: the figures are then extrapolated."""
    passes: float | None = None
    """Of the draft in a window (:meth:`driftwatch.economics.shape.Shape.passes`); None: one a proposal."""

    @property
    def draft(self) -> float:
        """Seconds of one pass of the draft, which is one proposal of a chain / seconds of one plain step."""
        return self.draft_s / self.plain_s

    @property
    def verify(self) -> float:
        """Seconds of the pass that verifies a window's proposals / seconds of one plain step."""
        return self.verify_s / self.plain_s

    @property
    def window_s(self) -> float:
        return (self.gamma if self.passes is None else self.passes) * self.draft_s + self.verify_s

    @property
    def window(self) -> float:
        """gamma c + v (of a block c + v, of a tree steps c + v): plain steps that one window costs, hence the
        break-even acceptance length."""
        return self.window_s / self.plain_s


@dataclass(frozen=True)
class CostProfile:
    """Step times of target and draft with their origin. Without ``draft``, only plain steps and verification."""

    bound: Bound
    provenance: Provenance
    target: StepTime
    draft: StepTime | None = None
    draft_provenance: Provenance | None = None
    error: FitError | None = None
    """None where nothing was fitted."""
    timings: tuple[Timing, ...] = ()
    """The points, so that the measured range is known and another fit can be made."""
    parallel: tuple[int, float, float] = (1, 1.0, 1.0)
    """GPUs, and the factors by which they speed up target and draft, all applied to the times already."""
    shape: Shape = CHAIN
    """How the draft makes the proposals of a window; its times are of one pass of that kind."""

    def __post_init__(self) -> None:
        for name in (self.provenance, self.draft_provenance or self.provenance):
            if name not in PROVENANCES:
                raise ProfileError(f"provenance {name!r} is none of {', '.join(PROVENANCES)}")
        if not self.target.seconds(1.0) > 0.0:
            raise ProfileError("a plain decode step must take some time: the fit gives none")

    @classmethod
    def fitted(
        cls, bound: Bound, timings: Iterable[Timing], provenance: Provenance = "measured", shape: Shape = CHAIN
    ) -> CostProfile:
        """From measured points, or with provenance ``engine`` from what a live engine exports (`Timing.exported`).

        From windows of a single gamma the draft cannot be told from verification; their sum is right at that gamma,
        and any other gamma is reported as outside. Raises ProfileError where the points do not suffice.
        """
        points = tuple(timings)
        try:
            target, draft, error = fit(points)
        except ValueError as bad:
            raise ProfileError(f"no cost profile: {bad}") from None
        named = None if draft is None else provenance
        return cls(bound, provenance, target, draft, named, error, points, shape=shape)

    @classmethod
    def entered(cls, bound: Bound, target: StepTime, draft: StepTime | None = None) -> CostProfile:
        """By hand. It has no measured range, so nothing lies outside of it: whoever entered it vouches for it."""
        return cls(bound, "entered", target, draft, None if draft is None else "entered")

    def with_draft(self, cost: float) -> CostProfile:
        """A supposed chain draft that costs ``cost`` plain steps a proposal at every batch: for sizing."""
        if not 0.0 <= cost < math.inf:
            raise ValueError(f"a draft cannot cost {cost} plain steps")
        drafting = replace(self.target, extra=0.0, stairs=()).scaled(cost)
        return replace(self, draft=drafting, draft_provenance="entered", shape=CHAIN)

    def on_gpus(self, gpus: int, target: float | None = None, draft: float = 1.0) -> CostProfile:
        """Tensor parallelism as a factor: the target is ``target`` times as fast, the draft ``draft`` times.

        Unless known, the target is taken to scale without loss and the draft (run on one GPU, or too small to gain)
        not at all. That is the least favourable case for speculation: c grows by target / draft, v stays.
        """
        faster = float(gpus) if target is None else target
        if gpus < 1 or not faster > 0.0 or not draft > 0.0:
            raise ValueError(f"{gpus} GPUs with factors {faster} and {draft}: all must be positive")
        drafting = None if self.draft is None else self.draft.scaled(1.0 / draft)
        ways, so_far, so_far_draft = self.parallel
        factors = (ways * gpus, so_far * faster, so_far_draft * draft)
        return replace(self, target=self.target.scaled(1.0 / faster), draft=drafting, parallel=factors)

    def cost(self, batch: float, gamma: float, context: float | None = None) -> Cost:
        """Costs at a batch; ``gamma`` may be a mean (n-gram windows propose fewer than asked for)."""
        at = self.usual_context if context is None else context
        plain, drafting = self.target.seconds(batch, 0.0, at), self.drafting.seconds(batch, 0.0, at)
        verify = self.target.seconds(batch, self.shape.verified(gamma), at)
        outside, passes = self.outside(batch, gamma, at), self.shape.passes(gamma)
        return Cost(batch, gamma, at, plain, drafting, verify, self.origin, outside, passes)

    def plain_s(self, batch: float, context: float | None = None) -> float:
        return self.target.seconds(batch, 0.0, self.usual_context if context is None else context)

    def window_s(self, batch: float, gamma: float, context: float | None = None) -> float:
        at, shape = self.usual_context if context is None else context, self.shape
        drafting = self.drafting.seconds(batch, 0.0, at)
        return shape.passes(gamma) * drafting + self.target.seconds(batch, shape.verified(gamma), at)

    @property
    def origin(self) -> str:
        """Where the costs come from, to be shown wherever one of them is; what is no chain says so."""
        said: str = self.provenance
        if self.draft_provenance not in (None, self.provenance):
            said += f", draft {self.draft_provenance}"
        return said if self.shape == CHAIN else f"{said}, priced as {self.shape.described}"

    @property
    def drafting(self) -> StepTime:
        if self.draft is None:
            raise ProfileError("this cost profile has no draft: measure one, or enter its cost")
        return self.draft

    @cached_property
    def usual_context(self) -> float:
        """Mean context of the points of the target: what is meant where no context is given."""
        contexts = [point.context for point in self.timings if point.part != "draft"]
        return sum(contexts) / len(contexts) if contexts else 0.0

    @cached_property
    def batches(self) -> tuple[float, float] | None:
        """Range of batches of which every needed part was measured; None where nothing was."""
        kinds: dict[str, list[float]] = {}
        for point in self.timings:
            kinds.setdefault("plain" if not point.gamma and point.part == "target" else point.part, []).append(
                point.batch
            )
        if self.draft_provenance == "entered":
            kinds.pop("draft", None)
        return (max(map(min, kinds.values())), min(map(max, kinds.values()))) if kinds else None

    def outside(self, batch: float, gamma: float, context: float) -> tuple[str, ...]:
        """What of this point was never measured, one line each; a mean batch below 1 is read as 1.

        A context of 0 is one that nobody said: costs whose contexts are all unsaid are taken to hold at any.
        """
        if not self.timings or self.batches is None:
            return ()
        gammas = [point.gamma for point in self.timings if point.gamma] or [0]
        contexts = [point.context for point in self.timings if point.part != "draft"]
        named, at = "proposals verified" if self.shape.kind == "tree" else "gamma", self.shape.verified(gamma)
        checks = [
            ("batch", max(batch, 1.0), *self.batches),
            # A mean of fewer proposals than the smallest gamma lies between that gamma and a plain step, both measured.
            (named, at, 0.0 if at != int(at) else min(gammas), max(gammas)),
        ]
        if max(contexts) > 0.0:
            checks.append(("context", context, min(contexts), max(contexts)))
        return tuple(
            f"{name} {round(at, 1):g} lies outside what was measured, {low:g} to {high:g}"
            for name, at, low, high in checks
            if not low - 1e-9 <= at <= high + 1e-9
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "bound": asdict(self.bound),
            "provenance": self.provenance,
            "target": self.target.to_json(),
            "draft": None if self.draft is None else self.draft.to_json(),
            "draft_provenance": self.draft_provenance,
            "error": None if self.error is None else asdict(self.error),
            "timings": [point.to_json() for point in self.timings],
            "parallel": list(self.parallel),
            "shape": str(self.shape),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostProfile:
        """Inverse of :meth:`to_json`, exactly. Raises ProfileError for anything else."""
        try:
            if data["format"] != FORMAT:
                raise ProfileError(f"cost profile of format {data['format']}, this version reads {FORMAT}")
            gpus, target, draft = map(float, data["parallel"])
            bound = Bound(**data["bound"])
            if not all(isinstance(fact, str | None) for fact in vars(bound).values()):
                raise ValueError("`bound` holds something else than text")
            return cls(
                bound,
                data["provenance"],
                StepTime.from_json(data["target"]),
                None if data["draft"] is None else StepTime.from_json(data["draft"]),
                data["draft_provenance"],
                None if data["error"] is None else FitError(**data["error"]),
                tuple(Timing.from_json(point) for point in data["timings"]),
                (int(gpus), target, draft),
                Shape.of(data.get("shape", "chain")),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as bad:
            raise ProfileError(f"not a cost profile: {type(bad).__name__} {bad}") from None
