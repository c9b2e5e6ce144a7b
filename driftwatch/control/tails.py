"""Steps per token of a cell's requests, counted beside its sums: what speculation costs single users, up to the p99."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftwatch.drift.quantiles import Grid, Quantiles
from driftwatch.drift.sums import Sums
from driftwatch.economics.tail import MINIMUM_TOKENS

KEY = "steps_per_token"
"""Where the counts lie among a cell's or an hour's sums."""


def empty(gamma: int) -> Quantiles:
    return Quantiles(Grid.steps_per_token(gamma), MINIMUM_TOKENS)


def read(sums: Mapping[str, Any], gamma: int) -> Quantiles:
    """The counts stored beside sums; empty for those of another gamma, since their grid is another."""
    if KEY in sums:
        found = Quantiles.from_json(sums[KEY])
        if found.grid == Grid.steps_per_token(gamma):
            return found
    return empty(gamma)


def add(tail: Quantiles, request: Sums, gamma: int) -> None:
    """Count one request; one without a judged token has no figure."""
    if request.tokens:
        tail.add(float(request.tally.steps[gamma - 1]) / request.tokens, request.tokens)
