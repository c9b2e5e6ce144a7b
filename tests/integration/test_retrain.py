"""From an alarm to a request, on both databases: decision, data, what a pipeline is told, and what it reports back."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import fsspec
import pytest
import sqlalchemy as sa
import yaml
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session

from driftwatch.control.judge import fold
from driftwatch.errors import StoreError
from driftwatch.retrain import progress
from driftwatch.retrain.export import choose_from, export, source_of
from driftwatch.retrain.policy import propose
from driftwatch.retrain.request import forget, request
from driftwatch.retrain.schema import published
from driftwatch.retrain.states import FOLLOWS, REPORTED, STATES
from driftwatch.settings import Settings
from driftwatch.store.connection import Store
from driftwatch.store.schema import Event, Replay, Retrain, Sample

from .retraining import CHAIN, alarm, alarmed, asked, controlled, file_bytes, lines, send, settings_of, the_cell
from .test_control import judge, record


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_of(tmp_path)


@pytest.fixture
def client(store: Store, settings: Settings) -> Iterator[TestClient]:
    with controlled(store, settings) as one:
        yield one


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


def test_a_leader_that_was_replaced_meanwhile_leaves_what_its_successor_wrote(
    client: TestClient, store: Store, settings: Settings, tmp_path: Path
) -> None:
    send(client, range(40))
    judge(store, settings, 0.8)
    rules, place = settings.retrain.data, str(tmp_path / "out")
    stale = choose_from(store, source_of(the_cell(store), 0.0, rules), rules)
    send(client, range(40, 60))
    judge(store, settings, 0.8)
    done, _ = export(store, choose_from(store, source_of(the_cell(store), 0.0, rules), rules), rules, place=place)

    def replaced(_: Session) -> None:
        raise StoreError("this control does not lead any more")

    with pytest.raises(StoreError, match="does not lead"):
        export(store.checked(replaced), stale, rules, place=place)
    assert hashlib.sha256(file_bytes(done.uri)).hexdigest() == done.sha256


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


def test_a_redactor_that_raises_holds_up_its_own_request_alone(
    client: TestClient, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "def redact(row):\n    if row['id'] == 'r7':\n        raise KeyError(row)\n    return row\n"
    (tmp_path / "raising_redactor.py").write_text(code)
    settings = settings_of(tmp_path, data={"redact": "raising_redactor:redact", "low_share": 0, "replay_share": 0})
    send(client, range(30))
    send(client, range(30, 60), "b")
    judge(store, settings, 0.8)
    first = alarm(store, settings, start=0.0)
    with store.write() as session:
        session.get_one(Retrain, first.id).draft = "another"  # of another draft, so that both may be open
    alarm(store, settings, start=0.0, segment="tenant=b")
    assert request(store, settings, time.time()) == 1
    assert asked(store)["data"]["data"]["rows"] > 20
    found = client.get(f"/v1/retrains/{first.id}").json()
    assert found["state"] == "proposed"
    assert found["reason"].endswith("raising_redactor:redact failed on a row: KeyError")
    assert not list((tmp_path / "exports").glob(f"*{first.id}*"))


def test_a_store_that_cannot_be_written_holds_up_no_other_request(
    client: TestClient, store: Store, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even the reason can be stored then."""
    send(client, range(30))
    send(client, range(30, 60), "b")
    judge(store, settings, 0.8)
    first = alarm(store, settings, start=0.0)
    with store.write() as session:
        session.get_one(Retrain, first.id).draft = "another"  # of another draft, so that both may be open
    second = alarm(store, settings, start=0.0, segment="tenant=b")

    def refused(_: Session) -> None:
        raise StoreError("the store is read-only")

    assert request(store.checked(refused), settings, time.time()) == 0
    for one in (first, second):
        assert f"{one.id}: the store is read-only" in caplog.text
    assert request(store, settings, time.time()) == 2


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
    steps = ["mapping", "plan", "train", "features_of_rows", "train_offline", "export"]
    assert list(data["specforge"]["commands"]) == steps
    offline = yaml.safe_load(data["specforge"]["offline_run_configuration"])
    assert offline["model"] == run["model"] | {"lm_head_key": "lm_head.weight"}
    assert len(json.dumps(data)) < 20_000
    assert data["target"]["tokenizer_sha256"]


def test_every_step_that_is_not_possible_is_refused_and_changes_nothing(
    client: TestClient, store: Store, settings: Settings
) -> None:
    """Each state against each report, and a candidate, with control's own token: it may no more than a pipeline."""
    send(client, range(30))
    judge(store, settings, 0.8)
    retrain = alarm(store, settings, start=0.0)
    url = f"/v1/retrains/{retrain.id}"
    for before in STATES:
        for after in (*sorted(REPORTED), "candidate_ready"):
            with store.write() as session:
                session.execute(sa.update(Retrain).values(state=before))
            if after in FOLLOWS[before]:
                continue
            if after == "candidate_ready":
                new = str(settings.retrain.candidates_dir) + "/new"
                answer = client.post(f"{url}/candidate", json={"path": new})
            else:
                answer = client.post(f"{url}/state", json={"state": after})
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "illegal_transition"), (before, after)
            assert f"is {before} cannot become {after}; possible: " in answer.json()["error"]["message"]
            found = client.get(url).json()
            assert (found["state"], len(found["history"]), found["candidates"]) == (before, 1, [])


def test_a_token_is_good_for_its_own_retrain_alone(client: TestClient, store: Store, settings: Settings) -> None:
    send(client, range(30))
    judge(store, settings, 0.8)
    first = alarm(store, settings, start=0.0)
    request(store, settings, time.time())
    token = asked(store)["data"]["callback"]["token"]
    client.post(f"/v1/retrains/{first.id}/state", json={"state": "failed"})
    send(client, range(30, 60), "b")
    judge(store, settings, 0.8)
    second = alarm(store, settings, start=0.0, segment="tenant=b")
    request(store, settings, time.time())

    def seen(id: str, given: str) -> int:
        return client.get(f"/v1/retrains/{id}", headers={b"authorization": given.encode("latin-1")}).status_code

    assert seen(first.id, f"Bearer {token}") == seen(first.id, f"bearer {token}") == 200
    assert seen(second.id, f"Bearer {token}") == 401
    assert seen("none", f"Bearer {token}") == 401
    for given in ("", "Bearer", f"Basic {token}", token, f"Bearer {token}x", f"Bearer {token[:-1]}", "Bearer \xff"):
        assert seen(first.id, given) == 401, given
    for path in ("/v1/candidates", "/v1/deliveries", "/v1/config", "/v1/segments"):
        assert client.get(path, headers={"authorization": f"Bearer {token}"}).status_code == 401
    with store.read() as session:
        kept = session.scalars(sa.select(Retrain.token_sha256)).all()
    assert sha256(token.encode()).hexdigest() in kept
    assert token not in str(kept)


def test_a_cooldown_outlives_a_restart_and_is_of_one_cell(
    client: TestClient, store: Store, settings: Settings, store_url: str
) -> None:
    send(client, range(30))
    send(client, range(30, 60), "b")
    judge(store, settings, 0.8)
    first = alarm(store, settings, start=0.0)
    request(store, settings, time.time())
    client.post(f"/v1/retrains/{first.id}/state", json={"state": "failed"})
    again = Store(store_url)  # another process: nothing is remembered but what is stored
    second = alarm(again, settings, start=0.0)
    assert (second.state, second.reason) == ("suppressed", f"cooldown since {first.id}")
    assert alarm(again, settings, start=0.0, segment="tenant=b").state == "proposed"
    with again.write() as session:
        session.execute(sa.update(Retrain).where(Retrain.id == first.id).values(created_at=time.time() - 3601))
        session.execute(sa.update(Retrain).where(Retrain.id != first.id).values(state="failed", created_at=0.0))
    assert alarm(again, settings, start=0.0).state == "proposed"
    again.close()


def test_two_decisions_at_once_open_one_retrain(client: TestClient, store: Store, settings: Settings) -> None:
    """Two threads of a control, or two controls while one takes over: the second looks once the first has decided."""
    send(client, range(30))
    send(client, range(30, 60), "b")
    judge(store, settings, 0.8)
    decided, states = threading.Event(), dict[str, str]()

    def decide(segment: str, *, first: bool) -> None:
        with store.write() as session:
            states[segment] = alarmed(session, settings, start=0.0, segment=segment, number=int(first)).state
            if first:
                decided.set()
                time.sleep(0.5)  # the other one has begun by now, and must wait

    one = threading.Thread(target=decide, args=("tenant=a",), kwargs={"first": True})
    one.start()
    assert decided.wait(10)
    decide("tenant=b", first=False)
    one.join()
    assert states == {"tenant=a": "proposed", "tenant=b": "suppressed"}


def test_live_figures_are_told_depth_by_depth_too_and_what_is_not_known_says_why(store: Store, tmp_path: Path) -> None:
    """The recorded engine's own counts: vLLM 0.32 tells depths apart, and nobody the draft's vocabulary."""
    base = settings_of(tmp_path)
    settings = base.model_copy(update={"models": [base.models[0].model_validate({"drafts": [{}], "gamma": 3})]})
    trace = Path(__file__).parents[1] / "data" / "traces" / "draft3.T0.jsonl"
    rows = [json.loads(line) | {"labels": {"tenant": "a"}, "model": "m"} for line in trace.read_text().splitlines()]
    with controlled(store, settings) as client:
        assert client.post("/v1/samples", json=rows).json()["stored"] == len(rows)
        fold(store, settings, time.time())
        alarm(store, settings, start=0.0)
        assert request(store, settings, time.time()) == 1
    data = asked(store)["data"]
    windows = sum(row["engine"]["windows"] for row in rows)
    for depth, told in enumerate(data["depths"]["current"]):
        accepted = sum(sum(row["engine"]["accepted_histogram"][depth + 1 :]) for row in rows)
        assert (told["depth"], told["numerator"], told["denominator"]) == (depth, accepted, windows)
        assert told["lower"] < told["value"] < told["upper"]
    assert data["depths"]["baseline"][0]["value"] is None
    assert data["out_of_vocabulary"] is None
    assert list(data["not_known"]) == ["out_of_vocabulary"]
    assert "only a replay can tell" in data["not_known"]["out_of_vocabulary"]


def test_an_engine_that_says_less_gives_no_depths_and_the_payload_says_so(store: Store, tmp_path: Path) -> None:
    base = settings_of(tmp_path)
    settings = base.model_copy(update={"models": [base.models[0].model_validate({"drafts": [{}], "gamma": 3})]})
    engine = {"windows": 10, "drafted": 30, "accepted": 15}
    with controlled(store, settings) as client:
        rows = [record(i, engine=engine, output_token_ids=[i, *range(25)]) for i in range(40)]
        assert client.post("/v1/samples", json=rows).json()["stored"] == len(rows)
        fold(store, settings, time.time())
        alarm(store, settings, start=0.0)
        assert request(store, settings, time.time()) == 1
    data = asked(store)["data"]
    assert data["depths"] is None
    reason = "the engine does not tell depths apart: its acceptance_rate is watched"
    assert data["not_known"]["depths"] == reason
