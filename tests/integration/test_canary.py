"""Canary prompts over HTTP and both databases: a reference, noise that is not the target's, and one that changed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from driftwatch.control import canary
from driftwatch.control.app import create_app
from driftwatch.errors import SettingsError
from driftwatch.settings import Settings
from driftwatch.store.connection import Store
from driftwatch.store.schema import Canary, Delivery, Sample

from .test_causes import SETTINGS
from .test_control import metrics, record

PROMPTS = [f"Question {i}?" for i in range(12)]


class Engine:
    """Answers each prompt with a text and log-probabilities that depend on its weights; what it was asked is kept."""

    def __init__(self) -> None:
        self.weights, self.shift, self.noisy, self.logprobs, self.down = 1, 0.0, 0, True, False
        self.asked: list[dict[str, Any]] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                said = {"mark": self.headers.get("x-driftwatch-canary"), "key": self.headers.get("authorization")}
                engine.asked.append(body | said | {"path": self.path})
                status, answer = engine.answer(body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.down:
            return 503, {"error": "no"}
        if body.get("logprobs") and not self.logprobs:
            return 400, {"error": "logprobs are not supported"}
        prompt = body["messages"][0]["content"]
        number = int(prompt.split()[1].rstrip("?"))
        text = f"{prompt} {self.weights}" + (" or so" if number < self.noisy else "")
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        if body.get("logprobs"):
            tokens = [{"token": "x", "logprob": -0.1 * (number + 1) - self.shift} for _ in range(8)]
            choice["logprobs"] = {"content": tokens}
        return 200, {"choices": [choice]}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture
def settings(engine: Engine, tmp_path: Path) -> Settings:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n")
    return Settings(
        **SETTINGS
        | {"engine": {"url": engine.url, "token": "k3y"}, "canary": {"prompts": str(tmp_path / "prompts.txt")}}
    )


@pytest.fixture
def client(store: Store, settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(store, settings), raise_server_exceptions=False) as client:
        client.post("/v1/samples", json=record(1, deployment={"target": "m-7b"}))
        yield client


def ask(store: Store, settings: Settings, rounds: int = 1) -> int:
    with httpx.Client(trust_env=False) as http:
        prompts = canary.read(settings.canary.prompts)
        return sum(canary.run(store, settings, prompts, http, time.time()) for _ in range(rounds))


def state(store: Store) -> dict[str, Any]:
    with store.read() as session:
        found: dict[str, Any] = session.scalars(sa.select(Canary)).one().state
    return found


def test_a_target_that_changed_is_told_after_the_second_round_and_closed_when_it_is_back(
    client: TestClient, store: Store, settings: Settings, engine: Engine
) -> None:
    assert ask(store, settings, 3) == 3
    assert state(store) == {"changed": None}
    ask(store, settings, 2)
    assert state(store)["changed"] is False
    engine.weights = 2
    ask(store, settings)
    assert client.get("/v1/events").json()["events"] == [], "one odd round may be an engine that restarts"
    ask(store, settings, 2)
    (event,) = client.get("/v1/events").json()["events"]
    assert (event["kind"], event["cause"], event["closed_at"]) == ("canary", "target", None)
    assert event["details"]["current"]["lower"] > 0.7
    assert event["details"]["evidence"] == ["12 of 12 canary prompts are answered otherwise than at first"]
    engine.weights = 1
    ask(store, settings)
    (event,) = client.get("/v1/events").json()["events"]
    assert event["closed_at"] is not None
    with store.read() as session:
        types = list(session.scalars(sa.select(Delivery.type).order_by(Delivery.id)))
    assert types == ["driftwatch.drift.opened", "driftwatch.drift.closed"]


def test_a_few_other_answers_are_an_engines_noise(
    client: TestClient, store: Store, settings: Settings, engine: Engine
) -> None:
    ask(store, settings, 3)
    engine.noisy = 3
    ask(store, settings, 4)
    assert state(store)["differ"]["numerator"] == 3
    assert state(store)["changed"] is False
    assert client.get("/v1/events").json()["events"] == []


def test_what_the_reference_answered_in_turn_is_no_difference(
    client: TestClient, store: Store, settings: Settings, engine: Engine
) -> None:
    for noisy in (0, 12, 6):
        engine.noisy = noisy
        ask(store, settings)
    engine.noisy = 12
    ask(store, settings, 2)
    assert state(store)["differ"]["numerator"] == 0


def test_the_same_words_that_are_less_likely_are_another_target(
    client: TestClient, store: Store, settings: Settings, engine: Engine
) -> None:
    ask(store, settings, 3)
    engine.shift = 0.02
    ask(store, settings, 2)
    assert state(store)["changed"] is False, "number formats and batches move as much"
    engine.shift = 0.2
    ask(store, settings, 2)
    assert state(store)["changed"] is True


def test_an_engine_without_log_probabilities_is_compared_by_its_words(
    client: TestClient, store: Store, settings: Settings, engine: Engine
) -> None:
    engine.logprobs = False
    ask(store, settings, 4)
    assert len(engine.asked) == 4 * (len(PROMPTS) + 1), "refused once a round, then left out"
    engine.weights = 2
    ask(store, settings, 2)
    assert state(store)["changed"] is True


def test_an_engine_that_is_away_says_nothing(
    client: TestClient, store: Store, settings: Settings, engine: Engine
) -> None:
    ask(store, settings, 3)
    engine.down = True
    assert ask(store, settings, 3) == 0
    assert state(store) == {"changed": None}
    assert client.get("/v1/events").json()["events"] == []


def test_canaries_are_greedy_marked_and_no_traffic(
    client: TestClient, store: Store, settings: Settings, engine: Engine
) -> None:
    before = metrics(client)["driftwatch_samples_total"]
    ask(store, settings)
    assert {(one["temperature"], one["model"], one["mark"], one["path"]) for one in engine.asked} == {
        (0, "m", "1", "/v1/chat/completions")
    }
    assert {one["key"] for one in engine.asked} == {"Bearer k3y"}
    assert metrics(client)["driftwatch_samples_total"] == before
    with store.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Sample)) == 1


def test_another_deployment_has_a_reference_of_its_own(
    client: TestClient, store: Store, settings: Settings, engine: Engine
) -> None:
    ask(store, settings, 4)
    engine.weights = 2
    time.sleep(1.1)  # last_seen moves in steps of a second
    client.post("/v1/samples", json=record(2, deployment={"target": "m-8b"}))
    ask(store, settings, 5)
    assert [event["kind"] for event in client.get("/v1/events").json()["events"]] == ["deployment_changed"]
    with store.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Canary)) == 2


def test_without_traffic_nobody_is_asked(store: Store, settings: Settings, engine: Engine) -> None:
    assert ask(store, settings) == 0
    assert engine.asked == []


@pytest.mark.parametrize(("text", "reason"), [("one\ntwo\n", "has 2 prompts; give 10 to 50"), (None, "No such file")])
def test_a_file_of_prompts_that_will_not_do_is_one_line(
    sqlite_store: Store, tmp_path: Path, text: str | None, reason: str
) -> None:
    path = tmp_path / "few.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=reason) as caught:
        create_app(sqlite_store, Settings(canary={"prompts": str(path)}))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
