"""Two drafts replayed on the same records: their counts side by side, as the candidate gate takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from driftwatch.acceptance import tally
from driftwatch.drift.paired import Pairs
from driftwatch.records import segment_id
from driftwatch.shadow.history import Outcome


@dataclass(frozen=True)
class Compared:
    """Pairs of records, their cells by name, and the records that one of the two could not be replayed on."""

    pairs: Pairs
    cells: list[str]
    skipped: dict[str, int]


def compare(
    candidate: Iterable[Outcome],
    incumbent: Iterable[Outcome],
    *,
    gamma: int,
    by: Sequence[str],
) -> Compared:
    """Pair outcomes of the same records in the same order; cells are made by the values of labels."""
    cells: dict[str, int] = {}
    units: dict[str, int] = {}
    rows: list[list[float]] = []
    skipped: Counter[str] = Counter()
    for number, (own, other) in enumerate(zip(candidate, incumbent, strict=True)):
        if own.weights is None or other.weights is None:
            skipped[own.skipped or other.skipped or "unknown"] += 1
            continue
        record = own.record
        cell = segment_id({label: record.labels.get(label, "none") for label in by})
        unit = f"session {record.session}" if record.session is not None else f"request {number}"
        row = [cells.setdefault(cell, len(cells)), units.setdefault(unit, len(units)), record.weight]
        row.append(own.weights.tokens)
        for outcome in (own, other):
            assert outcome.weights is not None
            found = tally(outcome.weights, gamma)
            row += [float(counts[gamma - 1]) for counts in (found.accepted, found.tested, found.steps)]
        rows.append(row)
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), 10).T
    pairs = Pairs(columns[0].astype(np.int64), columns[1].astype(np.int64), *columns[2:])
    return Compared(pairs, list(cells), dict(skipped))
