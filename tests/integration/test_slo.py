"""The p99 of what users wait for: control's verdict, from samples, beside that of the Prometheus rules, from the taps'
histograms, on the same synthetic requests."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
import yaml
from fastapi.testclient import TestClient

from driftwatch.control import slo
from driftwatch.control.app import create_app
from driftwatch.settings import Settings
from driftwatch.store import latencies, retention
from driftwatch.store.connection import Store
from driftwatch.store.schema import Delivery, Event, Latency

RULES = Path(__file__).parents[2] / "deploy/kustomize/components/monitoring/rules.yaml"
BEGIN = 1_790_000_000 // 3600 * 3600
"""A whole hour."""
MINUTE = 60
SETTINGS = Settings(
    slo={"ttft_s": 1.0, "tpot_s": 0.05},
    webhooks=[{"name": "hook", "url": "http://127.0.0.1:9/hook", "secrets": ["whsec_c2VjcmV0"]}],
    control={"tick_s": 3600},
)


@dataclass(frozen=True)
class Traffic:
    """Requests a minute, and the share of them that waits too long, by the minute."""

    per_minute: int
    slow: Callable[[int], float]
    minutes: int

    def counts(self) -> list[int]:
        """Slow requests of each minute: whole numbers, their running sum that of the shares rounded."""
        sums = np.floor(np.cumsum([self.per_minute * self.slow(minute) for minute in range(self.minutes)]) + 1e-9)
        return [int(one) for one in np.diff(sums, prepend=0.0)]


def between(start: int, end: int, share: float) -> Callable[[int], float]:
    return lambda minute: share if start <= minute < end else 0.0


def send(store: Store, traffic: Traffic, until: int, since: int = 0, weights: Sequence[float] = (1.0,)) -> None:
    """Count the requests of minutes ``since`` to ``until``."""
    rows = [
        {
            "segment": "tenant=a",
            "served_at": BEGIN + minute * MINUTE + 29.5,
            "timing": {"ttft_s": 2.0 if number < slow else 0.2, "tpot_s": 0.02, "e2e_s": 0.5},
            "weight": weights[number % len(weights)],
        }
        for minute, slow in enumerate(traffic.counts()[:until])
        if minute >= since
        for number in range(traffic.per_minute)
    ]
    with store.write() as session:
        latencies.count(session, rows, slo.limits(SETTINGS.slo), float(BEGIN + until * MINUTE))


def of_control(store: Store, minute: int) -> str:
    with store.read() as session:
        found = {one.figure: one.state for one in slo.verdicts(session, SETTINGS.slo, float(BEGIN + minute * MINUTE))}
    assert found.get("tpot", "not enough data") in ("ok", "not enough data")
    return found.get("ttft", "not enough data")


def of_prometheus(folder: Path, traffic: Traffic, states: dict[int, str]) -> subprocess.CompletedProcess[str]:
    """Whether promtool finds these states, in its own words, at these minutes."""
    rules = yaml.safe_load(RULES.read_text())["spec"]["groups"]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rules}))
    slow = np.cumsum([0, *traffic.counts()])
    every = np.arange(traffic.minutes + 1) * traffic.per_minute
    name, labels = "driftwatch_time_to_first_token_seconds", 'segment="tenant=a",instance="tap"'
    series = [
        {"series": f"{name}_count{{{labels}}}", "values": " ".join(map(str, every))},
        {"series": f'{name}_bucket{{{labels},le="1.0"}}', "values": " ".join(map(str, every - slow))},
    ]
    alerts = {"page": "DriftwatchTtftSloFastBurn", "ticket": "DriftwatchTtftSloSlowBurn"}
    tests: list[dict[str, Any]] = []
    for minute, state in states.items():
        for severity, alert in alerts.items():
            # Whoever is paged may have the ticket too: control says the graver alone.
            if not (state == "page" and severity == "ticket"):
                firing = "1" if state == severity else "0"
                query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
                expected = [{"labels": "{}", "value": float(firing)}]
                tests.append({"expr": query, "eval_time": f"{minute}m", "exp_samples": expected})
    case = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}],
    }
    (folder / "case.yaml").write_text(yaml.safe_dump(case))
    return subprocess.run(
        ["promtool", "test", "rules", str(folder / "case.yaml")], capture_output=True, text=True, timeout=170
    )


CASES = {
    "a quarter of an hour pages, leaves a ticket, and is over after some hours": (
        Traffic(10, between(120, 135, 0.9), 620),
        {60: "ok", 119: "ok", 131: "page", 134: "page", 260: "ticket", 600: "ok"},
    ),
    "a hundredth is the budget": (Traffic(10, lambda minute: 0.008, 420), {100: "ok", 300: "ok", 400: "ok"}),
    "twice the budget for long is a ticket, and over some hours later": (
        Traffic(5, between(60, 400, 0.02), 1200),
        {50: "ok", 390: "ticket", 900: "ok", 1150: "ok"},
    ),
    "seven times the budget for long pages by its slower windows": (
        Traffic(10, between(0, 300, 0.08), 420),
        {290: "page"},
    ),
    "too few requests say nothing": (
        Traffic(1, lambda minute: 1.0, 90),
        {60: "not enough data", 85: "not enough data"},
    ),
    "enough of them do": (Traffic(2, lambda minute: 1.0, 90), {80: "page"}),
}


@pytest.mark.parametrize("name", CASES)
def test_control_and_prometheus_say_the_same(sqlite_store: Store, tmp_path: Path, name: str) -> None:
    traffic, expected = CASES[name]
    sent, found = 0, {}
    for minute in expected:
        send(sqlite_store, traffic, minute, sent)
        sent = minute
        found[minute] = of_control(sqlite_store, minute)
    assert found == expected
    done = of_prometheus(tmp_path, traffic, expected)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    traffic = Traffic(10, between(120, 135, 0.25), 200)
    assert of_prometheus(tmp_path, traffic, {131: "ok"}).returncode == 1


def test_weights_stand_for_the_requests_that_were_not_sampled(store: Store) -> None:
    """The slow one of each ten stands for fewer: a tenth of the samples is a hundredth of the requests."""
    traffic = Traffic(10, lambda minute: 0.1, 90)
    send(store, traffic, 90, weights=(3.0, *[30.0] * 9))
    assert of_control(store, 90) == "ticket", "a hundredth of all, but a little more"
    with store.read() as session:
        (found,) = latencies.over(session, "ttft", 1.0, 3600, BEGIN + 90.0 * MINUTE).values()
    assert found.share == pytest.approx(3.0 / 273.0)
    assert found.requests == pytest.approx(600 * 273.0**2 / (10 * (9.0 + 9 * 900.0)))


def test_an_event_opens_sharpens_and_closes_with_its_webhooks(store: Store) -> None:
    """At first a ticket, then a page; the limit of the other figure is kept throughout."""
    traffic = Traffic(10, lambda minute: 0.03 if minute < 500 else 0.5 if minute < 520 else 0.0, 1100)

    def judged(minute: int) -> Event | None:
        slo.judge(store, SETTINGS, float(BEGIN + minute * MINUTE))
        with store.read() as session:
            event = session.scalars(sa.select(Event)).one_or_none()
            session.expunge_all()
            return event

    sent = 0
    seen: list[tuple[str, str, bool]] = []
    for minute in (400, 518, 1000):
        send(store, traffic, minute, sent)
        sent = minute
        event = judged(minute)
        assert event is not None
        seen.append((event.kind, event.details["severity"], event.closed_at is None))
    assert seen == [("ttft_slo", "ticket", True), ("ttft_slo", "page", True), ("ttft_slo", "page", False)]
    with store.read() as session:
        types = list(session.scalars(sa.select(Delivery.type).order_by(Delivery.id)))
    assert types == [f"driftwatch.drift.{one}" for one in ("opened", "updated", "closed")]
    with TestClient(create_app(store, SETTINGS)) as client:
        (event,) = client.get("/v1/events").json()["events"]
        assert event["details"]["slo"]["state"] == "page"
        for page in ("/ui", f"/ui/events/{event['id']}"):
            assert client.get(page).status_code == 200, page


def test_a_limit_that_is_no_longer_set_ends_its_event(sqlite_store: Store) -> None:
    send(sqlite_store, Traffic(10, lambda minute: 0.5, 90), 90)
    slo.judge(sqlite_store, SETTINGS, float(BEGIN + 90 * MINUTE))
    slo.judge(sqlite_store, Settings(), float(BEGIN + 90 * MINUTE))
    with sqlite_store.read() as session:
        event = session.scalars(sa.select(Event)).one()
    assert event.details["closed"] == {"reason": "no requests, or the limit is no longer set"}


def test_counts_go_with_retention(sqlite_store: Store) -> None:
    send(sqlite_store, Traffic(1, lambda minute: 0.0, 60), 60)
    with sqlite_store.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Latency)) == 2 * (60 + 1)
    for hours, left in ((9, 2), (200, 0)):
        retention.prune(sqlite_store, now=BEGIN + hours * 3600.0, payload_days=7, replay_days=90)
        with sqlite_store.read() as session:
            assert session.scalar(sa.select(sa.func.count()).select_from(Latency)) == left


@pytest.fixture(autouse=True)
def _nothing_is_logged_as_a_bug(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Announcements that do not fit their published schema among them."""
    yield
    assert [one.message for one in caplog.records if "bug" in one.message] == []


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    with TestClient(create_app(store, SETTINGS)) as found:
        yield found


def test_samples_over_http_are_counted_once_and_mined_ones_never(client: TestClient) -> None:
    def record(id: str, **more: Any) -> dict[str, Any]:
        now = datetime.fromtimestamp(time.time() - 5, UTC).isoformat()
        timing = {"ttft_s": 2.0, "tpot_s": 0.01, "e2e_s": 1.0}
        ids = {"prompt_token_ids": [1], "output_token_ids": [1, 2]}
        return {"id": id, "ts": now, "labels": {"tenant": "a"}, "timing": timing} | ids | more

    client.post("/v1/samples", json=[record("a"), record("b", weight=3.0), record("c", purpose="mining")])
    client.post("/v1/samples", json=[record("a"), record("d", timing=None)])
    ttft, tpot = client.get("/v1/segments/tenant=a").json()["slo"]
    assert (ttft["figure"], ttft["limit_s"], ttft["state"]) == ("ttft_s", 1.0, "not enough data")
    assert ttft["windows"]["300"] == {"requests": pytest.approx(1.6), "over": 1.0}
    assert tpot["windows"]["300"]["over"] == 0.0
