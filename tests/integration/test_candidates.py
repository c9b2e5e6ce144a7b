"""Candidates on both databases: taken over HTTP, replayed by a real shadow beside the incumbent, judged, told."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
import torch
from fastapi.testclient import TestClient
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from driftwatch.acceptance import Weights
from driftwatch.retrain import candidates
from driftwatch.retrain.request import request
from driftwatch.settings import Settings
from driftwatch.shadow.worker import Worker
from driftwatch.store import candidates as stored
from driftwatch.store import work
from driftwatch.store.connection import Store
from driftwatch.store.schema import Candidate, Cell, Delivery, Pair, Replay, Work

from .retraining import CHAIN, alarm, controlled, send, settings_of
from .test_control import judge


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another draft: the recorded one with noise on its weights."""
    folder = tmp_path_factory.mktemp("perturbed") / "draft"
    shutil.copytree(CHAIN, folder)
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    for name, value in weights.items():
        weights[name] = value + 0.15 * value.float().std() * torch.randn(value.shape, generator=noise).to(value.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def answers(perturbed: Path) -> dict[str, list[tuple[list[int], list[int]]]]:
    """What each of the two drafts would say itself, greedily: on that, it is right always and the other sometimes."""
    prompts = torch.randint(1, 2000, (160, 12), generator=torch.Generator().manual_seed(1))
    found = {}
    for name, folder in {"incumbent": CHAIN, "candidate": perturbed}.items():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = prompts
        with torch.no_grad():
            for _ in range(24):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        found[name] = [(row[:12].tolist(), row[12:].tolist()) for row in ids]
    return found


Answers = dict[str, list[tuple[list[int], list[int]]]]

SHALLOW = {"tokens": 24, "encoding": "bits", "depths": 3, "weights": bytes(9)}
"""Columns of a replay of three depths."""


def with_gamma(settings: Settings, gamma: int) -> Settings:
    return settings.model_copy(update={"models": [settings.models[0].model_copy(update={"gamma": gamma})]})


def evaluate(
    client: TestClient,
    store: Store,
    settings: Settings,
    path: Path,
    tenants: dict[str, list[tuple[list[int], list[int]]]],
) -> dict[str, Any]:
    """Serve these answers, let a real shadow judge the incumbent, ask for training, hand the candidate in."""
    worker = Worker(settings, store)
    for tenant, served in tenants.items():
        rows = [
            {"id": f"{tenant}{i}", "model": "m", "labels": {"tenant": tenant}}
            | {"prompt_token_ids": prompt, "output_token_ids": output}
            for i, (prompt, output) in enumerate(served)
        ]
        assert client.post("/v1/samples", json=rows).json()["stored"] == len(rows)
    start = time.time()
    send(client, range(20), "a")
    while worker.step():
        pass
    judge(store, settings, 0.5)
    retrain = alarm(store, settings, start=start)
    assert request(store, settings, time.time()) == 1
    answer = client.post(f"/v1/retrains/{retrain.id}/candidate", json={"path": str(path), "loss": 1.5})
    assert answer.status_code == 202, answer.text
    assert candidates.judge(store, settings, time.time()) == 0
    while worker.step():
        pass
    candidates.judge(store, settings, time.time())
    found: dict[str, Any] = client.get(f"/v1/retrains/{retrain.id}").json()
    return found


def folder(settings: Settings) -> Path:
    assert settings.retrain.candidates_dir is not None
    return settings.retrain.candidates_dir


@pytest.fixture
def plain(tmp_path: Path, perturbed: Path) -> Settings:
    """Training data of the event alone, so that all of the rest is history."""
    shutil.copytree(perturbed, tmp_path / "candidates" / "new")
    return settings_of(
        tmp_path, data={"low_share": 0, "replay_share": 0}, gate={"tail_tolerance": 0.05, "tolerance": 0.05}
    )


@pytest.fixture
def judged_by(store: Store, plain: Settings) -> Iterator[TestClient]:
    with controlled(store, plain) as one:
        yield one


@pytest.mark.parametrize("path", ["/etc", "../candidates/../x", "{root}", "{root}/../../x", "\u0000"])
def test_a_candidate_lies_below_its_folder_or_is_refused(
    judged_by: TestClient, store: Store, plain: Settings, tmp_path: Path, path: str
) -> None:
    send(judged_by, range(30))
    judge(store, plain, 0.8)
    retrain = alarm(store, plain, start=0.0)
    request(store, plain, time.time())
    (tmp_path / "candidates" / "link").symlink_to("/etc")
    for one in (path.format(root=tmp_path / "candidates"), str(tmp_path / "candidates" / "link" / "x")):
        answer = judged_by.post(f"/v1/retrains/{retrain.id}/candidate", json={"path": one})
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unusable_candidate")
    assert judged_by.get(f"/v1/retrains/{retrain.id}").json()["state"] == "requested"


def test_better_on_average_but_worse_in_one_cell_is_rejected(
    judged_by: TestClient, store: Store, plain: Settings, answers: Answers
) -> None:
    tenants = {"a": answers["candidate"][:125], "b": answers["incumbent"][125:]}
    found = evaluate(judged_by, store, plain, folder(plain) / "new", tenants)
    (candidate,) = found["candidates"]
    table = {row["segment"]: row for row in candidate["verdict"]["table"]}
    assert candidate["verdict"]["overall"]["lower"] > 0
    assert table["tenant=a"]["lower"] > 0
    assert table["tenant=b"]["upper"] < -0.05
    assert (candidate["state"], found["state"]) == ("rejected", "rejected")
    assert "worse by more than 0.05 in tenant=b" in found["reason"]
    assert candidate["details"] == {"loss": 1.5}
    # On the same samples, none of them trained on; and told by webhook, in the words of its schema.
    judged = 180 - found["data"]["rows"]
    assert sum(row["requests"] for row in table.values()) == judged >= 160
    with store.read() as session:
        body = session.scalars(sa.select(Delivery.body).where(Delivery.type == "driftwatch.candidate.verdict")).one()
        replays = session.scalars(sa.select(Replay).where(Replay.draft == candidate["id"])).all()
        drafts = set(session.scalars(sa.select(Cell.draft)))
    sent = json.loads(body)
    assert sent["data"]["verdict"] == "reject"
    assert sent["data"]["table"] == candidate["verdict"]["table"]
    assert len(replays) == judged
    assert drafts == {"incumbent"}  # a candidate has no cells, baselines or alarms of its own
    assert [step["after"] for step in found["history"]][-3:] == ["candidate_ready", "evaluating", "rejected"]


def test_better_where_asked_and_worse_nowhere_is_promoted(
    judged_by: TestClient, store: Store, plain: Settings, answers: Answers
) -> None:
    tenants = {"a": answers["candidate"][:110], "b": answers["candidate"][110:]}
    found = evaluate(judged_by, store, plain, folder(plain) / "new", tenants)
    assert found["state"] == "promoted"
    (candidate,) = found["candidates"]
    assert candidate["verdict"]["phase"] == "history"
    assert candidate["fingerprint"] != candidate["incumbent_fingerprint"]
    assert judged_by.post(f"/v1/retrains/{found['id']}/candidate", json={"path": candidate["path"]}).status_code == 409
    # Once it serves, what it showed is compared with what it does.
    assert judged_by.get(f"/v1/candidates/{candidate['id']}").json()["after_promotion"] is None
    send(judged_by, range(1000, 1060), "a")
    judge(store, plain, 0.5, fingerprint=candidate["fingerprint"])
    (cell,) = judged_by.get(f"/v1/candidates/{candidate['id']}").json()["after_promotion"]
    assert cell["segment"] == "tenant=a"
    assert cell["promised"] > 0.95
    assert cell["hit_rate"]["upper"] < 0.7
    assert cell["kept"] is False


def test_what_history_cannot_say_live_samples_do(
    judged_by: TestClient, store: Store, plain: Settings, answers: Answers
) -> None:
    found = evaluate(judged_by, store, plain, folder(plain) / "new", {"a": answers["candidate"][:20]})
    (candidate,) = found["candidates"]
    assert (candidate["state"], found["state"]) == ("live", "evaluating")
    assert any(reason.startswith("not shown") for reason in candidate["verdict"]["reasons"])
    worker = Worker(plain, store)
    rows = [
        {"id": f"live{i}-{n}", "model": "m", "labels": {"tenant": "a"}}
        | {"prompt_token_ids": prompt, "output_token_ids": output}
        for n in range(3)
        for i, (prompt, output) in enumerate(answers["candidate"])
    ]
    judged_by.post("/v1/samples", json=rows)
    while worker.step():  # the incumbent
        pass
    candidates.judge(store, plain, time.time())  # queues the candidate on the same samples
    while worker.step():
        pass
    candidates.judge(store, plain, time.time())
    (candidate,) = judged_by.get("/v1/candidates").json()["candidates"]
    assert (candidate["state"], candidate["verdict"]["phase"]) == ("promoted", "live")
    with store.read() as session:
        waiting = (
            sa.select(sa.func.count()).select_from(Work).where(Work.draft == candidate["id"], Work.state == "pending")
        )
        assert session.scalar(waiting) == 0


def test_a_candidate_that_cannot_be_loaded_fails_with_the_shadows_word(
    judged_by: TestClient, store: Store, plain: Settings, answers: Answers
) -> None:
    (folder(plain) / "none").mkdir()
    found = evaluate(judged_by, store, plain, folder(plain) / "none", {"a": answers["candidate"][:20]})
    assert found["state"] == "failed"
    assert "config.json" in found["reason"]


def test_weights_that_change_while_they_are_judged_fail_the_candidate(
    judged_by: TestClient, store: Store, plain: Settings, answers: Answers
) -> None:
    found = evaluate(judged_by, store, plain, folder(plain) / "new", {"a": answers["candidate"][:20]})
    (candidate,) = found["candidates"]
    assert candidate["state"] == "live"
    shutil.copy(CHAIN / "model.safetensors", folder(plain) / "new" / "model.safetensors")
    send(judged_by, range(500, 520))
    worker = Worker(plain, store)  # another one, which reads the folder anew
    while worker.step():
        pass
    candidates.judge(store, plain, time.time())
    while worker.step():
        pass
    candidates.judge(store, plain, time.time())
    over = judged_by.get(f"/v1/retrains/{found['id']}").json()
    assert over["state"] == "failed"
    assert over["reason"].startswith("its weights changed while it was judged")


def test_replays_that_do_not_reach_the_settings_gamma_fail_the_candidate(
    judged_by: TestClient, store: Store, plain: Settings, answers: Answers
) -> None:
    """Replayed to three depths before somebody set a larger gamma: what is stored of it does not hold that."""
    found = evaluate(judged_by, store, plain, folder(plain) / "new", {"a": answers["candidate"][:20]})
    with store.write() as session:
        session.execute(sa.delete(Pair))
        own = sa.update(Replay).where(Replay.draft == found["candidates"][0]["id"])
        session.execute(own.values(SHALLOW))
    candidates.judge(store, with_gamma(plain, 5), time.time())
    over = judged_by.get(f"/v1/retrains/{found['id']}").json()
    assert over["state"] == "failed"
    assert over["reason"].startswith("its replays do not reach gamma 5")


def test_replays_of_the_incumbent_that_do_not_reach_it_are_left_out(
    judged_by: TestClient, store: Store, plain: Settings, answers: Answers
) -> None:
    """They are older than the setting, and no fault of the candidate."""
    found = evaluate(judged_by, store, plain, folder(plain) / "new", {"a": answers["candidate"][:20]})
    with store.write() as session:
        paired = set(session.scalars(sa.select(Pair.sample_id)))
        old = set(sorted(paired)[:5])
        session.execute(sa.delete(Pair))
        theirs = sa.update(Replay).where(Replay.draft == "incumbent", Replay.sample_id.in_(old))
        session.execute(theirs.values(SHALLOW))
    candidates.judge(store, with_gamma(plain, 5), time.time())
    assert judged_by.get(f"/v1/retrains/{found['id']}").json()["state"] == "evaluating"
    with store.read() as session:
        assert set(session.scalars(sa.select(Pair.sample_id))) == paired - old
        candidate = stored.locked(session, found["candidates"][0]["id"])
        again = stored.judged_by_incumbent(session, candidate, 5, deployment_id=None, after=0, limit=1000)
        assert set(again) & paired == paired - old


@pytest.mark.parametrize("gamma", [3, 8])
def test_the_limit_of_the_tail_is_of_the_same_weights_at_the_steps_of_their_tree(
    judged_by: TestClient, store: Store, plain: Settings, gamma: int
) -> None:
    """Where the history has no request that is long enough: whatever proposal length is configured."""
    tree, other = Weights(np.ones((32, 5)), walked=True), Weights(np.zeros((32, 1)))
    for first, weights, fingerprint in ((0, tree, "f"), (20, other, "g")):
        send(judged_by, range(first, first + 20))
        encoding, data = weights.encode()
        shape = {"tokens": 32, "depths": weights.values.shape[1], "encoding": encoding, "weights": data}
        row = {"fingerprint": fingerprint, "rule": "argmax", "split": "none", "proposals": None, "figures": None}
        with store.write() as session:
            tasks = work.lease(session, "test", now=time.time(), lease_s=60, limit=50)
            verdicts = [work.Verdict(task, replay=row | shape) for task in tasks]
            work.complete(session, "test", verdicts, now=time.time())
    candidate = Candidate(model="m", incumbent="incumbent", incumbent_fingerprint="f")
    with store.read() as session:
        assert candidates._p99(session, with_gamma(plain, gamma), candidate) == 6 / 32


@pytest.mark.parametrize("details", [{"note": "a\u0000b"}, {"deep": {"er": ["\u0000"]}}])
def test_details_that_a_database_cannot_hold_are_an_error_and_no_fault(
    judged_by: TestClient, store: Store, plain: Settings, details: dict[str, Any]
) -> None:
    send(judged_by, range(30))
    judge(store, plain, 0.8)
    retrain = alarm(store, plain, start=0.0)
    request(store, plain, time.time())
    body = {"path": str(folder(plain) / "new")} | details
    answer = judged_by.post(f"/v1/retrains/{retrain.id}/candidate", json=body)
    assert answer.status_code in (202, 400), answer.text
    report = judged_by.post(f"/v1/retrains/{retrain.id}/state", json={"state": "failed", "reason": "a\u0000b"})
    assert report.status_code in (200, 400), report.text
    assert judged_by.get("/v1/retrains/%00").status_code in (400, 404)
