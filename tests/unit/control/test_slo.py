"""States of one segment's p99 from the shares of its windows; the comparison with Prometheus is an integration test."""

from __future__ import annotations

import pytest

from driftwatch.control import judgement
from driftwatch.control.slo import BURNS, WINDOWS, Verdict, window_name
from driftwatch.store.latencies import Over

M5, M30, H1, H6, D3 = WINDOWS


def verdict(requests: float = 1000.0, weight: float = 1.0, **shares: float) -> Verdict:
    names = dict(zip(("m5", "m30", "h1", "h6", "d3"), WINDOWS, strict=True))
    windows = {
        seconds: Over(requests * weight, requests * weight**2, requests * weight * shares.get(name, 0.0))
        for name, seconds in names.items()
    }
    return Verdict("ttft", "all", 1.0, 0.01, windows)


@pytest.mark.parametrize(
    ("shares", "state"),
    [
        ({}, "ok"),
        ({"h1": 0.15, "m5": 0.15}, "page"),
        ({"h1": 0.15}, "ok"),
        ({"m5": 0.5, "m30": 0.05}, "ok"),
        ({"h6": 0.07, "m30": 0.07}, "page"),
        ({"d3": 0.02, "h6": 0.02}, "ticket"),
        ({"d3": 0.02}, "ok"),
        ({"d3": 0.01, "h6": 0.01}, "ok"),
        ({"d3": 0.02, "h6": 0.07, "m30": 0.07}, "page"),
    ],
)
def test_a_burn_must_matter_and_last(shares: dict[str, float], state: str) -> None:
    assert verdict(**shares).state == state
    assert verdict(requests=50.0, **shares).state == "not enough data"
    assert verdict(requests=50.0, weight=30.0, **shares).state == "not enough data", "each stands for 30, and is one"


def test_windows_are_those_of_the_burns() -> None:
    assert {seconds for burn in BURNS for seconds in (burn.long_s, burn.short_s)} == set(WINDOWS)
    assert (M5, M30, H1, H6, D3) == (300, 1800, 3600, 21600, 259200)
    assert [window_name(seconds) for seconds in WINDOWS] == ["5m", "30m", "1h", "6h", "3d"]


def test_what_is_told() -> None:
    told = verdict(h1=0.2, m5=0.3).as_dict()
    assert told["burn"] == {"severity": "page", "rate": 14.4, "long_s": 3600, "short_s": 300}
    assert told["windows"]["300"] == {"requests": 1000.0, "over": 0.3}
    assert Verdict("tpot", "all", 0.05, 0.01, dict.fromkeys(WINDOWS, Over())).as_dict()["state"] == "not enough data"


def test_what_is_exported_rests_on_enough_requests() -> None:
    found = verdict(h1=0.2, m5=0.3)
    assert found.burn_rates == {M5: 30.0, M30: 0.0, H1: 20.0, H6: 0.0, D3: 0.0}
    samples = {
        (one.name, *one.labels.values()): one.value for family in judgement.slo([found]) for one in family.samples
    }
    assert samples["driftwatch_slo_burn_rate", "all", "ttft", "1h"] == 20.0
    assert samples["driftwatch_slo_limit_seconds", "ttft"] == 1.0
    states = {key[-1]: value for key, value in samples.items() if key[0] == "driftwatch_slo_state"}
    assert states == {"page": 1.0, "ticket": 0.0, "ok": 0.0, "not_enough_data": 0.0}
    assert verdict(requests=50.0, h1=0.2).burn_rates == {}
    few = verdict(h6=0.1)
    few = Verdict("ttft", "all", 1.0, 0.01, {**few.windows, M5: Over(), H1: Over(3.0, 3.0, 3.0)})
    assert sorted(few.burn_rates) == [M30, H6, D3], "three requests in an hour say nothing"
