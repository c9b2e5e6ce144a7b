"""Control over HTTP, on both databases: intake, judging, events, figures and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from driftwatch.acceptance import Weights
from driftwatch.control.app import create_app
from driftwatch.control.judge import expire, fold
from driftwatch.settings import Settings
from driftwatch.store import work
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, CellHour, Delivery, Event, Outcome, Replay, Retrain, Sample

BASELINE = {"min_requests": 20, "min_hours": 0}
SETTINGS: dict[str, Any] = {
    "models": [{"name": "*", "drafts": [{"name": "incumbent", "path": "unused"}], "gamma": 3}],
    "detect": {"baseline": BASELINE, "tolerance": 0.15, "requests_between_false_alarms": 1000},
    "webhooks": [{"name": "hook", "url": "http://127.0.0.1:9/hook", "secrets": ["whsec_c2VjcmV0"]}],
    "control": {"tick_s": 3600},
}


@pytest.fixture
def settings() -> Settings:
    return Settings(**SETTINGS)


@pytest.fixture
def client(store: Store, settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(store, settings), raise_server_exceptions=False) as client:
        yield client


def record(number: int, tenant: str = "a", **fields: Any) -> dict[str, Any]:
    ids = {"prompt_token_ids": [1, 2], "output_token_ids": list(range(33))}
    return {"id": f"r{number}", "labels": {"tenant": tenant}, "model": "m"} | ids | fields


def judge(store: Store, settings: Settings, hit_rate: float, seed: int = 0, fingerprint: str = "f") -> None:
    """Stand in for the shadow: judge what waits with hits drawn at a rate, then fold."""
    rng = np.random.default_rng(seed)
    while True:
        with store.write() as session:
            tasks = work.lease(session, "test", now=time.time(), lease_s=60, limit=50)
            verdicts = []
            for task in tasks:
                encoding, data = Weights((rng.random((32, 1)) < hit_rate).astype(float)).encode()
                row: dict[str, Any] = {
                    "fingerprint": fingerprint,
                    "rule": "argmax",
                    "split": "none",
                    "tokens": 32,
                    "depths": 1,
                }
                verdicts.append(
                    work.Verdict(task, replay=row | {"encoding": encoding, "weights": data, "proposals": None})
                )
            work.complete(session, "test", verdicts, now=time.time())
        if not tasks:
            break
    fold(store, settings, time.time())


def metrics(client: TestClient) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


@pytest.mark.parametrize("form", ["one", "array", "ndjson"])
def test_samples_come_in_three_forms(client: TestClient, form: str) -> None:
    records = [record(1)] if form == "one" else [record(1), record(2), record(1)]
    body = {
        "one": json.dumps(records[0], indent=1),
        "array": json.dumps(records),
        "ndjson": "\n".join(json.dumps(one) for one in records) + "\n",
    }[form]
    answer = client.post("/v1/samples", content=body)
    assert answer.status_code == 201
    assert answer.json() == ({"stored": 1, "duplicates": 0} if form == "one" else {"stored": 2, "duplicates": 1})
    assert client.post("/v1/samples", content=body).json()["stored"] == 0


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b"", "empty", "no record"),
        (b"nonsense", "invalid_record", "the body: not a JSON object"),
        (b"[1]", "invalid_record", "record 0: "),
        (b"[", "invalid_record", "the body is not JSON"),
        (json.dumps([record(1), {"id": "x"}]).encode(), "invalid_record", "record 1: needs prompt_token_ids"),
        (json.dumps(record(1)).encode() + b"\n{}", "invalid_record", "line 2: id: Field required"),
        (b"\xff\xfe", "invalid_record", "the body"),
    ],
)
def test_a_wrong_body_is_refused_whole(client: TestClient, store: Store, body: bytes, code: str, message: str) -> None:
    answer = client.post("/v1/samples", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "hint"}
    assert error["code"] == code
    assert message in error["message"]
    with store.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Sample)) == 0


def test_what_users_write_is_stored_whatever_it_holds(client: TestClient, store: Store) -> None:
    """NUL among it, which PostgreSQL's jsonb would refuse."""
    messages = [{"role": "user", "content": "a\u0000b"}]
    body = {"id": "a", "model": "m", "messages": messages, "output": "\u0000", "x": "\u0000"}
    assert client.post("/v1/samples", json=body).status_code == 201
    with store.write() as session:
        (task,) = work.lease(session, "test", now=time.time(), lease_s=60, limit=50)
    assert task.text == {"messages": messages, "output": "\u0000"}


@pytest.mark.parametrize(
    "fields",
    [
        {"weight": 1e160},
        {"top_k": 2**40},
        {"labels": {"tenant": "\u0000"}},
        {"session": "\u0000"},
        {"timing": {"ttft_s": 1e300}},
        {"deployment": {"a b": "c"}},
    ],
)
def test_a_value_that_would_spoil_others_is_refused(client: TestClient, fields: dict[str, Any]) -> None:
    answer = client.post("/v1/samples", json=[record(1), record(2, **fields)])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("record 1: ")


def test_a_deeply_nested_record_is_refused(client: TestClient) -> None:
    nested = b"[" * 400 + b"]" * 400
    answer = client.post("/v1/samples", content=b'[{"id": "a", "prompt": "p", "output": "o", "x": ' + nested + b"}]")
    assert answer.status_code == 400
    assert "nested too deeply" in answer.json()["error"]["message"]


def test_a_long_segment_is_other(client: TestClient) -> None:
    labels = {f"l{i}": "x" * 200 for i in range(10)}
    assert client.post("/v1/samples", json=record(1) | {"labels": labels}).status_code == 201


def test_a_parameter_that_no_database_takes_is_an_error_object(client: TestClient) -> None:
    for path in ("/v1/events?segment=%00", "/v1/segments/a%00b", "/v1/retrains/%00"):
        assert client.get(path).status_code in (200, 400, 404)


def test_a_body_over_16_mb_is_refused_with_and_without_its_length(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        yield from (b" " * 1_000_000 for _ in range(20))

    for content in (b" " * 17_000_000, chunks()):
        answer = client.post("/v1/samples", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "too_large"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("PUT", "/v1/samples", 405, "method_not_allowed"),
        ("GET", "/v1/segments/tenant=nobody", 404, "unknown_segment"),
        ("GET", "/v1/retrains/none", 404, "unknown_retrain"),
        ("GET", "/v1/events?limit=0", 422, "invalid_parameter"),
    ],
)
def test_every_error_has_one_shape(client: TestClient, method: str, path: str, status: int, code: str) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert set(answer.json()["error"]) == {"code", "message", "hint"}


def test_the_store_being_away_is_503(client: TestClient, store: Store) -> None:
    with store.engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE samples RENAME TO gone"))
    answer = client.post("/v1/samples", json=record(1))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "store_unavailable"
    assert client.get("/healthz").status_code == 200


def test_a_fall_is_one_event_one_retrain_and_one_delivery_of_each(
    client: TestClient, store: Store, settings: Settings
) -> None:
    for first in range(0, 90, 30):
        client.post("/v1/samples", json=[record(i) for i in range(first, first + 30)])
        judge(store, settings, 0.7, seed=first)
    assert client.get("/v1/events").json()["events"] == []
    for first in range(90, 210, 30):
        client.post("/v1/samples", json=[record(i) for i in range(first, first + 30)])
        judge(store, settings, 0.2, seed=first)
    (event,) = client.get("/v1/events").json()["events"]
    assert (event["kind"], event["segment"], event["closed_at"]) == ("drift", "tenant=a", None)
    assert 90 <= int(event["request_id"][1:]) < 150
    assert 80 <= int(event["start_request_id"][1:]) <= int(event["request_id"][1:])
    details = event["details"]
    assert details["baseline"]["lower"] > details["floor"] > details["current"]["value"]
    with store.read() as session:
        assert [row.state for row in session.scalars(sa.select(Retrain))] == ["proposed"]
        (delivery,) = session.scalars(sa.select(Delivery))
    sent = json.loads(delivery.body)
    assert (sent["type"], sent["specversion"], sent["id"]) == (
        "driftwatch.drift.opened",
        "1.0",
        f"{event['id']}-opened",
    )
    assert sent["data"]["request_id"] == event["request_id"]
    found = client.get("/v1/segments/tenant=a").json()
    assert found["cells"][0]["state"] == "drifting"
    (floor,) = metrics(client)["driftwatch_baseline_floor"].values()
    assert floor == found["cells"][0]["floor"] == details["floor"]
    assert found["cells"][0]["tail"]["0.5"]["requests"] == 210
    assert found["cells"][0]["drift_event"] == event["id"]
    assert found["events"][0]["id"] == event["id"]


def test_a_recovery_closes_the_event(client: TestClient, store: Store, settings: Settings) -> None:
    for first, rate in [(0, 0.7), (60, 0.2), (120, 0.75), (180, 0.75), (240, 0.75), (300, 0.75)]:
        client.post("/v1/samples", json=[record(i) for i in range(first, first + 60)])
        judge(store, settings, rate, seed=first)
    (event,) = client.get("/v1/events").json()["events"]
    assert event["closed_at"] is not None
    with store.read() as session:
        types = [row.type for row in session.scalars(sa.select(Delivery).order_by(Delivery.id))]
    assert types == ["driftwatch.drift.opened", "driftwatch.drift.closed"]


def test_a_second_event_within_the_cooldown_asks_for_no_second_retrain(
    client: TestClient, store: Store, settings: Settings
) -> None:
    rates = [0.7, 0.2, 0.75, 0.75, 0.75, 0.75, 0.2]
    for first, rate in zip(range(0, 420, 60), rates, strict=True):
        client.post("/v1/samples", json=[record(i) for i in range(first, first + 60)])
        judge(store, settings, rate, seed=first)
    retrains = client.get("/v1/retrains").json()["retrains"]
    assert sorted(row["state"] for row in retrains) == ["proposed", "suppressed"]
    suppressed = next(row for row in retrains if row["state"] == "suppressed")
    assert "cooldown since retrain-" in suppressed["reason"]


def test_metrics_are_the_counts_of_the_contract(client: TestClient, store: Store, settings: Settings) -> None:
    client.post("/v1/samples", json=[record(i, tenant="ab"[i % 2], weight=2.0) for i in range(10)])
    judge(store, settings, 1.0)
    found = metrics(client)
    cell = tuple(sorted({"model": "m", "draft": "incumbent", "segment": "tenant=a", "split": "none"}.items()))
    expected = {"requests": 5, "tokens": 160, "steps": 40, "windows": 40, "drafted_tokens": 120, "accepted_tokens": 120}
    for name, count in (expected | {"rejected_tokens": 0}).items():
        assert found[f"driftwatch_shadow_{name}_total"][cell] == count
        assert found[f"driftwatch_estimated_{name}_total"][cell] == 2 * count
    depths = found["driftwatch_shadow_accepted_at_depth_total"]
    assert sorted(dict(labels)["depth"] for labels in depths) == ["0", "0", "1", "1", "2", "2"]
    assert found["driftwatch_hit_rate"][cell] == 1.0
    assert 0.3 < found["driftwatch_hit_rate_lower"][cell] < 1.0
    assert found["driftwatch_acceptance_length"][cell] == 4.0
    half = tuple(sorted([*cell, ("quantile", "0.5")]))
    assert found["driftwatch_steps_per_token"][half] == 0.25
    assert "driftwatch_steps_per_token_upper" not in found, "five requests bound no quantile"
    assert found["driftwatch_steps_per_token_left_out_ratio"][cell] == 0.0
    assert "driftwatch_baseline_floor" not in found, "nothing learnt yet"
    assert found["driftwatch_baseline_state"][tuple(sorted([*cell, ("state", "learning")]))] == 1.0
    assert found["driftwatch_samples_total"][("outcome", "stored"), ("segment", "tenant=a")] == 5
    assert found["driftwatch_samples_total"][("outcome", "replayed"), ("segment", "tenant=b")] == 5
    assert found["driftwatch_queue_depth"][(("queue", "work"),)] == 0
    assert found["driftwatch_shadow_lag_seconds"][()] == 0


def test_too_few_requests_have_no_interval_and_no_gauge_for_it(
    client: TestClient, store: Store, settings: Settings
) -> None:
    client.post("/v1/samples", json=record(1))
    judge(store, settings, 0.5)
    found = metrics(client)
    assert len(found["driftwatch_hit_rate"]) == 1
    assert "driftwatch_hit_rate_lower" not in found
    recent = client.get("/v1/segments/tenant=a").json()["cells"][0]["recent"]["hit_rate"]
    assert (recent["lower"], recent["upper"], recent["requests"]) == (None, None, 1)


def test_a_control_that_starts_again_goes_on_where_it_was(client: TestClient, store: Store, settings: Settings) -> None:
    """Folding in many small rounds, each from the stored state, equals folding at once: nothing is kept in memory."""
    client.post("/v1/samples", json=[record(i) for i in range(60)])
    judge(store, settings, 0.6)
    with store.read() as session:
        at_once = session.scalars(sa.select(Cell)).one()
    with store.write() as session:
        session.execute(sa.delete(CellHour))
        session.execute(sa.delete(Cell))
        session.execute(sa.update(Replay).values(folded_at=1.0))
        ids = list(session.scalars(sa.select(Replay.id).order_by(Replay.id)))
    for i in range(0, 60, 7):
        with store.write() as session:
            session.execute(sa.update(Replay).where(Replay.id.in_(ids[i : i + 7])).values(folded_at=None))
        fold(store, settings, time.time())
    with store.read() as session:
        in_parts = session.scalars(sa.select(Cell)).one()
        hours = list(session.scalars(sa.select(CellHour)))
    assert (in_parts.state, in_parts.sums) == (at_once.state, at_once.sums)
    assert sum(hour.requests for hour in hours) == 60


def test_counters_stay_when_samples_are_pruned(client: TestClient, store: Store, settings: Settings) -> None:
    client.post("/v1/samples", json=[record(i) for i in range(5)])
    judge(store, settings, 0.5)
    before = metrics(client)["driftwatch_shadow_windows_total"]
    with store.write() as session:
        session.execute(sa.delete(Replay))
        session.execute(sa.delete(Sample))
    assert metrics(client)["driftwatch_shadow_windows_total"] == before


def changed(**detect: Any) -> Settings:
    return Settings(**(SETTINGS | {"detect": SETTINGS["detect"] | detect}))


def state(store: Store) -> dict[str, Any]:
    with store.read() as session:
        return session.scalars(sa.select(Cell)).one().state


def send(client: TestClient, first: int, count: int, **fields: Any) -> None:
    records = [record(i, **fields) for i in range(first, first + count)]
    assert client.post("/v1/samples", json=records).status_code == 201


def test_a_changed_tolerance_keeps_what_was_learnt(client: TestClient, store: Store, settings: Settings) -> None:
    send(client, 0, 60)
    judge(store, settings, 0.7)
    learnt = state(store)["baseline"]["frozen"]
    send(client, 60, 10)
    judge(store, changed(tolerance=0.2), 0.7)
    assert state(store)["rules"]["tolerance"] == 0.2
    assert state(store)["baseline"]["frozen"] == learnt


def test_a_change_of_settings_makes_no_second_open_event_for_one_fall(
    client: TestClient, store: Store, settings: Settings
) -> None:
    send(client, 0, 60)
    judge(store, settings, 0.7)
    send(client, 60, 60)
    judge(store, settings, 0.2)
    for number, different in enumerate([changed(baseline=BASELINE | {"min_requests": 25}), changed(tolerance=0.16)]):
        send(client, 200 + 60 * number, 60)
        judge(store, different, 0.2)
        events = client.get("/v1/events").json()["events"]
        assert len([event for event in events if event["closed_at"] is None]) == 1
        assert len(events) == number + 1, "the number of requests to learn from is no change of the test"
    assert "settings of detection changed" in events[-1]["details"]["closed"]["reason"]


def test_learning_goes_on_under_changed_settings(client: TestClient, store: Store, settings: Settings) -> None:
    send(client, 0, 10)
    judge(store, settings, 0.7)
    send(client, 10, 5)
    judge(store, changed(baseline=BASELINE | {"min_requests": 500}, tolerance=0.1), 0.7)
    baseline = state(store)["baseline"]
    assert (baseline["state"], baseline["moments"][:2], baseline["tolerance"]) == ("learning", [15, 15], 0.1)


def test_another_proposal_length_is_learnt_anew_and_is_no_drift(
    client: TestClient, store: Store, settings: Settings
) -> None:
    """Which proposals are tested depends on it, and with clustered hits so does their rate."""
    send(client, 0, 60)
    judge(store, settings, 0.7)
    assert state(store)["baseline"]["state"] == "frozen"
    send(client, 60, 60)
    judge(store, settings, 0.2)
    send(client, 120, 5)
    judge(store, Settings(**SETTINGS | {"models": [SETTINGS["models"][0] | {"gamma": 1}]}), 0.7)
    baseline = state(store)["baseline"]
    assert (baseline["state"], baseline["moments"][:2]) == ("learning", [5, 5])
    (event,) = client.get("/v1/events").json()["events"]
    assert "the proposal length is now 1" in event["details"]["closed"]["reason"]


def test_counters_go_on_where_they_were_under_another_proposal_length(
    client: TestClient, store: Store, settings: Settings
) -> None:
    send(client, 0, 60)
    judge(store, settings, 0.7)
    names = [f"driftwatch_{kind}_{name}_total" for kind in ("shadow", "estimated") for name in ("windows", "steps")]
    before = metrics(client)
    send(client, 60, 5)
    judge(store, Settings(**SETTINGS | {"models": [SETTINGS["models"][0] | {"gamma": 12}]}), 0.7)
    after = metrics(client)
    for name in names:
        ((key, count),) = before[name].items()
        assert 5 * 32 / 13 <= after[name][key] - count <= 5 * 32, "windows of five requests of 32 judged tokens"
    for found, deepest in ((before, 2), (after, 11)):
        depths = {int(dict(key)["depth"]) for key in found["driftwatch_shadow_accepted_at_depth_total"]}
        assert max(depths) == deepest


def test_a_baseline_that_was_given_is_not_kept_as_learnt(client: TestClient, store: Store) -> None:
    send(client, 0, 5)
    judge(store, changed(baseline={"mode": "value", "value": 0.9}), 0.7)
    assert state(store)["baseline"]["source"] == "given"
    send(client, 5, 5)
    judge(store, changed(), 0.7)
    assert (state(store)["baseline"]["source"], state(store)["baseline"]["state"]) == ("auto", "learning")


def test_open_sessions_outlive_a_change_of_settings(client: TestClient, store: Store, settings: Settings) -> None:
    send(client, 0, 10, session="s", ts="2026-01-01T00:00:00Z")
    judge(store, settings, 0.7)
    expire(store, changed(tolerance=0.2), time.time())
    assert state(store)["baseline"]["moments"][:2] == [1, 10]
    expire(store, changed(tolerance=0.25), time.time())


def test_other_weights_under_the_same_name_are_another_draft(
    client: TestClient, store: Store, settings: Settings
) -> None:
    send(client, 0, 60)
    judge(store, settings, 0.7)
    send(client, 60, 60)
    judge(store, settings, 0.2)
    send(client, 120, 60)
    judge(store, settings, 0.2, fingerprint="other")
    with store.read() as session:
        cells = session.execute(sa.select(Cell.fingerprint, Cell.id).order_by(Cell.id)).all()
    assert [cell.fingerprint for cell in cells] == ["f", "other"]
    drift, regressed = sorted(client.get("/v1/events").json()["events"], key=lambda event: str(event["closed_at"]))
    assert drift["details"]["closed"]["reason"] == "another deployment or draft has taken over"
    assert (regressed["kind"], regressed["cause"]) == ("deployment_regressed", "unknown"), "it fell before the change"


def test_an_alarm_whose_start_was_pruned_still_comes(client: TestClient, store: Store, settings: Settings) -> None:
    send(client, 0, 60)
    judge(store, settings, 0.7)
    send(client, 60, 6)
    judge(store, settings, 0.1)
    with store.write() as session:
        session.execute(sa.delete(Replay))
        session.execute(sa.delete(Sample))
    send(client, 66, 60)
    judge(store, settings, 0.1)
    (event,) = client.get("/v1/events").json()["events"]
    assert event["request_id"] is not None
    assert event["start_request_id"] is None


def test_a_token_guards_all_but_health_and_metrics(sqlite_store: Store) -> None:
    settings = Settings(**(SETTINGS | {"control": {"token": "s3cret", "tick_s": 3600}}))
    with TestClient(create_app(sqlite_store, settings)) as client:
        for path in ("/healthz", "/readyz", "/metrics"):
            assert client.get(path).status_code == 200
        for path in ("/v1/segments", "/v1/config", "/openapi.json"):
            refused = client.get(path)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "unauthorized"
            assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer s3cret"}).status_code == 200
        assert client.post("/v1/samples", json=record(1)).status_code == 401


def test_config_masks_secrets(client: TestClient) -> None:
    text = client.get("/v1/config").text
    assert "whsec_" not in text
    assert "**********" in text


def test_openapi_lists_the_contract(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    wanted = ["/healthz", "/readyz", "/metrics", "/v1/samples", "/v1/segments", "/v1/events", "/v1/deployments"]
    assert set(wanted) <= set(paths)


def test_events_survive_what_they_came_from(client: TestClient, store: Store, settings: Settings) -> None:
    for first, rate in [(0, 0.7), (60, 0.2)]:
        client.post("/v1/samples", json=[record(i) for i in range(first, first + 60)])
        judge(store, settings, rate)
    with store.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Event)) == 1
        stored = session.scalars(sa.select(Outcome.samples).where(Outcome.outcome == "stored")).one()
    assert stored == 120
    assert len(client.get("/v1/deployments").json()["deployments"]) == 1
    assert client.get("/v1/deliveries").json()["deliveries"][0]["state"] == "pending"


def test_a_session_is_one_unit_and_is_judged_when_it_falls_silent(
    client: TestClient, store: Store, settings: Settings
) -> None:
    old = "2026-01-01T00:00:00Z"
    client.post("/v1/samples", json=[record(i, session=f"s{i // 10}", ts=old) for i in range(40)])
    judge(store, settings, 0.6)

    def moments() -> list[float]:
        with store.read() as session:
            found: list[float] = session.scalars(sa.select(Cell)).one().state["baseline"]["moments"]
        return found[:2]

    assert moments() == [0, 0]
    expire(store, settings, time.time())
    assert moments() == [4, 40], "four units of ten requests"


FACTS = {"engine": "vllm", "version": "0.32.0", "speculative": "eagle3 steps=3", "target": "m-7b"}


@pytest.mark.parametrize(
    ("facts", "cause", "changed"),
    [
        ({"version": "0.33.0"}, "engine", ["version"]),
        ({"version": "0.33.0", "system_fingerprint": "b"}, "engine", ["system_fingerprint", "version"]),
        ({"system_fingerprint": "b"}, "engine", ["system_fingerprint"]),
        ({"target": "m-8b"}, "target", ["target"]),
        ({"weight_version": "2"}, "target", ["weight_version"]),
        ({"speculative": "eagle3 steps=5", "system_fingerprint": "b"}, "draft", ["speculative", "system_fingerprint"]),
        ({"target": "m-8b", "version": "0.33.0"}, "unknown", ["target", "version"]),
        ({"region": "eu"}, "unknown", ["region"]),
    ],
)
def test_a_changed_deployment_is_one_event_with_its_cause(
    client: TestClient, facts: dict[str, str], cause: str, changed: list[str]
) -> None:
    known = FACTS | {"system_fingerprint": "a", "weight_version": "1", "region": "us"}
    client.post("/v1/samples", json=[record(1, deployment=known), record(2, deployment=known)])
    for number in (3, 4):
        client.post("/v1/samples", json=record(number, deployment=known | facts))
    # The same server's answers without token ids are figures of their own, but no other change.
    text: dict[str, Any] = {"prompt_token_ids": None, "output_token_ids": None, "prompt": "p", "output": "o"}
    client.post("/v1/samples", json=record(5, deployment=known | facts, **text))
    client.post("/v1/samples", json=record(6, deployment=known))
    (event,) = client.get("/v1/events").json()["events"]
    assert (event["kind"], event["cause"], event["request_id"]) == ("deployment_changed", cause, "r3")
    assert event["closed_at"] == event["opened_at"]
    assert sorted(event["details"]["changed"]) == changed
    (delivery,) = client.get("/v1/deliveries").json()["deliveries"]
    assert (delivery["type"], delivery["id"]) == ("driftwatch.deployment.changed", f"{event['id']}-changed")
    second, new, old = client.get("/v1/deployments").json()["deployments"]
    assert (second["change"], old["change"]) == (None, None)
    assert new["change"]["event_id"] == event["id"]
    assert new["change"]["before"] == old["id"]
    assert new["change"]["changed"] == event["details"]["changed"]


def test_learning_a_fact_is_no_change(client: TestClient) -> None:
    for number, facts in enumerate([{}, {"engine": "vllm"}, FACTS, {"version": "0.32.0"}, {}]):
        client.post("/v1/samples", json=record(number, deployment=facts))
    client.post("/v1/samples", json=record(9, adapter="lora-a", deployment=FACTS))
    client.post("/v1/samples", json=record(10, adapter="lora-b", deployment=FACTS))
    client.post("/v1/samples", json=record(11, model="other", deployment={"engine": "sglang"}))
    assert client.get("/v1/events").json()["events"] == []
