"""The live channel on both databases: an engine's own figures feed cells, detectors and webhooks, without any draft."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from driftwatch.control.app import create_app
from driftwatch.control.judge import fold
from driftwatch.retrain.request import request
from driftwatch.settings import Settings
from driftwatch.store import migrate
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, CellHour, Event, Retrain, Sample, Work

from .test_control import judge, metrics
from .test_control import record as plain_record

TRACES = Path(__file__).parents[1] / "data" / "traces"
SETTINGS: dict[str, Any] = {
    "models": [{"name": "*", "drafts": [{"name": "eagle-v7"}], "gamma": 3}],
    "detect": {
        "baseline": {"min_requests": 20, "min_hours": 0},
        "tolerance": 0.15,
        "requests_between_false_alarms": 1000,
    },
    "webhooks": [{"name": "hook", "url": "http://127.0.0.1:9/hook", "secrets": ["whsec_c2VjcmV0"]}],
    "control": {"tick_s": 3600},
}
CELL = (("draft", "eagle-v7"), ("model", "m"), ("segment", "tenant=a"))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(**SETTINGS | {"retrain": {"export_dir": tmp_path / "exports"}})


@pytest.fixture
def client(store: Store, settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(store, settings), raise_server_exceptions=False) as client:
        yield client


def trace(name: str, domain: str | None = None, repeat: int = 1) -> list[dict[str, Any]]:
    """Recorded requests of vLLM 0.32 with its figures, as one tenant's."""
    rows = [json.loads(line) for line in (TRACES / f"{name}.jsonl").read_text().splitlines()]
    rows = [row for row in rows if domain in (None, row["labels"]["domain"])]
    fresh = {"model": "m", "labels": {"tenant": "a"}, "deployment": {"engine": "vllm"}}
    return [row | fresh | {"id": f"{name}-{row['id']}-{i}"} for i in range(repeat) for row in rows]


def send(client: TestClient, store: Store, settings: Settings, records: list[dict[str, Any]]) -> None:
    assert client.post("/v1/samples", json=records).json()["stored"] == len(records)
    fold(store, settings, time.time())


def test_counters_are_the_sums_of_what_the_engine_said(client: TestClient, store: Store, settings: Settings) -> None:
    rows = trace("draft3.T0")
    send(client, store, settings, rows)
    found = metrics(client)
    engine = [row["engine"] for row in rows]
    expected = {
        "requests": len(rows),
        "tokens": sum(len(row["output_token_ids"]) - 1 for row in rows),
        "windows": sum(one["windows"] for one in engine),
        "steps": sum(one["windows"] for one in engine),
        "drafted_tokens": sum(one["drafted"] for one in engine),
        "accepted_tokens": sum(one["accepted"] for one in engine),
        "rejected_tokens": sum(sum(one["accepted_histogram"][:3]) for one in engine),
    }
    for name, count in expected.items():
        assert found[f"driftwatch_live_{name}_total"][CELL] == count
    for depth in range(3):
        at = found["driftwatch_live_accepted_at_depth_total"][(("depth", str(depth)), *CELL)]
        assert at == sum(sum(one["accepted_histogram"][depth + 1 :]) for one in engine)
    hit_rate = expected["accepted_tokens"] / (expected["accepted_tokens"] + expected["rejected_tokens"])
    assert found["driftwatch_live_hit_rate"][CELL] == pytest.approx(hit_rate)
    assert found["driftwatch_live_acceptance_rate"][CELL] == pytest.approx(
        expected["accepted_tokens"] / expected["drafted_tokens"]
    )
    assert found["driftwatch_live_baseline_state"][tuple(sorted([*CELL, ("state", "watching")]))] in (0, 1)
    assert "driftwatch_shadow_windows_total" not in found
    with store.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Work)) == 0


def test_live_only_a_fall_is_an_event_a_webhook_and_a_retrain_with_its_data(
    client: TestClient, store: Store, settings: Settings
) -> None:
    """The recorded engine's hit rate on its draft's own domain, then on the other: .87 to .50."""
    send(client, store, settings, trace("draft3.T0", "A", repeat=3))
    assert client.get("/v1/events").json()["events"] == []
    send(client, store, settings, trace("draft3.T0", "B", repeat=3))
    (event,) = client.get("/v1/events").json()["events"]
    assert (event["kind"], event["channel"], event["draft"]) == ("drift", "live", "eagle-v7")
    assert event["request_id"].startswith("draft3.T0-B")
    assert (event["details"]["metric"], event["details"]["gamma"]) == ("hit_rate", 3)
    types = [row["type"] for row in client.get("/v1/deliveries").json()["deliveries"]]
    assert types == ["driftwatch.drift.opened"]
    assert request(store, settings, time.time()) == 1
    (retrain,) = client.get("/v1/retrains").json()["retrains"]
    assert retrain["state"] == "requested"
    assert retrain["data"]["rows"] > 0
    (cell,) = client.get("/v1/segments/tenant=a").json()["cells"]
    assert (cell["channel"], cell["state"], cell["metric"]) == ("live", "drifting", "hit_rate")
    assert (
        metrics(client)["driftwatch_live_drift_active"][tuple(sorted([*CELL, ("kind", "drift"), ("cause", "unknown")]))]
        == 1
    )


def test_shadow_and_live_stand_side_by_side_and_the_replay_decides(store: Store) -> None:
    settings = Settings(
        **SETTINGS | {"models": [{"name": "*", "drafts": [{"name": "eagle-v7", "path": "x"}], "gamma": 3}]}
    )
    with TestClient(create_app(store, settings)) as client:
        for domain in "AB":
            client.post(
                "/v1/samples",
                json=[row | {"output_token_ids": list(range(33))} for row in trace("draft3.T0", domain, repeat=3)],
            )
            judge(store, settings, 0.7)
        cells = client.get("/v1/segments/tenant=a").json()["cells"]
        assert [(cell["channel"], cell["state"]) for cell in cells] == [("shadow", "watching"), ("live", "drifting")]
        (gap,) = client.get("/v1/events").json()["events"]
        assert (gap["kind"], gap["cause"]) == ("live_gap", "engine")
        assert gap["details"]["also"]["drift"]["value"] < 0.6, "the fall of the engine's own cell is the same fault"
        retrains = client.get("/v1/retrains").json()["retrains"]
        assert retrains == [], "an engine at fault asks for no training"
        found = metrics(client)
        cell = tuple(sorted([*CELL, ("split", "none")]))
        assert found["driftwatch_shadow_requests_total"][cell] == 216
        assert found["driftwatch_live_requests_total"][CELL] == 216


def test_figures_are_folded_once_in_any_portions(client: TestClient, store: Store, settings: Settings) -> None:
    send(client, store, settings, trace("draft3.T0", "A", repeat=2))
    with store.read() as session:
        at_once = session.scalars(sa.select(Cell)).one()
        ids = list(session.scalars(sa.select(Sample.id).order_by(Sample.id)))
    assert fold(store, settings, time.time()) == 0
    with store.write() as session:
        session.execute(sa.delete(CellHour))
        session.execute(sa.delete(Cell))
    for i in range(0, len(ids), 7):
        with store.write() as session:
            session.execute(sa.update(Sample).where(Sample.id.in_(ids[i : i + 7])).values(live_folded_at=None))
        assert fold(store, settings, time.time()) == len(ids[i : i + 7])
    with store.read() as session:
        in_parts = session.scalars(sa.select(Cell)).one()
        hours = list(session.scalars(sa.select(CellHour)))
    assert (in_parts.state, in_parts.sums, in_parts.gamma) == (at_once.state, at_once.sums, 3)
    assert sum(hour.requests for hour in hours) == 72


@pytest.mark.parametrize(("domain", "regressed"), [("A", []), ("B", ["live"])])
def test_a_roll_out_to_a_longer_proposal_is_compared_by_its_hit_rate(
    client: TestClient, store: Store, settings: Settings, domain: str, regressed: list[str]
) -> None:
    """Recorded with 3 and with 5 proposals of one draft: as good on its own domain, worse on the other."""
    for name, of, version in (("draft3.T0", "A", "0.32.0"), ("draft5.T0", domain, "0.33.0")):
        facts = {"deployment": {"engine": "vllm", "version": version}}
        send(client, store, settings, [row | facts for row in trace(name, of, repeat=3)])
    events = client.get("/v1/events").json()["events"]
    assert [one["channel"] for one in events if one["kind"] == "deployment_regressed"] == regressed
    with store.read() as session:
        assert set(session.scalars(sa.select(Cell.gamma))) == {3, 5}


def test_an_engine_that_proposes_more_later_makes_room(client: TestClient, store: Store, settings: Settings) -> None:
    for name in ("draft3.T0", "draft5.T0", "draft3.T0.8"):
        send(client, store, settings, trace(name))
    found = metrics(client)
    rows = trace("draft3.T0") + trace("draft5.T0") + trace("draft3.T0.8")
    accepted = sum(row["engine"]["accepted"] for row in rows)
    assert found["driftwatch_live_accepted_tokens_total"][CELL] == accepted
    (cell,) = client.get("/v1/segments/tenant=a").json()["cells"]
    assert cell["gamma"] == 5
    assert cell["recent"]["acceptance_length"]["requests"] == 216


def test_totals_alone_are_judged_by_their_rate_and_rejected_is_absent(
    client: TestClient, store: Store, settings: Settings
) -> None:
    rows = trace("draft3.T0", "A", repeat=3) + trace("draft3.T0", "B", repeat=3)
    totals = [row | {"engine": {key: row["engine"][key] for key in ("windows", "drafted", "accepted")}} for row in rows]
    send(client, store, settings, totals)
    (cell,) = client.get("/v1/segments/tenant=a").json()["cells"]
    assert (cell["metric"], cell["counts"]["rejected"], cell["counts"]["hit_rate"]) == ("acceptance_rate", None, None)
    assert cell["recent"]["hit_rate"]["value"] is None
    assert cell["baseline"]["acceptance_rate"]["value"] is not None
    (event,) = client.get("/v1/events").json()["events"]
    assert event["details"]["metric"] == "acceptance_rate"
    found = metrics(client)
    assert "driftwatch_live_rejected_tokens_total" not in found
    assert "driftwatch_live_hit_rate" not in found
    assert "driftwatch_live_accepted_at_depth_total" not in found
    assert found["driftwatch_live_acceptance_rate"][CELL] == pytest.approx(cell["recent"]["acceptance_rate"]["value"])


def test_what_cannot_go_into_a_cell_is_counted_with_its_reason(
    client: TestClient, store: Store, settings: Settings
) -> None:
    good = trace("draft3.T0")
    figures = [
        {"windows": 3, "accepted": 4},
        {"windows": 3, "drafted": 1, "accepted": 2},
        {"refused": "adaptive_steps"},
        {},
    ]
    send(client, store, settings, good + [good[0] | {"id": f"x{i}", "engine": one} for i, one in enumerate(figures)])
    found = metrics(client)
    assert found["driftwatch_live_requests_total"][CELL] == 72
    assert "driftwatch_live_rejected_tokens_total" in found, "one of 73 says less: it does not decide"
    reasons = {dict(labels)["reason"]: value for labels, value in found["driftwatch_live_refused_total"].items()}
    assert reasons == {"says_less": 1, "contradictory": 1, "adaptive_steps": 1}
    assert "live_refused" not in {dict(labels)["outcome"] for labels in found["driftwatch_samples_total"]}


def test_an_engine_that_says_less_than_before_is_judged_by_less_and_learns_anew(
    client: TestClient, store: Store, settings: Settings
) -> None:
    """As a prompt-lookup draft without per-window lists: only some requests happen to have full windows throughout."""
    rows = trace("draft3.T0", "A", repeat=3) + trace("draft3.T0", "B", repeat=3)
    send(client, store, settings, rows)
    (cell,) = client.get("/v1/segments/tenant=a").json()["cells"]
    assert (cell["metric"], cell["state"]) == ("hit_rate", "drifting")
    figures = {"windows": 5, "drafted": 14, "accepted": 6, "accepted_histogram": [1, 3, 0, 1]}
    for first, expected in ((0, ("hit_rate", "drifting", 216)), (10, ("acceptance_rate", "learning", 218))):
        less = [rows[0] | {"id": f"less{first + i}", "engine": figures} for i in range(10 if first == 0 else 2)]
        send(client, store, settings, less)
        (cell,) = client.get("/v1/segments/tenant=a").json()["cells"]
        assert (cell["metric"], cell["state"], cell["requests"]) == expected
    (event,) = client.get("/v1/events").json()["events"]
    assert event["closed_at"] is not None
    assert event["details"]["closed"] == {"reason": "the engine says less: acceptance_rate is watched from here on"}
    send(client, store, settings, [rows[0] | {"id": "more"}])
    (cell,) = client.get("/v1/segments/tenant=a").json()["cells"]
    assert (cell["metric"], cell["requests"]) == ("acceptance_rate", 219)


def test_lengths_alone_are_compared_on_one_scale(client: TestClient, store: Store, settings: Settings) -> None:
    rows = trace("draft3.T0", "A", repeat=3)
    lengths = [row | {"engine": {key: row["engine"][key] for key in ("windows", "accepted")}} for row in rows]
    send(client, store, settings, lengths)
    (cell,) = client.get("/v1/segments/tenant=a").json()["cells"]
    assert (cell["metric"], cell["gamma"], cell["state"]) == ("acceptance_length", 3, "watching")
    assert (cell["counts"]["drafted"], cell["counts"]["acceptance_rate"]) == (None, None)
    found = metrics(client)
    assert found["driftwatch_live_acceptance_length"][CELL] > 2
    assert not {"driftwatch_live_drafted_tokens_total", "driftwatch_live_acceptance_rate"} & found.keys()
    send(client, store, settings, [rows[0] | {"id": "longer", "engine": {"windows": 2, "accepted": 9}}])
    (cell,) = client.get("/v1/segments/tenant=a").json()["cells"]
    assert (cell["gamma"], cell["state"], cell["requests"]) == (5, "learning", 109)


def test_odd_figures_stop_nothing(client: TestClient, store: Store, settings: Settings) -> None:
    good = trace("draft3.T0", "A")[0]
    odd = [
        good["engine"] | {"config": "a\x00b"},
        {"windows": 0, "drafted": 0, "accepted": 0},
        {"windows": 2 * 10**9, "accepted": 2 * 10**9},
        {"accepted_per_window": [2 * 10**9]},
        {"accepted_histogram": []},
        {"windows": 1, "accepted": 1, "gamma": "x", "output_tokens": "y"},
    ]
    send(client, store, settings, [good | {"id": f"o{i}", "engine": one} for i, one in enumerate(odd)])
    found = metrics(client)
    assert found["driftwatch_live_requests_total"][CELL] == 4
    assert sum(found["driftwatch_live_refused_total"].values()) == 2


def test_mining_samples_say_nothing_of_the_engine(client: TestClient, store: Store, settings: Settings) -> None:
    send(client, store, settings, [row | {"purpose": "mining"} for row in trace("draft3.T0")])
    assert "driftwatch_live_requests_total" not in metrics(client)


def test_a_store_of_the_first_revision_keeps_its_cells_hours_and_retrains(store_url: str, settings: Settings) -> None:
    """Changing a constraint copies the table on SQLite: nothing may cascade."""
    store = Store(store_url)
    migrate.upgrade(store)
    with TestClient(create_app(store, settings)) as client:
        shadow = Settings(**SETTINGS | {"models": [{"name": "*", "drafts": [{"path": "x"}], "gamma": 3}]})
        with TestClient(create_app(store, shadow)) as other:
            for first, rate in ((0, 0.7), (60, 0.2)):
                other.post("/v1/samples", json=[plain_record(i) for i in range(first, first + 60)])
                judge(store, shadow, rate)
        send(client, store, settings, trace("draft3.T0", "A"))
    migrate.downgrade(store, "0001")
    migrate.upgrade(store)
    assert migrate.problems(store) == []
    with store.read() as session:
        (cell,) = session.scalars(sa.select(Cell))
        assert (cell.channel, cell.metric) == ("shadow", "hit_rate")
        assert session.scalar(sa.select(sa.func.sum(CellHour.requests))) == 120
        assert session.scalars(sa.select(Event)).one().cell_id == cell.id
        assert session.scalars(sa.select(Retrain)).one().cell_id == cell.id
    # Marks are gone with the column: the engine's figures are folded anew, into new cells.
    fold(store, settings, time.time())
    with store.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Cell)) == 2
    store.close()
