"""From an alarm to a request, on both databases: decision, data, what a pipeline is told, and what it reports back."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import sqlalchemy as sa
import yaml
from fastapi.testclient import TestClient

from driftwatch.control.app import create_app
from driftwatch.errors import StoreError
from driftwatch.retrain import progress
from driftwatch.retrain.export import choose_from, export, source_of
from driftwatch.retrain.policy import propose
from driftwatch.retrain.request import forget, request
from driftwatch.retrain.schema import published
from driftwatch.settings import Settings
from driftwatch.store.connection import Store
from driftwatch.store.schema import Cell, Delivery, Event, Replay, Retrain, Sample

from .test_control import judge, record

CHAIN = Path(__file__).parents[1] / "data" / "models" / "chain"
HOOK = {"name": "hook", "url": "http://127.0.0.1:9/hook", "secrets": ["whsec_c2VjcmV0"]}


def settings_of(folder: Path, **retrain: Any) -> Settings:
    return Settings(
        models=[{"name": "*", "drafts": [{"name": "incumbent", "path": str(CHAIN)}], "gamma": 3}],
        detect={"baseline": {"min_requests": 10_000}},
        webhooks=[HOOK],
        control={"tick_s": 3600, "token": "secret"},
        shadow={"device": "cpu", "threads": 1},
        retrain={"export_dir": folder / "exports", "candidates_dir": folder / "candidates"} | retrain,
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "candidates").mkdir()
    return settings_of(tmp_path)


@pytest.fixture
def client(store: Store, settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(store, settings), raise_server_exceptions=False) as client:
        client.headers["authorization"] = "Bearer secret"
        yield client


def send(client: TestClient, numbers: range, tenant: str = "a", **fields: Any) -> None:
    """Requests with tokens of their own, so that none is another's duplicate."""
    records = [record(i, tenant, output_token_ids=[i, *range(32)]) | fields for i in numbers]
    assert client.post("/v1/samples", json=records).json()["stored"] == len(records)


def alarm(store: Store, settings: Settings, *, start: float, segment: str = "tenant=a", **details: Any) -> Retrain:
    """An event as the detector writes it, and the decision on it."""
    with store.write() as session:
        cell = session.scalars(sa.select(Cell).where(Cell.segment == segment).order_by(Cell.id.desc())).first()
        assert cell is not None
        number = session.scalar(sa.select(sa.func.count()).select_from(Event)) or 0
        event = Event(
            id=f"event{number}",
            kind="drift",
            cell_id=cell.id,
            deployment_id=cell.deployment_id,
            segment=segment,
            split=cell.split,
            draft=cell.draft,
            cause=details.get("cause", "unknown"),
            opened_at=time.time(),
            closed_at=time.time(),
            request_id="r1",
            start_request_id="r1",
            details={"start_served_at": start, "cause": "unknown"} | details,
        )
        session.add(event)
        session.flush()
        return propose(session, event, cooldown_s=3600, policy=settings.retrain.policy)


def lines(uri: str) -> list[dict[str, Any]]:
    with fsspec.open(uri, "rt") as file:
        return [json.loads(line) for line in file]


def asked(store: Store) -> dict[str, Any]:
    """The one request that was announced."""
    with store.read() as session:
        query = sa.select(Delivery.body).where(Delivery.type == "driftwatch.retrain.requested")
        found: dict[str, Any] = json.loads(session.scalars(query).one())
    return found


def test_a_request_holds_all_that_a_pipeline_needs(
    client: TestClient, store: Store, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    send(client, range(60), temperature=0.7)
    judge(store, settings, 0.8)
    start = time.time()
    send(client, range(60, 160), temperature=0.7)
    judge(store, settings, 0.3)
    retrain = alarm(store, settings, start=start)
    assert request(store, settings, time.time()) == 1
    event = asked(store)
    assert "bug" not in caplog.text
    assert event["dataschema"] == published("driftwatch.retrain.requested")["$id"]
    data = event["data"]
    # The data is what was served, and its hash is right.
    rows = lines(data["data"]["uri"])
    assert data["data"]["sha256"] == hashlib.sha256(file_bytes(data["data"]["uri"])).hexdigest()
    assert data["data"]["rows"] == len(rows) > 80
    assert {"event", "replay"} <= set(data["data"]["pools"])
    assert all(row["loss_mask"] == [0, 0] + [1] * 33 for row in rows)
    assert all(row["input_ids"][3:] == list(range(32)) for row in rows)
    kept = lines(data["data"]["eval_uri"])
    assert len(kept) == data["data"]["eval_rows"] > 0
    assert not {row["input_ids"][2] for row in rows} & {row["input_ids"][2] for row in kept}
    # Depth by depth, before and now, with the denominator and an interval.
    before, now = data["depths"]["baseline"], data["depths"]["current"]
    assert [one["depth"] for one in now] == [0, 1, 2]
    assert now[0]["upper"] < before[0]["lower"]
    assert data["out_of_vocabulary"] is None  # nobody said how much of it there is
    assert data["serving"] | {"engine": None, "version": None} == {
        "engine": None,
        "version": None,
        "gamma": 3,
        "rule": "argmax",
        "sampling": [{"temperature": 0.7, "top_p": None, "top_k": None, "requests": 100}],
    }
    assert data["draft"]["config_sha256"] == hashlib.sha256((CHAIN / "config.json").read_bytes()).hexdigest()
    assert data["specforge"] is None  # a plain chain is nothing that it trains
    assert data["callback"]["url"] == f"http://127.0.0.1:9464/v1/retrains/{retrain.id}"
    assert len(json.dumps(event)) < 20_000
    history = client.get(f"/v1/retrains/{retrain.id}").json()["history"]
    assert [(step["before"], step["after"]) for step in history] == [(None, "proposed"), ("proposed", "requested")]
    assert request(store, settings, time.time()) == 0


def file_bytes(uri: str) -> bytes:
    with fsspec.open(uri, "rb") as file:
        found: bytes = file.read()
    return found


def test_a_no_is_stored_with_every_reason(client: TestClient, store: Store, tmp_path: Path) -> None:
    policy = {"segments": ["tenant=b"], "min_value_per_day": 5.0}
    strict = settings_of(tmp_path, policy=policy)
    send(client, range(30))
    judge(store, strict, 0.8)
    retrain = alarm(store, strict, start=0.0, cause="engine", action="fix_engine")
    found = client.get(f"/v1/retrains/{retrain.id}").json()
    assert found["state"] == "suppressed"
    said = found["decision"]["reasons"]
    assert [reason.split(":")[0].split(" is ")[0] for reason in said] == [
        "no training against the cause engine",
        "the segment tenant=a",
        "the expected gain a day",
    ]
    assert found["reason"] == "; ".join(said)
    assert request(store, strict, time.time()) == 0


def test_one_request_is_open_for_a_draft_at_a_time(client: TestClient, store: Store, settings: Settings) -> None:
    send(client, range(30))
    send(client, range(30, 60), "b")
    judge(store, settings, 0.8)
    first = alarm(store, settings, start=0.0)
    second = alarm(store, settings, start=0.0, segment="tenant=b")
    assert (first.state, second.state) == ("proposed", "suppressed")
    assert second.reason == f"{first.id} of the same draft is open"
    assert progress.expire(store, silence_s=1.0, now=time.time() + 10) == 1
    assert client.get(f"/v1/retrains/{first.id}").json()["state"] == "expired"
    assert alarm(store, settings, start=0.0, segment="tenant=b").state == "proposed"


def test_a_decision_follows_its_events_cause_until_somebody_was_told(
    client: TestClient, store: Store, settings: Settings
) -> None:
    send(client, range(30))
    judge(store, settings, 0.8)
    retrain = alarm(store, settings, start=0.0, cause="engine")
    for cause, state in [("traffic", "proposed"), ("load", "suppressed"), ("traffic", "proposed")]:
        with store.write() as session:
            event = session.get_one(Event, retrain.event_id)
            event.details = event.details | {"cause": cause}
            assert propose(session, event, cooldown_s=3600).state == state
    assert request(store, settings, time.time()) == 1
    with store.write() as session:
        event = session.get_one(Event, retrain.event_id)
        event.details = event.details | {"cause": "engine"}
        assert propose(session, event, cooldown_s=3600).state == "requested"


def test_a_request_waits_for_samples(client: TestClient, store: Store, tmp_path: Path) -> None:
    patient = settings_of(tmp_path, policy={"min_samples": 50})
    send(client, range(30))
    judge(store, patient, 0.8)
    retrain = alarm(store, patient, start=0.0)
    assert request(store, patient, time.time()) == 0
    found = client.get(f"/v1/retrains/{retrain.id}").json()
    assert (found["state"], found["reason"]) == ("proposed", "waits for samples: 30 of 50")
    send(client, range(30, 60))
    judge(store, patient, 0.8)
    assert request(store, patient, time.time()) == 1


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_an_export_is_whole_wherever_it_lies(
    client: TestClient, store: Store, settings: Settings, tmp_path: Path, place: str
) -> None:
    send(client, range(40))
    judge(store, settings, 0.8)
    target = str(tmp_path / "out") if place == "folder" else f"memory://out-{tmp_path.name}"
    cell = the_cell(store)
    rules = settings.retrain.data
    done, trained = export(store, choose_from(store, source_of(cell, 0.0, rules), rules), rules, place=target)
    again, _ = export(store, choose_from(store, source_of(cell, 0.0, rules), rules), rules, place=target)
    assert done == again
    assert len(lines(done.uri)) == done.rows == len(trained)
    manifest = json.loads(file_bytes(done.manifest_uri))
    assert manifest["data"]["sha256"] == done.sha256
    assert manifest["draft"] == {"name": "incumbent", "sha256": "f"}
    assert manifest["labels"] == {"tenant": "a"}
    assert manifest["served"]["first"] <= manifest["served"]["last"]
    files, path = fsspec.core.url_to_fs(target)
    assert sorted(name.rpartition("/")[2] for name in files.ls(path, detail=False)) == [
        "eval.jsonl",
        "manifest.json",
        "train.jsonl",
    ]


def the_cell(store: Store) -> Cell:
    with store.read() as session:
        return session.scalars(sa.select(Cell).where(Cell.segment == "tenant=a")).one()


def test_what_may_not_be_trained_on_is_left_out(client: TestClient, store: Store, tmp_path: Path) -> None:
    """The client's word, tenants that are excluded, and tenants that are not the event's."""
    settings = settings_of(tmp_path, data={"exclude_tenants": ["c"], "cross_tenant": True, "eval_share": 0})
    send(client, range(10))
    send(client, range(10, 20), no_train=True)
    send(client, range(20, 30), "b")
    send(client, range(30, 40), "c")
    judge(store, settings, 0.8)
    apart = settings_of(tmp_path, data={"exclude_tenants": ["c"], "eval_share": 0})
    found = {}
    for name, one in {"mixed": settings, "apart": apart}.items():
        rules = one.retrain.data
        done, _ = export(
            store, choose_from(store, source_of(the_cell(store), 0.0, rules), rules), rules, place=str(tmp_path / name)
        )
        found[name] = ({row["input_ids"][2] for row in lines(done.uri)}, done.left_out)
    mixed, apart_ids = found["mixed"][0], found["apart"][0]
    assert apart_ids == set(range(10))
    assert apart_ids < mixed < set(range(10)) | set(range(20, 30))
    assert found["apart"][1] == {"forbidden_by_client": 10, "excluded_tenant": 10, "another_tenant": 10}


def test_content_is_exported_once(client: TestClient, store: Store, settings: Settings, tmp_path: Path) -> None:
    client.post("/v1/samples", json=[record(i) for i in range(20)])
    judge(store, settings, 0.8)
    rules = settings.retrain.data
    done, _ = export(
        store, choose_from(store, source_of(the_cell(store), 0.0, rules), rules), rules, place=str(tmp_path / "x")
    )
    assert (done.rows + done.eval_rows, done.left_out) == (1, {"duplicate": 19})


def test_a_redactor_sees_each_row_before_it_is_written(
    client: TestClient, store: Store, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_redactor.py").write_text(
        "def redact(row):\n"
        "    if row['id'] == 'r1':\n"
        "        return None\n"
        "    return row | {'input_ids': [0 if token == 7 else token for token in row['input_ids']]}\n"
        "def spoil(row):\n"
        "    return row | {'input_ids': []}\n"
    )
    send(client, range(20))
    judge(store, settings, 0.8)
    source = choose_from(store, source_of(the_cell(store), 0.0, settings.retrain.data), settings.retrain.data)
    rules = settings.retrain.data.model_copy(update={"redact": "own_redactor:redact"})
    done, _ = export(store, source, rules, place=str(tmp_path / "x"))
    assert done.redacted
    assert done.left_out == {"redacted": 1}
    rows = lines(done.uri) + lines(done.eval_uri)
    assert len(rows) == 19
    assert not any(7 in row["input_ids"][3:] for row in rows)
    spoilt = settings.retrain.data.model_copy(update={"redact": "own_redactor:spoil"})
    with pytest.raises(StoreError, match="returned no row"):
        export(store, source, spoilt, place=str(tmp_path / "y"))
    assert not (tmp_path / "y").exists()


def test_messages_become_conversations_where_they_are_kept(
    client: TestClient, store: Store, settings: Settings, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = [
        {"id": f"t{i}", "model": "m", "labels": {"tenant": "a"}, "messages": messages, "output": "x"} for i in range(3)
    ]
    assert client.post("/v1/samples", json=ids).status_code == 201
    with store.write() as session:
        # As the shadow leaves them where `retention.text` is on: ids beside the text.
        for number, sample in enumerate(session.scalars(sa.select(Sample)).all()):
            session.execute(
                sa.text("UPDATE payloads SET prompt_ids = :p, output_ids = :o WHERE sample_id = :id"),
                {"p": bytes([1, 0, 0, 0]), "o": bytes([number, 0, 0, 0]), "id": sample.id},
            )
    judge(store, settings, 0.8)
    rules = settings.retrain.data.model_copy(update={"eval_share": 0.0})
    done, _ = export(
        store, choose_from(store, source_of(the_cell(store), 0.0, rules), rules), rules, place=str(tmp_path / "x")
    )
    assert done.conversations == 3
    assert done.conversations_uri is not None
    (first, *_) = lines(done.conversations_uri)
    assert first["conversations"] == [*messages, {"role": "assistant", "content": "x"}]


def test_an_export_is_deleted_when_its_time_is_over(client: TestClient, store: Store, settings: Settings) -> None:
    send(client, range(30))
    judge(store, settings, 0.8)
    retrain = alarm(store, settings, start=0.0)
    request(store, settings, time.time())
    place = Path(client.get(f"/v1/retrains/{retrain.id}").json()["data"]["place"])
    later = time.time() + 31 * 86_400
    assert forget(store, keep_days=30, now=later) == 0  # it is still open
    client.post(f"/v1/retrains/{retrain.id}/state", json={"state": "failed", "reason": "no GPU"})
    assert place.is_dir()
    assert forget(store, keep_days=30, now=later) == 1
    assert not place.exists()
    assert forget(store, keep_days=30, now=later) == 0


def test_a_pipeline_reports_with_the_token_of_its_retrain(client: TestClient, store: Store, settings: Settings) -> None:
    send(client, range(30))
    judge(store, settings, 0.8)
    retrain = alarm(store, settings, start=0.0)
    request(store, settings, time.time())
    callback = asked(store)["data"]["callback"]
    url, token = f"/v1/retrains/{retrain.id}/state", callback["token"]

    def post(state: str, token: str) -> int:
        return client.post(url, json={"state": state}, headers={"authorization": f"Bearer {token}"}).status_code

    assert post("accepted", "wrong") == 401
    assert post("accepted", "") == 401
    assert post("accepted", token) == 200
    assert client.get("/v1/retrains", headers={"authorization": f"Bearer {token}"}).status_code == 401
    assert post("training", token) == 200
    answer = client.post(url, json={"state": "accepted"})
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "illegal_transition"
    assert "possible: candidate_ready, failed, expired" in answer.json()["error"]["message"]
    assert client.post(url, json={"state": "promoted"}).status_code == 422
    assert client.post("/v1/retrains/none/state", json={"state": "failed"}).status_code == 404
    assert token not in client.get(f"/v1/retrains/{retrain.id}").text


def test_an_eagle3_draft_comes_with_a_run_configuration(tmp_path: Path, store: Store, client: TestClient) -> None:
    models = CHAIN.parent
    drafts = [{"name": "incumbent", "path": str(models / "eagle3")}]
    base = settings_of(tmp_path)
    settings = base.model_copy(
        update={
            "models": [base.models[0].model_validate({"target": str(models / "target"), "drafts": drafts, "gamma": 3})]
        }
    )
    send(client, range(30))
    judge(store, settings, 0.8)
    with store.write() as session:  # as the shadow leaves it for a draft with a vocabulary of its own
        session.execute(sa.update(Replay).values(figures={"outside": 8}))
    alarm(store, settings, start=0.0)
    assert request(store, settings, time.time()) == 1
    data = asked(store)["data"]
    share = data["out_of_vocabulary"]["current"]
    assert (share["value"], share["requests"]) == (0.25, 30)
    run = yaml.safe_load(data["specforge"]["run_configuration"])
    assert file_bytes(data["specforge"]["run_configuration_uri"]).decode() == data["specforge"]["run_configuration"]
    assert run["model"]["draft_checkpoint_path"] == str(models / "eagle3")
    assert run["model"]["vocab_mapping_path"].endswith("vocab_mapping.pt")
    assert list(data["specforge"]["commands"]) == ["mapping", "plan", "train", "export"]
    assert data["target"]["tokenizer_sha256"]
