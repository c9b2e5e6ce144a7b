"""The scenario suite of ``tests/benchmarks/scenarios`` at its smallest: that it runs, and says what it should."""

from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks.scenarios import causes, measure
from tests.benchmarks.scenarios.causes import SCENARIOS
from tests.benchmarks.scenarios.rivals import Oracle
from tests.benchmarks.scenarios.traffic import Shape, requests


@pytest.mark.parametrize("name", ["mix shift", "fall .20", "target swapped", "draft swapped", "engine fault", "load"])
def test_names_the_cause(name: str) -> None:
    found = causes.cause(name, 2, seed=1)
    assert (found["right"], found["wrong"], found["events while learning"]) == (2, 0, 0)
    assert found["acceptance alarms, runs with"] == (2 if SCENARIOS[name].acceptance_alarm else 0)


@pytest.mark.parametrize("name", ["stable", "label churn", "fall .02"])
def test_stays_silent(name: str) -> None:
    assert causes.cause(name, 1, seed=2)["no event"] == 1


def test_measures_delays_beside_rivals() -> None:
    found = measure.delays(2, 5000, seed=3, falls=(0.2,))["falls"]["0.2"]
    assert found["never"]["found"] == "0/2"
    assert found["always"]["median"] == 1.0
    assert 10 < found["ours"]["median"] < 120
    assert found["oracle, same run length"]["median"] < found["ours"]["median"]
    assert found["ours"]["early"] == 0


@pytest.mark.parametrize("alarms", [0, 3])
def test_an_oracle_has_as_many_alarms_as_it_is_given(alarms: int) -> None:
    stable = measure.units(np.random.default_rng(8), measure.ONE, 20_000)
    limit = measure.Quiet.of(stable).limit(0.61, alarms)
    oracle = Oracle(0.66, 0.56, limit)
    assert sum(map(oracle.alarms, stable)) == alarms


def test_other_measures_run() -> None:
    assert measure.coverage(30, seed=4)["requests"]["covered"] > 0.8
    assert measure.cost(2000, seed=5)["cell"] > 0
    assert measure.stable(2000, seed=6)["plain"]["alarms"] == 0


def test_a_seed_gives_one_stream_and_detectors_see_no_truth() -> None:
    one, other = (list(requests(np.random.default_rng(7), Shape(turns=5.0), 300, live=True)) for _ in range(2))
    assert one == other
    assert {len([r for r in one if r.session == s]) for s in {r.session for r in one}} <= set(range(1, 20))
    assert all(r.accepted <= r.tested and r.agreeing <= r.live_windows for r in one)
    hidden = {"off", "level", "match", "match_on", "match_off", "off_share", "engine_loss"}
    assert not hidden & set(one[0]._fields)
