"""The page over HTTP, on both databases: what it says, to whom, and that it never runs what users wrote."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from driftwatch.control.app import create_app
from driftwatch.control.judge import fold
from driftwatch.control.page.door import COOKIE, FAILURES
from driftwatch.control.page.words import KINDS
from driftwatch.records import segment_id
from driftwatch.settings import Settings
from driftwatch.store.connection import Store
from driftwatch.store.schema import Event, Retrain

from .test_causes import NORMAL, Stream
from .test_control import SETTINGS, judge, metrics, record

HOSTILE = "<img src=x onerror=alert(1)>'\"&</script><script>alert(2)</script>{{ 7 * 7 }}"
TOKEN = "the token & no other"


@pytest.fixture
def settings() -> Settings:
    return Settings(**SETTINGS)


@pytest.fixture
def client(store: Store, settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(store, settings), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def locked(sqlite_store: Store) -> Iterator[TestClient]:
    """Control with a token, seen by somebody who has none yet."""
    settings = Settings(**SETTINGS | {"control": {"tick_s": 3600, "token": TOKEN}})
    with TestClient(create_app(sqlite_store, settings), follow_redirects=False) as client:
        yield client


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._text: list[str] = []
        self.feed(html)
        self.text = " ".join(" ".join(self._text).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self._text.append(data)

    def links(self, start: str) -> list[str]:
        return [at for tag, has in self.found if tag == "a" and (at := has.get("href") or "").startswith(start)]


def get(client: TestClient, path: str) -> Elements:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return Elements(answer.text)


def send(client: TestClient, numbers: range, tenant: str = "a", **fields: Any) -> None:
    body = [record(i, tenant, **fields) for i in numbers]
    assert client.post("/v1/samples", json=body).json()["stored"] == len(body)


def test_an_empty_store_says_what_to_do(client: TestClient) -> None:
    text = get(client, "/ui").text
    assert "No request has come in yet" in text
    assert "driftwatch ingest" in text


def test_what_is_not_judged_yet_is_no_figure(client: TestClient) -> None:
    send(client, range(3))
    assert "not enough data" in get(client, "/ui").text
    assert "not enough data" in get(client, "/ui/segments/tenant%3Da").text


def test_figures_are_those_of_the_api(client: TestClient, store: Store, settings: Settings) -> None:
    send(client, range(60))
    judge(store, settings, 0.8)
    (cell,) = client.get("/v1/segments/tenant%3Da").json()["cells"]
    for path in ("/ui", "/ui/segments/tenant%3Da"):
        text = get(client, path).text
        for name, digits in (("hit_rate", 3), ("acceptance_length", 2)):
            found = cell["recent"][name]
            assert f"{found['value']:.{digits}f} {found['lower']:.{digits}f} to {found['upper']:.{digits}f}" in text
        assert f"{cell['baseline']['hit_rate']['value']:.3f}" in text
        assert "costs not set" in text
    for q in ("0.5", "0.95"):
        assert f"{cell['tail'][q]['value']:.3f}" in text


def test_more_segments_are_no_more_queries(client: TestClient, store: Store, settings: Settings) -> None:
    """Nor are more hours: all are read at once, and once, for figures and drawings alike."""
    seen: list[str] = []

    def queries() -> int:
        seen.clear()
        get(client, "/ui")
        return len(seen)

    @sa.event.listens_for(store.engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        seen.append(statement)

    send(client, range(3))
    judge(store, settings, 0.8)
    queries()  # whose connection may be new
    few = queries()
    for number in range(1, 6):
        send(client, range(10 * number, 10 * number + 3), f"t{number}")
    judge(store, settings, 0.8)
    assert queries() == few
    assert sum("cell_hours.sums" in statement for statement in seen) == 1


@pytest.mark.parametrize(("break_even", "said"), [(1.5, "pays"), (3.9, "does not pay"), (None, "costs not set")])
def test_whether_it_pays(sqlite_store: Store, break_even: float | None, said: str) -> None:
    model = SETTINGS["models"][0] | {"break_even": break_even}
    settings = Settings(**SETTINGS | {"models": [model]})
    with TestClient(create_app(sqlite_store, settings)) as client:
        send(client, range(40))
        judge(sqlite_store, settings, 0.8)
        assert f" {said} " in get(client, "/ui").text


def costs(folder: Path) -> str:
    """A cost profile, as entered by hand."""
    loads = [(batch, context) for batch in (1, 4, 16) for context in (0, 64)]
    step: dict[str, Any] = {"c": 0.1, "v": {1: 1.02, 3: 1.05, 5: 1.1}}
    steps = [step | {"batch": batch, "context": context, "step_ms": 20 + batch} for batch, context in loads]
    (folder / "costs.yaml").write_text(json.dumps({"device": "of one's own", "batches": steps}))
    return str(folder / "costs.yaml")


def test_what_it_is_worth_is_told_as_the_api_tells_it(sqlite_store: Store, tmp_path: Path) -> None:
    model = SETTINGS["models"][0] | {"profile": costs(tmp_path), "batch": 4}
    settings = Settings(**SETTINGS | {"models": [model], "value": {"gpu_hour_price": 3.0}})
    with TestClient(create_app(sqlite_store, settings)) as client:
        send(client, range(60))
        judge(sqlite_store, settings, 0.8)
        (cell,) = client.get("/v1/segments/tenant%3Da").json()["cells"]
        worth = cell["value"]
        text = get(client, "/ui/segments/tenant%3Da").text
        value, lower, upper = worth["speedup"]
        assert f"{value:.2f} times as fast" in get(client, "/ui").text
        assert f"Decoding, times as fast {value:.2f} {lower:.2f} to {upper:.2f}" in text
        assert worth["verdict"]["decision"] in ("use", "use_with_gamma")
        for reason in worth["verdict"]["reasons"]:
            assert reason[1:] in text
        assert f"break-even {worth['break_even_acceptance_length']:.3f}" in client.get("/ui/segments/tenant%3Da").text
        assert f"A million tokens, plain {worth['price']['plain']:.2f}" in text
        assert "Costs entered on of one's own, at batch 4.0 (as set)" in text


def test_prompt_lookup_and_waiting_times_are_shown_beside(sqlite_store: Store, tmp_path: Path) -> None:
    drafts = [*SETTINGS["models"][0]["drafts"], {"name": "lookup", "path": "ngram:min=1,max=3"}]
    model = SETTINGS["models"][0] | {"profile": costs(tmp_path), "batch": 4, "drafts": drafts}
    settings = Settings(**SETTINGS | {"models": [model], "slo": {"ttft_s": 0.25}})
    with TestClient(create_app(sqlite_store, settings)) as client:
        for i in range(110):
            send(client, range(i, i + 1), timing={"ttft_s": 0.5 if i % 5 == 0 else 0.1, "e2e_s": 1.0})
        judge(sqlite_store, settings, 0.6)
        found = client.get("/v1/segments/tenant%3Da").json()
        text = get(client, "/ui/segments/tenant%3Da").text
        (beside,), (waits,) = found["untrained"], found["slo"]
        assert beside["verdict"][1:] in text
        assert f"{beside['difference']['lower']:.3f} to {beside['difference']['upper']:.3f}" in text
        assert waits["state"] == "page"
        assert f"time to the first token 0.25 s 0.010 page {waits['windows']['300']['over']:.3f}" in text


def test_a_control_that_follows_says_so(client: TestClient, store: Store, settings: Settings) -> None:
    assert "Another control" not in get(client, "/ui").text
    with TestClient(create_app(store, settings)) as second:
        follows = store.url.get_backend_name() == "postgresql"
        assert ("Another control judges and sends" in get(second, "/ui").text) == follows


def test_a_model_that_has_no_draft_any_more_is_shown(sqlite_store: Store, settings: Settings) -> None:
    with TestClient(create_app(sqlite_store, settings)) as client:
        send(client, range(40))
        judge(sqlite_store, settings, 0.8)
    without = Settings(**SETTINGS | {"models": [{"name": "*", "drafts": []}]})
    with TestClient(create_app(sqlite_store, without)) as client:
        assert "tenant" in get(client, "/ui").text


def test_drift_its_event_and_its_retrain_are_shown(client: TestClient, store: Store, settings: Settings) -> None:
    send(client, range(60))
    judge(store, settings, 0.8)
    send(client, range(60, 160))
    judge(store, settings, 0.2, seed=1)
    (event,) = client.get("/v1/events").json()["events"]
    overview = get(client, "/ui")
    assert "1 event open in 1 of 1 segment" in overview.text
    assert f"/ui/events/{event['id']}" in overview.links("/ui/events/")
    page = get(client, f"/ui/events/{event['id']}")
    assert f"Cause: {event['cause']}" in page.text
    for line in event["details"]["evidence"] + event["details"]["against"]:
        assert line in page.text
    assert f"{event['details']['current']['value']:.3f}" in page.text
    assert client.get("/v1/retrains").json()["retrains"][0]["state"] in page.text
    assert "driftwatch.drift.opened" in page.text


def test_an_engine_that_says_little_has_its_baseline_on_the_scale_of_its_figure(
    client: TestClient, store: Store, settings: Settings
) -> None:
    """Its detector watches a share, people read tokens a window."""
    for i in range(40):
        send(client, range(i, i + 1), engine={"windows": 12, "accepted": 19 + i % 3})
    fold(store, settings, time.time())
    (cell,) = client.get("/v1/segments/tenant%3Da").json()["cells"]
    assert (cell["channel"], cell["metric"], cell["state"]) == ("live", "acceptance_length", "watching")
    normal = 1.0 + cell["gamma"] * cell["baseline"]["acceptance_length"]["value"]
    assert normal == pytest.approx(cell["recent"]["acceptance_length"]["value"], rel=0.01)
    page = get(client, "/ui/segments/tenant%3Da")
    assert f"Baseline of the acceptance length {normal:.3f}" in page.text
    (plot,) = [has for tag, has in page.found if has.get("role") == "img"]
    assert f"baseline {normal:.3f}" in (plot["aria-label"] or "")


def test_on_and_off_the_training_distribution_stand_apart(client: TestClient, store: Store, settings: Settings) -> None:
    Stream(store, settings, client).send(NORMAL, 80)
    cells = {one["split"]: one for one in client.get("/v1/segments/tenant%3Da").json()["cells"]}
    text = get(client, "/ui").text
    for split in ("on", "off"):
        hits = cells[split]["recent"]["hit_rate"]
        line = text.partition(f"incumbent, {split} its training distribution")[2].partition("incumbent")[0]
        assert f"{hits['value']:.3f} {hits['lower']:.3f} to {hits['upper']:.3f}" in line
    share = metrics(client)["driftwatch_off_distribution_ratio"]
    assert f"off the training distribution: {next(iter(share.values())):.3f}" in text


def test_what_users_and_engines_write_is_never_run(client: TestClient, store: Store, settings: Settings) -> None:
    facts = {"engine": HOSTILE, "version": "{{ 7 * 7 }}"}
    send(client, range(30), HOSTILE, model=HOSTILE, deployment=facts)
    judge(store, settings, 0.8)
    with store.write() as session:
        details = {
            "evidence": [HOSTILE],
            "action": HOSTILE,
            "changed": {HOSTILE: {"before": 1, "after": 2}},
        }
        session.add(
            event_of(HOSTILE[:20], details, segment=segment_id({"tenant": HOSTILE}), cause="<b>", draft=HOSTILE)
        )
        session.flush()
        told = {"state": "failed", "reason": HOSTILE, "draft": HOSTILE}
        session.add(Retrain(id="r", event_id=HOSTILE[:20], created_at=1.0, updated_at=1.0, **told))
    overview = get(client, "/ui")
    linked = overview.links("/ui/segments/") + overview.links("/ui/events/")
    paths = {"/ui", *(path.partition("#")[0] for path in linked)}
    assert len(paths) == 3
    for path in paths:
        page = get(client, path)
        assert HOSTILE[:24] in page.text, path
        assert "{{ 7 * 7 }}" in page.text
        assert [has for tag, has in page.found if tag == "script"] == [{"src": "/ui/files/page.js", "defer": None}]
        assert {has["src"] for tag, has in page.found if tag == "img"} == {"/ui/files/page.svg"}
        assert not [name for _, has in page.found for name in has if name.startswith("on") or name == "style"]
        assert not [tag for tag, _ in page.found if tag == "b"]


def event_of(id: str, details: dict[str, Any], **columns: Any) -> Event:
    common = {"kind": "drift", "segment": "tenant=a", "split": "none", "draft": "incumbent", "cause": "unknown"}
    return Event(id=id, details=details, **common | {"opened_at": time.time(), "request_id": ""} | columns)


def test_every_kind_of_event_is_shown_however_little_is_known_of_it(client: TestClient, store: Store) -> None:
    with store.write() as session:
        session.add_all(event_of(f"e-{kind}", {}, kind=kind) for kind in (*KINDS, "of_tomorrow"))
    assert len(get(client, "/ui").links("/ui/events/e-")) >= len(KINDS) + 1
    for kind in (*KINDS, "of_tomorrow"):
        assert "Cause: unknown" in get(client, f"/ui/events/e-{kind}").text


def test_what_is_not_there_is_a_page_too(client: TestClient) -> None:
    for path in ("/ui/segments/tenant%3Dnobody", "/ui/events/none", "/ui/files/..%2Froutes.py", "/ui/files/none"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert not answer.text.startswith("import")
    assert "There is nothing of that name" in client.get("/ui/events/none").text


def test_a_store_that_does_not_answer_is_said(settings: Settings) -> None:
    gone = Store("postgresql+psycopg://nobody@127.0.0.1:9/none")
    answer = TestClient(create_app(gone, settings)).get("/ui")
    gone.close()
    assert answer.status_code == 503
    assert "The store does not answer" in answer.text
    assert "Traceback" not in answer.text


def test_a_browser_may_do_little_with_it(client: TestClient) -> None:
    for path in ("/ui", "/ui/login", "/ui/files/page.css", "/ui/files/page.js", "/ui/events/none"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert client.get("/ui").headers["cache-control"] == "no-store"


def log_in(client: TestClient, token: str, **fields: str) -> Any:
    return client.post("/ui/login", data={"token": token} | fields)


def test_without_the_cookie_there_is_nothing_but_the_login(locked: TestClient) -> None:
    for path in ("/ui", "/ui/segments/tenant%3Da", "/ui/events/e"):
        answer = locked.get(path, headers={"cookie": f"{COOKIE}={int(time.time()) + 99}.{'0' * 64}"})
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/ui/login?next=%2Fui")
        assert "segment" not in answer.text
    assert log_in(locked, "wrong").status_code == 403
    assert "set-cookie" not in log_in(locked, "").headers


def test_the_right_token_opens_the_page_and_the_page_alone(locked: TestClient) -> None:
    answer = log_in(locked, TOKEN, next="/ui/events/e?x=1")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/events/e?x=1")
    cookie = answer.headers["set-cookie"].lower()
    assert {"httponly", "samesite=strict", "path=/ui"} <= {part.strip() for part in cookie.split(";")}
    assert locked.get("/ui").status_code == 200
    held = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
    assert locked.get("/ui", headers=held).status_code == 200
    assert locked.get("/v1/segments", headers=held).status_code == 401, "no other site can use it on the API"
    assert locked.post("/v1/samples", headers=held, json=record(1)).status_code == 401
    assert locked.get("/ui/login").headers["location"] == "/ui"
    assert locked.post("/ui/logout").status_code == 303
    assert locked.get("/ui").status_code == 303


def test_over_https_the_cookie_goes_nowhere_else(locked: TestClient) -> None:
    locked.base_url = locked.base_url.copy_with(scheme="https")
    assert "; secure" in log_in(locked, TOKEN).headers["set-cookie"].lower()


@pytest.mark.parametrize("where", ["https://evil.example/", "//evil.example/ui/", "/v1/config", "\\\\evil", "/uix", ""])
def test_a_login_leads_nowhere_else(locked: TestClient, where: str) -> None:
    assert log_in(locked, TOKEN, next=where).headers["location"] == "/ui"


def test_wrong_tokens_are_slowed_down(locked: TestClient) -> None:
    answers = [log_in(locked, f"guess {i}") for i in range(FAILURES + 1)]
    assert [answer.status_code for answer in answers] == [403] * FAILURES + [429]
    assert 0 < int(answers[-1].headers["retry-after"]) <= 60
    assert log_in(locked, TOKEN).status_code == 429, "or the wait would tell which guess was right"
    assert log_in(locked, "x" * 100_000).status_code == 429
