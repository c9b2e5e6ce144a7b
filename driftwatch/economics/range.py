"""A figure with its limits, and how limits travel through a monotone formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from driftwatch.drift.interval import Estimate


@dataclass(frozen=True)
class Range:
    """A value between two limits; None is what the data cannot say.

    A monotone map of a parameter maps the limits of its confidence interval into limits of the result, at the same
    confidence: {lower <= x <= upper} and {f(lower) <= f(x) <= f(upper)} are one event. No further error is made, but
    none is added either: what else enters f (the cost profile) is taken as known, and its error is shown beside.
    """

    value: float | None = None
    lower: float | None = None
    upper: float | None = None

    @classmethod
    def of(cls, estimate: Estimate) -> Range:
        return cls(estimate.value, estimate.lower, estimate.upper)

    @property
    def limited(self) -> bool:
        """Whether both limits are known."""
        return self.lower is not None and self.upper is not None

    def map(self, formula: Callable[[float], float | None], *, falling: bool = False) -> Range:
        """Through a formula that rises, or falls, over the whole range; None where the formula has no number."""

        def put(x: float | None) -> float | None:
            return None if x is None else formula(x)

        value, lower, upper = put(self.value), put(self.lower), put(self.upper)
        return Range(value, upper, lower) if falling else Range(value, lower, upper)

    def to_json(self) -> list[Any]:
        return [self.value, self.lower, self.upper]

    @classmethod
    def from_json(cls, data: list[Any]) -> Range:
        return cls(*data)
