"""The page in a real browser, over real processes: control, shadow and tap in front of a recorded engine."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.e2e.machine import CHAIN, Machine, completion, prompts, until

pytestmark = pytest.mark.timeout(900)
PATIENCE_S = 240.0
TOKEN = "a token of the page's own, with <marks> & spaces"
HOSTILE = "<img src=x onerror=\"document.title='owned'\">'\"&<script>document.title='owned'</script>"
HOURS = 40
CHANGE, SHIFT = 20, 6
"""Hours ago: another engine version under one model, and one tenant's change of subject under the other."""


class Receiver(BaseHTTPRequestHandler):
    """A pipeline's endpoint that takes whatever comes."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hook() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook"
        server.shutdown()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, hook: str) -> Iterator[Machine]:
    """Two days of recorded requests, one engine upgrade and one tenant's shift among them, then live traffic."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "candidates").mkdir()
    one = Machine(
        folder,
        models=[
            {"name": "*", "drafts": [{"name": "incumbent", "path": str(CHAIN)}], "gamma": 3, "break_even": 2.1},
        ],
        detect={
            "baseline": {"min_requests": 40, "min_hours": 1},
            "tolerance": 0.08,
            "requests_between_false_alarms": 1000,
        },
        retrain={"export_dir": str(folder / "exports"), "candidates_dir": str(folder / "candidates")},
        webhooks=[
            {"name": "pipeline", "url": hook, "secrets": ["whsec_c2VjcmV0"]},
            {"name": "pager", "url": "http://127.0.0.1:9/hook", "secrets": ["whsec_c2VjcmV0"]},
        ],
    )
    settings = one.config.read_text()
    one.config.write_text(settings.replace("tick_s: 0.3", f"tick_s: 1\n  token: {json.dumps(TOKEN)}"))
    try:
        fill(one)
        yield one
    finally:
        one.stop()


def client(machine: Machine) -> httpx.Client:
    headers = {"authorization": "Bearer " + TOKEN}
    return httpx.Client(base_url=machine.control, headers=headers, timeout=60, trust_env=False)


def fill(machine: Machine) -> None:
    machine.start_engine()
    machine.start_control()
    with client(machine) as control:
        sent = history(time.time())
        body = "\n".join(json.dumps(record) for record in sent)
        assert control.post("/v1/samples", content=body).json()["stored"] == len(sent)
        machine.start("shadow")
        until(lambda: machine.judged() == len(sent), PATIENCE_S)
        machine.start_tap()
        live(machine)
        found = until(lambda: asked(control), PATIENCE_S)
        shutil.copytree(CHAIN, machine.folder / "candidates" / "new")
        path = str(machine.folder / "candidates" / "new")
        answer = control.post(f"/v1/retrains/{found['id']}/candidate", json={"path": path})
        assert answer.status_code == 202, answer.text
        until(lambda: control.get("/v1/candidates").json()["candidates"][0]["verdict"], PATIENCE_S)


def history(now: float) -> list[dict[str, Any]]:
    """Recorded requests, spread over hours as they may have come; ids, tenants and times are made up."""
    kinds: dict[str, list[dict[str, Any]]] = {"A": [], "B": []}
    for record in prompts():
        kinds[record["labels"]["domain"]].append(record)
    found = []
    for ago in range(HOURS, 0, -1):
        for tenant, per_hour, model in (("acme", 10, "m"), ("globex", 6, "m"), (HOSTILE, 2, "mini")):
            kind = kinds["B" if tenant == "acme" and ago <= SHIFT else "A"]
            for i in range(per_hour):
                record = kind[(ago * per_hour + i) % len(kind)]
                at = datetime.fromtimestamp(now - ago * 3600 + i * 300, UTC)
                made = {"id": f"{tenant[:6]}-{ago}-{i}", "labels": {"tenant": tenant}, "ts": at.isoformat()}
                version = "0.31.0" if model == "mini" and ago > CHANGE else "0.32.0"
                kept = {key: record[key] for key in ("prompt_token_ids", "output_token_ids", "temperature")}
                found.append(kept | made | {"model": model, "deployment": {"engine": "vllm", "version": version}})
    return found


def live(machine: Machine) -> None:
    """What is sent now, through the tap."""
    records = [record for record in prompts() if record["labels"]["domain"] == "A"]
    with httpx.Client(base_url=machine.tap, timeout=60, trust_env=False) as engine:
        for record in records[:12]:
            body = completion(record, stream=True)
            assert engine.post("/v1/completions", json=body, headers={"x-tenant": "globex"}).status_code == 200


def asked(control: httpx.Client) -> dict[str, Any] | None:
    retrains: list[dict[str, Any]] = control.get("/v1/retrains").json()["retrains"]
    return next((one for one in retrains if one["state"] == "requested"), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        yield driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])


@dataclass
class Seen:
    """One tab, and what went wrong in it."""

    page: Page
    complaints: list[str]
    asked: set[str]


@contextmanager
def tab(browser: Browser, machine: Machine, width: int = 1280, scheme: Any = "light", **options: Any) -> Iterator[Seen]:
    """A tab that has logged in, as a person does."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
    seen = Seen(context.new_page(), [], set())
    seen.page.on("console", lambda message: seen.complaints.append(message.text))
    seen.page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    seen.page.on("request", lambda request: seen.asked.add(request.url))
    seen.page.goto(f"{machine.control}/ui")
    seen.page.fill("#token", TOKEN)
    seen.page.keyboard.press("Enter")
    seen.page.wait_for_selector("#segments")
    yield seen
    context.close()


def event_of(page: Page, said: str) -> str:
    return page.locator("#events tbody").get_by_role("link", name=said).first.get_attribute("href") or ""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_readable(browser: Browser, machine: Machine, width: int, scheme: Any) -> None:
    with tab(browser, machine, width, scheme) as seen:
        page = seen.page
        segments = [link.get_attribute("href") for link in page.locator(".group th > a:first-child").all()]
        events = [event_of(page, said) for said in ("acceptance fell", "the deployment changed")]
        assert len(segments) == 3
        for path in ("/ui", *segments, *events):
            page.goto(f"{machine.control}{path}")
            for unfold in page.locator("summary").all():
                unfold.click()
            assert page.get_by_role("heading", level=1).count() == 1, path
            assert page.evaluate("document.documentElement.scrollWidth") == width, f"{path} sticks out at the side"
            worst = min(page.evaluate(CONTRAST), key=lambda found: float(found[0]))
            assert worst[0] >= 4.5, f"WCAG 2.1, 1.4.3: {worst} on {path}"
            assert page.evaluate("document.title") != "owned"
        assert all(url.startswith(f"{machine.control}/ui") for url in seen.asked), "it asks nobody else"
        assert seen.complaints == []


def test_the_figures_are_those_of_the_api(browser: Browser, machine: Machine) -> None:
    with tab(browser, machine) as seen, client(machine) as control:
        shown = seen.page.locator("#segments").inner_text()
        segment = control.get("/v1/segments/tenant%3Dacme").json()
        (cell,) = [one for one in segment["cells"] if one["channel"] == "shadow"]
        length, hits = cell["recent"]["acceptance_length"], cell["recent"]["hit_rate"]
        assert f"{length['lower']:.2f} to {length['upper']:.2f}" in shown
        assert f"{hits['lower']:.3f} to {hits['upper']:.3f}" in shown
        assert f"{cell['baseline']['hit_rate']['value']:.3f}" in shown
        seen.page.get_by_role("link", name="tenant acme").first.click()
        seen.page.get_by_text("The hours as a table").first.click()
        rows = seen.page.get_by_role("region", name="Hours of incumbent").get_by_role("row").all()[1:]
        hours = [row.get_by_role("cell").first.inner_text() for row in rows]
        assert sum(int(requests) for requests in hours) == cell["requests"] == 10 * HOURS
        plots = seen.page.get_by_role("img", name=re.compile("hours with data"))
        assert [("break-even 2.100" in (plot.get_attribute("aria-label") or "")) for plot in plots.all()] == [
            True,
            False,
        ]
        assert seen.complaints == []


def test_an_event_tells_the_whole_story(browser: Browser, machine: Machine) -> None:
    """Cause and evidence, the retrain, its candidate's verdict, the webhooks: of the event that asked for training."""
    with tab(browser, machine) as seen, client(machine) as control:
        page = seen.page
        page.locator("#retrains").get_by_role("link", name=re.compile("evaluating|promoted|rejected")).first.click()
        told = page.locator("main").inner_text()
        candidate = control.get("/v1/candidates").json()["candidates"][0]
        (row,) = [one for one in candidate["verdict"]["table"] if one["segment"] == "tenant=acme"]
        assert "no known fact of the deployment changed" in told
        assert f"{row['incumbent']:.3f}" in told
        assert candidate["path"] in told
        assert re.search(r"driftwatch\.drift\.opened\s+pipeline\s+delivered", told)
        assert re.search(r"driftwatch\.drift\.opened\s+pager\s+waiting", told)
        assert re.search(r"driftwatch\.retrain\.requested\s+pipeline\s+delivered", told)
        assert seen.complaints == []


def test_labels_of_users_stay_text(browser: Browser, machine: Machine) -> None:
    with tab(browser, machine) as seen:
        page = seen.page
        page.get_by_role("link", name=HOSTILE).first.click()
        assert HOSTILE in page.get_by_role("heading", level=1).inner_text()
        assert page.locator("main img, main script").count() == 0
        assert page.title().endswith(" - driftwatch")
        assert seen.complaints == []
        page.evaluate(INJECT)
        assert page.title().endswith(" - driftwatch"), "and what got in anyway would not run"
        assert "Content Security Policy" in seen.complaints[0]


def test_the_keyboard_reaches_everything(browser: Browser, machine: Machine) -> None:
    with tab(browser, machine) as seen:
        page = seen.page
        page.goto(f"{machine.control}/ui")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.goto(f"{machine.control}/ui")
        wanted = page.locator("a, button").count()
        outlines = []
        for _ in range(wanted):
            page.keyboard.press("Tab")
            outlines.append(page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
        assert set(outlines) == {"solid"}
        assert page.evaluate("document.activeElement === [...document.querySelectorAll('a, button')].at(-1)")
        assert seen.complaints == []


def test_it_follows_by_itself_and_stays_where_it_was(browser: Browser, machine: Machine) -> None:
    with tab(browser, machine, 390) as seen, client(machine) as control:
        page = seen.page
        page.clock.install()
        page.goto(f"{machine.control}/ui")
        link = page.locator("#deliveries-title")
        link.scroll_into_view_if_needed()
        page.locator("#deployments").get_by_role("link").first.focus(timeout=5000)
        before = page.evaluate("[window.scrollY, document.activeElement.outerHTML]")
        assert before[0] > 500
        stored = page.locator(".tiles dd").first.inner_text()
        record = history(time.time())[-1] | {"id": f"fresh-{time.time()}"}
        assert control.post("/v1/samples", json=record).json()["stored"] == 1
        page.clock.fast_forward(15_000)
        expect(page.locator(".tiles dd").first).not_to_have_text(stored)
        assert page.evaluate("[window.scrollY, document.activeElement.outerHTML]") == before
        assert seen.complaints == []
        page.context.set_offline(True)
        page.clock.fast_forward(15_000)
        expect(page.locator("#fresh")).to_have_text("control does not answer: figures are old")
        page.context.set_offline(False)
        page.get_by_role("button", name="Pause").click()
        page.clock.fast_forward(40_000)
        expect(page.locator("#fresh")).to_have_text("paused")


def test_it_needs_no_script(browser: Browser, machine: Machine) -> None:
    with tab(browser, machine, java_script_enabled=False) as seen:
        assert "acceptance fell" in seen.page.locator("#events").inner_text()
        seen.page.get_by_role("button", name="Log out").click()
        seen.page.wait_for_selector("#token")


def test_the_token_stays_with_its_owner(browser: Browser, machine: Machine) -> None:
    with tab(browser, machine) as seen:
        page = seen.page
        (cookie,) = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/ui")
        assert TOKEN not in cookie["value"]
        assert page.evaluate("document.cookie") == ""
        page.get_by_role("button", name="Log out").click()
        page.wait_for_selector("#token")
        page.goto(f"{machine.control}/ui/segments/tenant%3Dacme")
        assert page.locator("#segments, .plot").count() == 0
        assert seen.complaints == []
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("[role=alert]")
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector(".plot")
        assert page.url == f"{machine.control}/ui/segments/tenant%3Dacme", "back to where one wanted to go"


INJECT = """() => {
  const script = document.createElement('script');
  script.textContent = "document.title = 'owned'";
  document.body.append(script);
}"""
CONTRAST = """() => {
  const parse = c => c.match(/[\\d.]+/g).slice(0, 4).map(Number);
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
                       return .2126 * r + .7152 * g + .0722 * b; };
  const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
                        if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
  const own = e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  return [...document.querySelectorAll('body *')]
    .filter(e => own(e) && e.getClientRects().length && !['TITLE', 'title'].includes(e.tagName))
    .map(e => { const s = getComputedStyle(e);
                const fore = parse(e instanceof SVGElement ? s.fill : s.color).slice(0, 3);
                const [a, b] = [light(fore), light(ground(e))].sort((x, y) => y - x);
                return [(a + .05) / (b + .05), e.textContent.trim().slice(0, 40), s.color]; });
}"""
