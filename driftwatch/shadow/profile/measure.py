"""Measured points of a cost profile: every shape in turn, over and over, the median of each."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from driftwatch.economics.step import Timing
from driftwatch.errors import ProfileError
from driftwatch.shadow.device import is_out_of_memory
from driftwatch.shadow.profile.loop import Lap, Loop

log = logging.getLogger(__name__)

ROUNDS = 5
BUDGET_S = 120.0
"""Rounds beyond the second are left out when they would take longer than that altogether."""


@dataclass(frozen=True)
class Grid:
    """Which shapes are measured."""

    batches: Sequence[int]
    contexts: Sequence[int]
    gammas: Sequence[int]

    @classmethod
    def of(
        cls,
        device: torch.device,
        *,
        batches: Sequence[int] = (),
        contexts: Sequence[int] = (),
        gammas: Sequence[int] = (),
        most_sequences: int | None = None,
    ) -> Grid:
        """What is not said is chosen: up to eight sequences on a CPU, up to 64 on a GPU."""
        usual = (1, 2, 4, 8) if device.type == "cpu" else (1, 2, 4, 8, 16, 32, 64)
        fitting = [batch for batch in batches or usual if most_sequences is None or batch <= most_sequences]
        if not fitting:
            asked = ", ".join(map(str, batches))
            raise ProfileError(f"no batch of {asked} can be measured: this loop decodes {most_sequences} at a time")
        lengths = contexts or ((16, 512) if device.type == "cpu" else (64, 4096))
        return cls(sorted(fitting), sorted(lengths), sorted(gammas or (1, 3, 5, 8)))


def measure(loop: Loop, grid: Grid, *, drafted: bool, budget_s: float = BUDGET_S) -> list[Timing]:
    """One point for each shape that fits into memory: plain steps, verifications and, with ``drafted``, proposals.

    The first round warms up and is thrown away. Rounds are interleaved, so that what else the machine does hits all
    shapes alike. Raises ProfileError if not even the smallest shape can be measured.
    """
    began = time.perf_counter()
    shapes = [(batch, context) for context in grid.contexts for batch in grid.batches]
    laps: dict[tuple[int, int, int], list[Lap]] = {}
    for number in range(1 + ROUNDS):
        for shape in list(shapes):
            try:
                # The largest first: from it a loop learns what a single proposal takes.
                for gamma in (*reversed(grid.gammas), 0):
                    found = loop.laps(*shape, gamma)
                    if number:
                        laps.setdefault((*shape, gamma), []).extend(found)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                log.warning("out of memory at batch %d, context %d: left out", *shape)
                shapes.remove(shape)
        taken = time.perf_counter() - began
        if number >= 2 and taken * (number + 2) / (number + 1) > budget_s:
            break
    if not any(gamma == 0 and found for (*_, gamma), found in laps.items()):
        raise ProfileError("no step could be measured: the smallest batch and context do not fit into memory")
    return list(_points(laps, drafted=drafted))


def _points(laps: dict[tuple[int, int, int], list[Lap]], *, drafted: bool) -> list[Timing]:
    points = []
    drafts: dict[tuple[int, int], list[float]] = {}
    for (batch, context, gamma), found in laps.items():
        if found:
            points.append(
                Timing("target", batch, median(lap.verify for lap in found), gamma, float(context), len(found))
            )
        drafts.setdefault((batch, context), []).extend(s for lap in found for s in lap.drafts)
    if drafted:
        points += [
            Timing("draft", batch, median(seconds), 0, float(context), len(seconds))
            for (batch, context), seconds in drafts.items()
            if seconds
        ]
    return points
