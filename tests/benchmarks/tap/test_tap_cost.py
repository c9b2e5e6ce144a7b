"""`make bench`: the tap beside nginx. Run alone on a quiet machine for figures that mean something."""

from __future__ import annotations

import statistics

import pytest

from tests.benchmarks.tap.bench import measure, table


@pytest.mark.timeout(900)
def test_a_relayed_chunk_costs_no_more_than_two_and_a_half_times_nginx() -> None:
    ways = {way.name: way for way in measure(3)}
    print("\n" + table(list(ways.values())))
    if "nginx" not in ways:
        pytest.skip("nginx is not installed: there is nothing to compare with")
    cpu = {name: statistics.median(way.cpu_us) for name, way in ways.items()}
    assert cpu["tap, 5 % sampled"] <= 2.5 * cpu["nginx"]
    assert cpu["tap, 5 % sampled, answers rewritten"] <= 2.5 * cpu["nginx"]
