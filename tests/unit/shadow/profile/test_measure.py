"""Which shapes are measured, how often, and what becomes of the times."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.step import StepTime
from driftwatch.errors import ProfileError
from driftwatch.shadow.profile.loop import Lap
from driftwatch.shadow.profile.measure import ROUNDS, Grid, measure

CPU = torch.device("cpu")
TARGET, DRAFT = StepTime(0.02, 0.0005, context=1e-6), StepTime(0.002, 0.0001)


@dataclass
class Exact:
    """A loop whose times are known, the first call of each shape aside; too large a batch does not fit."""

    most_sequences: int | None = None
    fits: int = 8
    seen: set[tuple[int, int, int]] = field(default_factory=set)

    def laps(self, batch: int, context: int, gamma: int) -> list[Lap]:
        if batch > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        slow = 1.0 if (batch, context, gamma) in self.seen else 50.0
        self.seen.add((batch, context, gamma))
        return [Lap(slow * TARGET.seconds(batch, gamma, context), [slow * DRAFT.seconds(batch)] * gamma)] * 2


def test_the_fit_gives_the_costs_back() -> None:
    grid = Grid.of(CPU, batches=(1, 2, 4, 8), contexts=(100, 1000), gammas=(1, 4))
    points = measure(Exact(), grid, drafted=True)
    assert {point.repeats for point in points if point.part == "target"} == {2 * ROUNDS}
    found = CostProfile.fitted(Bound("a", "b", "c", "d"), points)
    for batch, gamma, context in ((1, 1, 100), (8, 4, 1000), (3, 2, 500)):
        cost = found.cost(batch, gamma, context)
        assert cost.plain_s == pytest.approx(TARGET.seconds(batch, 0, context))
        assert cost.verify_s == pytest.approx(TARGET.seconds(batch, gamma, context))
        assert cost.draft_s == pytest.approx(DRAFT.seconds(batch))
    assert found.error is not None
    assert found.error.rms < 1e-9


def test_what_does_not_fit_is_left_out() -> None:
    grid = Grid.of(CPU, batches=(1, 16), contexts=(100,), gammas=(1,))
    assert {point.batch for point in measure(Exact(), grid, drafted=False)} == {1}
    with pytest.raises(ProfileError, match="do not fit into memory"):
        measure(Exact(fits=0), grid, drafted=False)


def test_other_errors_are_not_swallowed() -> None:
    class Broken(Exact):
        def laps(self, batch: int, context: int, gamma: int) -> list[Lap]:
            raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        measure(Broken(), Grid.of(CPU), drafted=False)


def test_time_is_bounded() -> None:
    grid = Grid.of(CPU, batches=(1,), contexts=(10,), gammas=(1,))
    points = measure(Exact(), grid, drafted=True, budget_s=0.0)
    assert {point.repeats for point in points if point.part == "target"} == {4}  # two rounds


def test_the_grid() -> None:
    assert Grid.of(CPU).batches == [1, 2, 4, 8]
    assert max(Grid.of(torch.device("cuda")).batches) == 64
    assert Grid.of(CPU, most_sequences=1).batches == [1]
    assert Grid.of(CPU, batches=(4, 2), contexts=(9, 8), gammas=(3,)) == Grid([2, 4], [8, 9], [3])
    with pytest.raises(ProfileError, match="no batch of 4 can be measured: this loop decodes 1 at a time"):
        Grid.of(CPU, batches=(4,), most_sequences=1)
