"""Delivering webhooks to a real receiver: signed, in order, at least once, and given up in the end."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import sqlalchemy as sa
from standardwebhooks import Webhook as Verifier

from driftwatch.errors import SettingsError
from driftwatch.retrain.announce import announce
from driftwatch.retrain.delivery import ATTEMPTS, Courier
from driftwatch.settings import Webhook
from driftwatch.store.connection import Store
from driftwatch.store.schema import Delivery

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()
OLD_SECRET = "whsec_" + base64.b64encode(b"76543210fedcba9876543210").decode()

Answer = Callable[[BaseHTTPRequestHandler], None]


class Receiver:
    """A real HTTP server that answers as it is told and keeps what it got."""

    def __init__(self, *answers: tuple[int, dict[str, str]]) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        answers_left = list(answers)
        received = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                received.append(({key.lower(): value for key, value in self.headers.items()}, body))
                status, headers = answers_left.pop(0) if answers_left else (204, {})
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"


@contextmanager
def receiving(*answers: tuple[int, dict[str, str]]) -> Iterator[Receiver]:
    receiver = Receiver(*answers)
    thread = threading.Thread(target=receiver.server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join()


def hook(url: str, *secrets: str, name: str = "a", events: tuple[str, ...] = ("*",)) -> Webhook:
    return Webhook(name=name, url=url, secrets=list(secrets), events=list(events))


def queue(store: Store, hooks: list[Webhook], *names: str, type: str = "driftwatch.drift.opened") -> None:
    with store.write() as session:
        for name in names:
            announce(session, hooks, id=name, type=type, subject="tenant=a", at=time.time(), data={"number": 1})


def deliveries(store: Store) -> list[Delivery]:
    with store.read() as session:
        return list(session.scalars(sa.select(Delivery).order_by(Delivery.id)))


def make_due(store: Store) -> None:
    with store.write() as session:
        session.execute(sa.update(Delivery).values(due_at=0.0))


@contextmanager
def courier(store: Store, *hooks: Webhook) -> Iterator[Courier]:
    one = Courier(store, hooks)
    yield one
    one.close()


def test_a_delivery_is_a_signed_cloudevent(store: Store) -> None:
    with receiving() as receiver, courier(store, hook(receiver.url, SECRET, OLD_SECRET)) as sender:
        queue(store, [hook(receiver.url)], "e1")
        assert sender.run() == 1
    ((headers, body),) = receiver.requests
    event = json.loads(body)
    assert (event["specversion"], event["id"], event["type"]) == ("1.0", "e1", "driftwatch.drift.opened")
    assert (event["subject"], event["data"]) == ("tenant=a", {"number": 1})
    assert headers["content-type"].startswith("application/cloudevents+json")
    for secret in (SECRET, OLD_SECRET):
        assert Verifier(secret).verify(body, headers) == event
    # The same from the specification alone: HMAC-SHA256 over id, timestamp and body.
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert f"v1,{expected}" in headers["webhook-signature"].split(" ")
    assert [row.state for row in deliveries(store)] == ["delivered"]


def test_a_failure_is_tried_again_with_the_same_id_and_body(store: Store) -> None:
    answers: list[tuple[int, dict[str, str]]] = [(500, {}), (302, {"location": "http://127.0.0.1:1/"})]
    with receiving(*answers) as receiver, courier(store, hook(receiver.url, SECRET)) as sender:
        queue(store, [hook(receiver.url)], "e1")
        waits = []
        for _ in range(3):
            make_due(store)
            started = time.time()
            sender.run()
            waits.append(deliveries(store)[0].due_at - started)
    assert [headers["webhook-id"] for headers, _ in receiver.requests] == ["e1"] * 3
    assert len({body for _, body in receiver.requests}) == 1
    assert 3 < waits[0] < 7 < waits[1] < 13
    (row,) = deliveries(store)
    assert (row.state, row.attempts, row.error) == ("delivered", 3, None)


def test_retry_after_is_honoured(store: Store) -> None:
    with receiving((429, {"retry-after": "1000"})) as receiver, courier(store, hook(receiver.url)) as sender:
        queue(store, [hook(receiver.url)], "e1")
        sender.run()
    (row,) = deliveries(store)
    assert row.error == "429 Too Many Requests"
    assert 700 < row.due_at - time.time() < 1300


def test_a_retry_after_that_is_no_number_holds_up_nobody(store: Store) -> None:
    with receiving((503, {"retry-after": "\xb2"})) as receiver, courier(store, hook(receiver.url)) as sender:
        queue(store, [hook(receiver.url)], "e1")
        assert sender.run() == 0
    assert deliveries(store)[0].attempts == 1


def test_a_receiver_that_drips_holds_up_others_only_until_the_deadline(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driftwatch.retrain.delivery.DEADLINE_S", 0.5)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as slow, receiving() as receiver:

        def drip() -> None:
            connection, _ = slow.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
                while not over.wait(0.1):
                    connection.sendall(b"y")

        thread = threading.Thread(target=drip)
        thread.start()
        slow_url = f"http://127.0.0.1:{slow.getsockname()[1]}/"
        hooks = [hook(slow_url, name="slow"), hook(receiver.url, name="quick")]
        with courier(store, *hooks) as sender:
            queue(store, hooks, "e1")
            assert sender.run() == 1
            over.set()
            thread.join()
    found = {row.endpoint: (row.state, row.error) for row in deliveries(store)}
    assert found["quick"] == ("delivered", None)
    assert found["slow"][0] == "pending"
    assert "no whole answer within" in (found["slow"][1] or "")


def test_events_stay_in_order_behind_one_that_fails(store: Store) -> None:
    with receiving((500, {})) as receiver, courier(store, hook(receiver.url)) as sender:
        queue(store, [hook(receiver.url)], "e1", "e2", "e3")
        assert sender.run() == 0
        make_due(store)
        assert sender.run() == 3
    assert [headers["webhook-id"] for headers, _ in receiver.requests] == ["e1", "e1", "e2", "e3"]


def test_a_dead_endpoint_does_not_hold_up_another(store: Store) -> None:
    with receiving() as receiver:
        hooks = [hook("http://127.0.0.1:9/", name="dead"), hook(receiver.url, name="alive")]
        with courier(store, *hooks) as sender:
            queue(store, hooks, "e1", "e2")
            assert sender.run() == 2
    assert {(row.endpoint, row.state) for row in deliveries(store)} == {("dead", "pending"), ("alive", "delivered")}


@pytest.mark.parametrize("how", ["gone", "attempts"])
def test_a_delivery_is_given_up_in_the_end(store: Store, how: str) -> None:
    answers: list[tuple[int, dict[str, str]]] = [(410, {})] if how == "gone" else [(500, {})] * ATTEMPTS
    with receiving(*answers) as receiver, courier(store, hook(receiver.url)) as sender:
        queue(store, [hook(receiver.url)], "e1")
        for _ in range(len(answers)):
            make_due(store)
            sender.run()
        assert len(receiver.requests) == len(answers)
    assert [row.state for row in deliveries(store)] == ["dead"]


def test_an_endpoint_gets_the_types_it_asked_for(store: Store) -> None:
    hooks = [hook("http://x", name="retrain", events=("driftwatch.retrain.*",)), hook("http://x", name="all")]
    queue(store, hooks, "e1")
    queue(store, hooks, "e2", type="driftwatch.retrain.requested")
    assert [(row.endpoint, row.event_id) for row in deliveries(store)] == [
        ("all", "e1"),
        ("retrain", "e2"),
        ("all", "e2"),
    ]


def test_a_crash_between_answer_and_record_sends_the_same_id_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> int:
        raise KeyboardInterrupt

    with receiving() as receiver, courier(store, hook(receiver.url)) as sender:
        queue(store, [hook(receiver.url)], "e1")
        with monkeypatch.context() as patch:
            patch.setattr("driftwatch.retrain.delivery._settle", crash)
            with pytest.raises(KeyboardInterrupt):
                sender.run()
        assert sender.run() == 1
    assert [headers["webhook-id"] for headers, _ in receiver.requests] == ["e1", "e1"]


def test_a_secret_that_is_none_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="`webhooks\\[\\].secrets` of 'a'"):
        Courier(None, [hook("http://x", "whsec_")])  # type: ignore[arg-type]
