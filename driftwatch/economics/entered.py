"""Costs that somebody measured elsewhere and wrote down, as points to fit: c and v beside the time of a plain step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.step import Timing
from driftwatch.errors import ProfileError

EXAMPLE = "batches: [{batch: 1, step_ms: 20, c: 0.1, v: {4: 1.05}}]"
FACTS = ("device", "dtype", "target", "draft")


def entered(data: Mapping[str, Any]) -> CostProfile:
    """One entry a batch: ``step_ms`` (a plain step), ``c`` (draft pass / plain step; left out: no draft), ``v`` (by
    gamma, verification / plain step), ``context`` (tokens a sequence has in its cache, 0 unless said). ``device``,
    ``dtype``, ``target`` and ``draft`` say what it holds for; what is left out is not compared.

    Raises ProfileError naming the entry and the key.
    """
    if unknown := sorted(set(map(str, data)) - {*FACTS, "batches"}):
        raise ProfileError(f"unknown key `{unknown[0]}`; write {EXAMPLE}")
    rows = data.get("batches")
    if not isinstance(rows, list) or not rows:
        raise ProfileError(f"`batches` must hold at least one entry; write {EXAMPLE}")
    points: list[Timing] = []
    for number, row in enumerate(rows):
        points += _points(number, row)
    facts = [str(data.get(name) or "") for name in FACTS]
    return CostProfile.fitted(Bound(*facts), points, "entered")


def _points(number: int, row: Any) -> list[Timing]:
    if not isinstance(row, dict) or not {"batch", "step_ms"} <= set(row):
        raise ProfileError(f"`batches[{number}]` needs batch and step_ms; write {EXAMPLE}")
    if unknown := sorted(set(map(str, row)) - {"batch", "step_ms", "c", "v", "context"}):
        raise ProfileError(f"`batches[{number}]`: unknown key `{unknown[0]}`; write {EXAMPLE}")
    try:
        batch, step, context = float(row["batch"]), float(row["step_ms"]) / 1000.0, float(row.get("context", 0.0))
        found = [Timing("target", batch, step, 0, context)]
        found += [Timing("target", batch, float(v) * step, int(g), context) for g, v in (row.get("v") or {}).items()]
        if row.get("c"):
            found.append(Timing("draft", batch, float(row["c"]) * step, 0, context))
    except (TypeError, ValueError, AttributeError) as bad:
        raise ProfileError(f"`batches[{number}]`: {bad}; write {EXAMPLE}") from None
    return found
