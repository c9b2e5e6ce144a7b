"""Costs that somebody measured elsewhere and wrote down, as points to fit: c and v beside the time of a plain step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from driftwatch.economics.profile import Bound, CostProfile
from driftwatch.economics.shape import Shape
from driftwatch.economics.step import Timing
from driftwatch.errors import ProfileError

EXAMPLE = "batches: [{batch: 1, step_ms: 20, c: 0.1, v: {4: 1.05}}]"
FACTS = ("device", "dtype", "target", "draft")


def entered(data: Mapping[str, Any]) -> CostProfile:
    """One entry a batch: ``step_ms`` (a plain step), ``c`` (a pass of the draft / plain step; left out: no draft, 0:
    one that costs nothing), ``v`` (verification / plain step, by the tokens that are verified beside the last one:
    gamma, of a tree its tokens less 1), ``context`` (tokens a sequence has in its cache; where no entry says it, the
    costs are taken to hold at any). ``shape`` is how the draft makes its proposals (``chain`` unless said, see
    :class:`driftwatch.economics.shape.Shape`). ``device``, ``dtype``, ``target`` and ``draft`` say what it holds for;
    what is left out is not compared.

    Raises ProfileError naming the entry and the key.
    """
    if unknown := sorted(set(map(str, data)) - {*FACTS, "batches", "shape"}):
        raise ProfileError(f"unknown key `{unknown[0]}`; write {EXAMPLE}")
    rows = data.get("batches")
    if not isinstance(rows, list) or not rows:
        raise ProfileError(f"`batches` must hold at least one entry; write {EXAMPLE}")
    try:
        shape = Shape.of(str(data.get("shape", "chain")))
    except ValueError as bad:
        raise ProfileError(str(bad)) from None
    points: list[Timing] = []
    for number, row in enumerate(rows):
        points += _points(number, row)
    facts = [str(data.get(name) or "") for name in FACTS]
    found = CostProfile.fitted(Bound(*facts), points, "entered", shape)
    given = [row["c"] for row in rows if row.get("c") is not None]
    if given and found.draft is None:
        return replace(found.with_draft(0.0), shape=shape)
    if not all(given):
        raise ProfileError("`c` is 0 in some entries of `batches` and more in others: leave out those that are 0")
    return found


def _points(number: int, row: Any) -> list[Timing]:
    if not isinstance(row, dict) or not {"batch", "step_ms"} <= set(row):
        raise ProfileError(f"`batches[{number}]` needs batch and step_ms; write {EXAMPLE}")
    if unknown := sorted(set(map(str, row)) - {"batch", "step_ms", "c", "v", "context"}):
        raise ProfileError(f"`batches[{number}]`: unknown key `{unknown[0]}`; write {EXAMPLE}")
    try:
        batch, step, context = float(row["batch"]), float(row["step_ms"]) / 1000.0, float(row.get("context", 0.0))
        found = [Timing("target", batch, step, 0, context)]
        for verified, v in (row.get("v") or {}).items():
            found.append(Timing("target", batch, float(v) * step, _whole(verified), context))
        if row.get("c"):
            found.append(Timing("draft", batch, float(row["c"]) * step, 0, context))
    except (TypeError, ValueError, AttributeError) as bad:
        raise ProfileError(f"`batches[{number}]`: {bad}; write {EXAMPLE}") from None
    return found


def _whole(verified: Any) -> int:
    count = float(verified)
    if not 1.0 <= count < 1e6 or count != int(count):
        raise ValueError(f"`v` is by whole numbers of tokens, at least 1, not {verified}")
    return int(count)
