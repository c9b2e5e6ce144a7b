"""Replays of candidate and incumbent on one sample become a pair, and pairs the arrays that the gate tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from driftwatch.acceptance import Weights, tally
from driftwatch.drift.paired import Pairs, units_in_order
from driftwatch.store.schema import Candidate, Pair, Replay, Sample

CellKey = tuple[str, str]
"""Segment and split."""


def pair(candidate: Candidate, sample: Sample, own: Replay, incumbent: Replay, *, gamma: int) -> dict[str, Any]:
    """Columns of a pair; its cell is the incumbent's, by whose sketch the split is. Raises ValueError if one of the two
    was not replayed as deep."""
    found = {name: counts(_weights(replay), gamma) for name, replay in (("", own), ("incumbent_", incumbent))}
    return {
        "candidate_id": candidate.id,
        "sample_id": sample.id,
        "segment": sample.segment,
        "split": incumbent.split,
        "session": sample.session,
        "served_at": sample.served_at,
        "weight": sample.weight,
        "tokens": own.tokens,
    } | {f"{name}{count}": value for name, figures in found.items() for count, value in figures.items()}


def _weights(replay: Replay) -> Weights:
    return Weights.decode(
        replay.encoding,
        replay.weights,
        tokens=replay.tokens,
        depths=replay.depths,
        proposals=replay.proposals,
    )


def counts(weights: Weights, gamma: int) -> dict[str, float]:
    """What a pair holds of one side, at the configured proposal length. Raises ValueError if it was not replayed as
    deep."""
    gamma = weights.values.shape[1] if weights.walked else gamma  # a tree's are its steps, whatever is configured
    found, column = tally(weights, gamma), gamma - 1
    figures = {"accepted": found.accepted, "tested": found.tested, "steps": found.steps}
    return {name: float(values[column]) for name, values in figures.items()}


def arrays(rows: list[Pair], *, sequential: bool = False) -> tuple[list[CellKey], Pairs]:
    """Segment and split of each cell, and the pairs as arrays, units numbered as the one test or the other wants."""
    cells = sorted({(row.segment, row.split) for row in rows})
    number = {key: i for i, key in enumerate(cells)}
    if sequential:
        unit = units_in_order([row.session for row in rows], [row.served_at for row in rows])
    else:
        units: dict[str, int] = {}
        named = (f"s{row.session}" if row.session is not None else f"r{row.sample_id}" for row in rows)
        unit = np.array([units.setdefault(name, len(units)) for name in named], dtype=np.int64)

    def column(name: str) -> Any:
        return np.array([getattr(row, name) for row in rows], dtype=np.float64)

    cell = np.array([number[row.segment, row.split] for row in rows], dtype=np.int64)
    figures = ("weight", "tokens", "accepted", "tested", "steps")
    incumbent = ("incumbent_accepted", "incumbent_tested", "incumbent_steps")
    return cells, Pairs(cell, unit, *(column(name) for name in (*figures, *incumbent)))


def names(cells: list[CellKey]) -> list[str]:
    return [segment if split == "none" else f"{segment} ({split})" for segment, split in cells]
