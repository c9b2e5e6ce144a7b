"""The suite at a size for ``make bench``: what must hold at any size, and its figures printed."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.scenarios import causes, measure

RUNS = 10
CERTAIN = (
    "mix shift",
    "fall .10",
    "fall .20",
    "ramp to .20",
    "target swapped",
    "target swapped in silence",
    "draft swapped",
    "engine fault",
    "engine fault, upgraded",
    "engine fault, no replay, upgraded",
    "load",
    "recovered",
)
"""Scenarios whose change is large enough to be seen within their length."""


@pytest.mark.parametrize("name", causes.SCENARIOS)
def test_cause(name: str) -> None:
    found = causes.cause(name, RUNS, seed=1)
    print(json.dumps({name: found}))
    assert found["events while learning"] == 0
    if name in CERTAIN:
        assert found["wrong"] == 0
        assert found["right"] >= RUNS - 1


def test_stable_traffic() -> None:
    found = measure.stable(100_000, seed=1)
    print(json.dumps(found))
    assert all(one["alarms"] == 0 for one in found.values())  # of about one promised


def test_delays() -> None:
    found = measure.delays(10, 100_000, seed=1)
    print(json.dumps(found))
    assert found["falls"]["0.1"]["ours"]["found"] == "10/10"
    assert found["falls"]["0.02"]["ours"]["found"] == "0/10"  # inside the tolerance


def test_coverage_and_cost() -> None:
    covered = measure.coverage(500, seed=1)
    cost = measure.cost(50_000, seed=1)
    print(json.dumps([covered, cost]))
    assert all(0.92 <= one["covered"] <= 0.98 for one in covered.values())
    assert cost["ratio"] < 300
