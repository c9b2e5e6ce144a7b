"""Delivering webhooks to a real receiver: signed, in order, at least once, and given up in the end."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from standardwebhooks import Webhook as Verifier

from driftwatch.control.app import create_app
from driftwatch.errors import SettingsError
from driftwatch.retrain.announce import announce
from driftwatch.retrain.delivery import ATTEMPTS, Courier
from driftwatch.settings import Settings, Webhook
from driftwatch.store.connection import Store
from driftwatch.store.schema import Delivery
from tests.receiving import receiving

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()
OLD_SECRET = "whsec_" + base64.b64encode(b"76543210fedcba9876543210").decode()


def hook(url: str, *secrets: str, name: str = "a", events: tuple[str, ...] = ("*",), **more: Any) -> Webhook:
    return Webhook(name=name, url=url, secrets=list(secrets), events=list(events), **more)


def queue(store: Store, hooks: list[Webhook], *names: str, type: str = "driftwatch.drift.opened") -> None:
    with store.write() as session:
        for name in names:
            announce(session, hooks, id=name, type=type, subject="tenant=a", at=time.time(), data={"event_id": "1"})


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
    assert (event["subject"], event["data"]) == ("tenant=a", {"event_id": "1"})
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
    assert receiver.ids == ["e1"] * 3
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
    assert receiver.ids == ["e1", "e1", "e2", "e3"]


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
    assert receiver.ids == ["e1", "e1"]


def test_a_secret_that_is_none_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="`webhooks\\[\\].secrets` of 'a'"):
        Courier(None, [hook("http://x", "whsec_")])  # type: ignore[arg-type]


def test_a_date_in_retry_after_is_honoured(store: Store) -> None:
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=1000), usegmt=True)
    with receiving((503, {"retry-after": at})) as receiver, courier(store, hook(receiver.url)) as sender:
        queue(store, [hook(receiver.url)], "e1")
        sender.run()
    assert 700 < deliveries(store)[0].due_at - time.time() < 1300


def test_a_redirect_is_a_failure_and_not_followed(store: Store) -> None:
    with receiving() as other:
        answer = (307, {"location": other.url})
        with receiving(answer) as receiver, courier(store, hook(receiver.url)) as sender:
            queue(store, [hook(receiver.url)], "e1")
            assert sender.run() == 0
    assert other.requests == []
    (row,) = deliveries(store)
    assert (row.state, row.error) == ("pending", "307 Temporary Redirect")


def test_an_endless_answer_is_not_read(store: Store) -> None:
    """It says 10 GB, and sends as long as somebody reads."""
    sent: list[int] = []

    def flood(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 10000000000\r\n\r\n")
            with contextlib.suppress(OSError):
                while sum(sent) < 200_000_000:
                    sent.append(connection.send(b"x" * 65536))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=flood, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with courier(store, hook(url)) as sender:
            queue(store, [hook(url)], "e1")
            assert sender.run() == 1
            thread.join(timeout=10)
        assert not thread.is_alive()
    assert sum(sent) < 20_000_000


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed one for localhost, and its key."""
    made, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", made], check=True, capture_output=True)
    return made, key


def test_a_certificate_that_is_not_trusted_or_becomes_another_gets_nothing(store: Store, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trusted, key = certificate(tmp_path, "first")
    context.load_cert_chain(trusted, key)
    with receiving() as receiver:
        receiver.server.socket = context.wrap_socket(receiver.server.socket, server_side=True)
        url = receiver.url.replace("http://127.0.0.1", "https://localhost")
        with courier(store, hook(url)) as sender:
            queue(store, [hook(url)], "e1")
            assert sender.run() == 0
        assert receiver.requests == []
        (row,) = deliveries(store)
        assert row.state == "pending"
        assert "CERTIFICATE_VERIFY_FAILED" in (row.error or "")
        # Once it is trusted the same event arrives: the name is verified though the address was resolved beforehand.
        make_due(store)
        sender = Courier(store, [hook(url)])
        sender._client = httpx.Client(verify=ssl.create_default_context(cafile=str(trusted)))
        assert sender.run() == 1
        # The next morning somebody else answers there.
        context.load_cert_chain(*certificate(tmp_path, "second"))
        queue(store, [hook(url)], "e2")
        assert sender.run() == 0
        sender.close()
    assert receiver.ids == ["e1"]
    assert receiver.requests[0][0]["host"] == url.removeprefix("https://").removesuffix("/hook")
    last = deliveries(store)[-1]
    assert (last.event_id, last.state) == ("e2", "pending")
    assert "CERTIFICATE_VERIFY_FAILED" in (last.error or "")


def test_a_name_that_answers_otherwise_the_second_time_gains_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: what was looked at is what is connected to."""
    resolve, asked = socket.getaddrinfo, list[str]()

    def rebinding(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        asked.append(str(host))
        if host != "rebind.example":
            return resolve(host, port, *rest, **more)
        address = "127.0.0.1" if asked.count("rebind.example") == 1 else "169.254.169.254"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 80))]

    with receiving() as receiver:
        url = receiver.url.replace("127.0.0.1", "rebind.example")
        with courier(store, hook(url)) as sender:
            monkeypatch.setattr(socket, "getaddrinfo", rebinding)
            queue(store, [hook(url)], "e1", "e2")
            assert sender.run() == 1
    assert receiver.ids == ["e1"]
    assert receiver.requests[0][0]["host"] == url.removeprefix("http://").removesuffix("/hook")
    assert asked.count("rebind.example") == 2  # once a delivery, by us alone
    assert "169.254.169.254, a link-local, metadata or multicast address" in (deliveries(store)[-1].error or "")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "ReadTimeout"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000, "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 5_000_000, "RemoteProtocolError"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "RemoteProtocolError"),
    ],
)
def test_a_receiver_that_hangs_or_talks_nonsense_is_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, answer: bytes, error: str
) -> None:
    monkeypatch.setattr("driftwatch.retrain.delivery.TIMEOUT_S", 1.0)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(answer)
                over.wait(20)

        thread = threading.Thread(target=talk)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with courier(store, hook(url)) as sender:
            queue(store, [hook(url)], "e1")
            assert sender.run() == 0
        over.set()
        thread.join(timeout=10)
    (row,) = deliveries(store)
    assert (row.state, row.attempts) == ("pending", 1)
    assert error in (row.error or "")
    assert len(row.error or "") < 300


@pytest.mark.parametrize(
    ("url", "hosts", "error"),
    [
        ("http://169.254.169.254/latest", (), "a link-local, metadata or multicast address: never sent to"),
        ("http://[fe80::1]/", (), "never sent to"),
        ("http://[::ffff:169.254.1.1]/", (), "never sent to"),
        ("http://0.0.0.0:1/", (), "never sent to"),
        ("http://127.0.0.1:1/", ("*.example.com",), "the host 127.0.0.1 is not in delivery.hosts"),
        ("http://no-such-host.invalid/", (), "gaierror"),
    ],
)
def test_an_address_that_nothing_may_go_to(store: Store, url: str, hosts: tuple[str, ...], error: str) -> None:
    sender = Courier(store, [hook(url)], hosts)
    queue(store, [hook(url)], "e1")
    assert sender.run() == 0
    sender.close()
    assert error in (deliveries(store)[0].error or "")


def test_an_allowed_host_is_sent_to(store: Store) -> None:
    with receiving() as receiver:
        sender = Courier(store, [hook(receiver.url)], ["127.0.*"])
        queue(store, [hook(receiver.url)], "e1")
        assert sender.run() == 1
        sender.close()


def test_a_dead_delivery_is_sent_again_under_its_own_id(store: Store) -> None:
    with receiving((410, {}), (410, {})) as receiver:
        hooks = [hook(receiver.url, name="a"), hook(receiver.url, name="b")]
        settings = Settings(webhooks=hooks, control={"tick_s": 3600})
        with courier(store, *hooks) as sender, TestClient(create_app(store, settings)) as client:
            queue(store, hooks, "e1")
            assert client.post("/v1/deliveries/e1/redrive").status_code == 409
            sender.run()
            assert [row.state for row in deliveries(store)] == ["dead", "dead"]
            assert client.post("/v1/deliveries/none/redrive").status_code == 404
            answer = client.post("/v1/deliveries/e1/redrive?endpoint=a")
            assert (answer.status_code, answer.json()) == (200, {"id": "e1", "endpoints": ["a"]})
            assert sender.run() == 1
    assert receiver.ids == ["e1"] * 3
    assert {row.endpoint: row.state for row in deliveries(store)} == {"a": "delivered", "b": "dead"}


def test_a_rotated_secret_signs_without_a_restart(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text(OLD_SECRET)
    with receiving() as receiver:
        one = hook(receiver.url, secrets_file=file)
        with courier(store, one) as sender:
            for name, active in (("e1", [OLD_SECRET]), ("e2", [OLD_SECRET, SECRET]), ("e3", [SECRET])):
                file.write_text("\n".join(active))
                queue(store, [one], name)
                assert sender.run() == 1
                headers, body = receiver.requests[-1]
                assert len(headers["webhook-signature"].split(" ")) == len(active)
                for secret in active:
                    Verifier(secret).verify(body, headers)
            file.unlink()
            queue(store, [one], "e4")
            assert sender.run() == 0
    assert "secrets_file" in (deliveries(store)[-1].error or "")


def test_github_gets_a_repository_dispatch(store: Store) -> None:
    """As documented for `POST /repos/{owner}/{repo}/dispatches`, API version 2022-11-28."""
    with receiving() as receiver:
        one = hook(receiver.url, SECRET, preset="github", token="ghp_x")
        with courier(store, one) as sender:
            queue(store, [one], "e1")
            assert sender.run() == 1
    ((headers, body),) = receiver.requests
    sent = json.loads(body)
    assert set(sent) == {"event_type", "client_payload"}
    assert sent["event_type"] == "driftwatch.drift.opened"
    assert len(sent["client_payload"]) <= 10
    assert sent["client_payload"]["event"]["id"] == "e1"
    assert headers["accept"] == "application/vnd.github+json"
    assert headers["x-github-api-version"] == "2022-11-28"
    assert headers["authorization"] == "Bearer ghp_x"
    assert headers["content-type"] == "application/json"
    assert Verifier(SECRET).verify(body, headers) == sent  # over the bytes that were sent


def test_argo_gets_json_with_the_attributes_in_headers(store: Store) -> None:
    with receiving() as receiver:
        one = hook(receiver.url, preset="argo", token="t", headers={"X-Own": "1"})
        with courier(store, one) as sender:
            queue(store, [one], "e1")
            assert sender.run() == 1
    ((headers, body),) = receiver.requests
    assert json.loads(body)["data"] == {"event_id": "1"}
    assert headers["content-type"] == "application/json"
    assert (headers["ce-id"], headers["ce-type"]) == ("e1", "driftwatch.drift.opened")
    assert (headers["authorization"], headers["x-own"]) == ("Bearer t", "1")


def test_a_template_gives_the_body(store: Store, tmp_path: Path) -> None:
    """The shape of a Kubeflow pipeline run, for one."""
    file = tmp_path / "body.json"
    file.write_text(
        json.dumps({"display_name": "run of ${data.event_id}", "runtime_config": {"parameters": {"event": "${data}"}}})
    )
    with receiving() as receiver:
        one = hook(receiver.url, template=file)
        with courier(store, one) as sender:
            queue(store, [one], "e1")
            assert sender.run() == 1
    assert json.loads(receiver.requests[0][1]) == {
        "display_name": "run of 1",
        "runtime_config": {"parameters": {"event": {"event_id": "1"}}},
    }
    file.write_text("{")
    with pytest.raises(SettingsError, match="`webhooks\\[\\].template` of 'a'"):
        Courier(store, [one])
